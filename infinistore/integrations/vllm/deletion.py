"""Deletes all blocks of an engine, and shortly after what workers were writing.

Workers delete that themselves, and precisely, with the next step (`late_writes`). But
an engine may have no next step for long, or none at all, while others of its model read
what it has left.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from infinistore.blocking import BlockingStore
from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.integrations.internal.resets import BlocksLeft, delete_all

__all__ = ["Deletion"]

LOG = logging.getLogger("vllm.infinistore")

PAUSES_S: Final = (0.25, 2.0)
"""A write waits for others for a twentieth of a second, and is done soon after."""


class Deletion:
    """Deletes the keys with a prefix: `delete`, which one thread calls.

    It is done again some times in a thread, until `is_needless`. `pause` waits there,
    and returns whether to stop.
    """

    def __init__(
        self,
        store: BlockingStore,
        prefix: str,
        is_needless: Callable[[], bool],
        *,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._is_needless = is_needless
        self._pause = pause
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_due = False

    def delete(self) -> bool:
        """Delete all. False if some may be left."""
        if not self._delete():
            return False
        self._stop.set()
        self._stop = threading.Event()
        self._is_due = True
        thread = threading.Thread(target=self._run, args=(self._stop,), name="infinistore-reset", daemon=True)
        try:
            start_thread(thread)
        except StoreUnavailable:
            return True  # it is done again at the end
        self._thread = thread
        return True

    def close(self) -> None:
        """End the thread; do now what it would have done later."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_due and not self._is_needless():
            self._delete()

    def _run(self, stop: threading.Event) -> None:
        for pause_s in PAUSES_S:
            if self._pause(stop, pause_s):
                return
            if self._is_needless():
                break
            self._delete()
        if not stop.is_set():
            self._is_due = False

    def _delete(self) -> bool:
        try:
            delete_all(self._store, [self._prefix])
        except BlocksLeft as left:
            LOG.warning(
                "InfiniStore: a reset of the cache failed, and with it what has asked for it, such as vLLM's sleep and"
                " pause_generation, after which it stays paused (resume_generation ends that, and clear_cache=False"
                " pauses without a reset): %s",
                str(left),
            )
            return False
        return True
