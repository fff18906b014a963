"""The counts of an engine's adapter, and a log that does not repeat itself.

An engine continues without its store, for thousands of calls. So the log mentions a
lost store once, and once more when it is back, with the number of calls that failed
meanwhile.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from infinistore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InfiniStoreException,
    ProtocolError,
    StoreUnavailable,
)

_T = TypeVar("_T")
_OUTAGES = (StoreUnavailable, DeadlineExceeded, AuthenticationFailed, ProtocolError)


class Record:
    """Counts what adapters do, and logs each outage and each other problem once.

    Thread-safe. `counts` has what the adapter counts, `failed`, the calls that failed,
    and `bad`, the blocks whose size or checksum was wrong.
    """

    def __init__(self, log: logging.Logger, store: str) -> None:
        self._log = log
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}  # what is wrong: "" for the store itself, or the name of a call; and how often
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    @property
    def is_healthy(self) -> bool:
        """Whether the last call to the store reached it."""
        return "" not in self._open

    def count(self, **amounts: int) -> None:
        """Add to counts."""
        with self._lock:
            self._counts.update(amounts)

    @contextmanager
    def trying(self, call: str, errors: type[Exception] = InfiniStoreException) -> Iterator[None]:
        """Note whether a call succeeds within the `with` statement. If it fails by one
        of these errors, the program goes on behind that.
        """
        try:
            yield
        except errors as error:
            self.failed(call, error)
        else:
            self.succeeded(call)

    def guarded(self, call: str, work: Callable[[], _T], otherwise: _T) -> _T:
        """Return the result of `work`; `otherwise` if it fails: an engine goes on."""
        with self.trying(call, Exception):
            return work()
        return otherwise

    def failed(self, call: str, error: BaseException) -> None:
        """Count a failed call. Log it if that is new."""
        topic = "" if isinstance(error, _OUTAGES) else call
        with self._lock:
            self._counts["failed"] += 1
            self._open[topic] = self._open.get(topic, 0) + 1
            is_new = self._open[topic] == 1
        if is_new:
            self._log.warning(
                "InfiniStore %s: %s failed, and the engine goes on without: %s: %s (told once, until it works again)",
                self._store,
                call,
                type(error).__name__,
                str(error),
            )

    def bad_block(self, error: Exception) -> None:
        """Count a bad block. Only the first is logged."""
        with self._lock:
            self._counts["bad"] += 1
            is_first = self._counts["bad"] == 1
        if is_first:
            self._log.warning(
                "InfiniStore %s: a block is not what it should be, and is dropped: %s: %s (told once; see the counts)",
                self._store,
                type(error).__name__,
                str(error),
            )

    def succeeded(self, call: str) -> None:
        """Note a call that succeeded. Log it if calls failed before."""
        if not self._open:
            return
        with self._lock:
            failures = self._open.pop("", 0) + self._open.pop(call, 0)
        if failures:
            self._log.warning("InfiniStore %s: %s works again; %d calls failed meanwhile", self._store, call, failures)
