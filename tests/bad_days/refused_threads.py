"""A process that gets no more threads, as far as the store's own are concerned."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from trio._core import _thread_cache

__all__ = ["refused_threads"]

_OURS = ("infinistore", "look up", "Trio thread", "asyncio_")


@contextmanager
def refused_threads(error: type[Exception] = RuntimeError) -> Iterator[list[str]]:
    """Refuse every thread that a store wants, itself or through its loop; gives the
    names of the refused.
    """
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith(_OURS):
            return start(thread)
        refused.append(thread.name)
        raise error("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(_thread_cache.THREAD_CACHE, "_idle_workers", {})  # which would do instead of a new one
        yield refused
