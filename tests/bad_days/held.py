"""What is left of calls that failed: errors with frames, and what callers have in their
hands, which the frames keep.

Without the garbage collector: an engine's tensors should not wait for it.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import infinistore

__all__ = ["held_after", "no_error_kept"]

_PROJECT = Path(infinistore.__file__).resolve().parents[1]
_OURS = tuple(f"{_PROJECT / folder}/" for folder in ("infinistore", "transports", "allocators"))


@contextmanager
def no_error_kept() -> Iterator[None]:
    """After this block, no error that was raised in it and went through our code is
    still there.
    """
    with _without_collector():
        yield
        # What is frozen is not among these: it was there before.
        kept = [error for error in gc.get_objects() if isinstance(error, BaseException) and _last_of_ours(error)]
        places = [f"{error!r} of {_last_of_ours(error)}" for error in kept]
        del kept
        assert not places, f"kept with the frames that it went through: {places}"


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    frozen = gc.get_freeze_count()  # by the whole session, and that stays so
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


def held_after(*calls: Callable[[], Any]) -> int:
    """Make calls, each from a frame that holds something; return how many of these
    things are still there.
    """
    held: WeakSet[_Tensor] = WeakSet()

    def forward(call: Callable[[], Any]) -> None:
        tensor = _Tensor()
        held.add(tensor)
        try:
            call()
        except Exception:  # noqa: BLE001 - whatever it is, it must let go
            return

    with _without_collector():
        for call in calls:
            forward(call)
        return len(held)


class _Tensor:
    """Stands for an activation of a forward pass."""


def _last_of_ours(error: BaseException) -> str:
    """Where in our code it was, if its traceback says so."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(_OURS):
            place = f"{code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
