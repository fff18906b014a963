"""Blocks that are on disk only, for the tests of every engine: what a look-up finds
there is read ahead. And disks that may bring back what is deleted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinistore.aio import AsyncStore
from infinistore.blocking import BlockingStore
from infinistore.errors import DiskFailed
from tests.bad_days.servers import ServerProcess, running_server_process

__all__ = ["bring_back", "leave_on_disk", "no_prefetch", "running_server_with_disk", "wait_until_in_memory"]


@contextmanager
def running_server_with_disk(folder: Path) -> Iterator[ServerProcess]:
    """A server whose pool has 16 MiB, and its disk 64 MiB."""
    flags = ("--disk", f"{folder / 'disk'}:64MiB", "--disk-admission", "eager", "--unix-socket", "auto")
    with running_server_process(*flags) as server:
        yield server


def leave_on_disk(store: BlockingStore) -> list[str]:
    """Have nothing in memory that is not on disk, and then nothing in memory."""
    keys = store.keys()
    assert keys
    assert store.flush(keys) == len(keys)
    store.evict(0, 0)
    found = store.exists_many(keys)
    assert (found, found.in_memory) == ([True] * len(keys), 0)
    return keys


def wait_until_in_memory(store: BlockingStore, keys: list[str]) -> None:
    """Wait for what a look-up has had read ahead; a test that waits in vain times
    out.
    """
    while store.exists_many(keys).in_memory < len(keys):
        pass


def no_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no store of this process send a request to read ahead."""

    def refuse(*_: object) -> None:
        raise AssertionError("there was nothing to read ahead")

    monkeypatch.setattr("infinistore.protocol.messages.Prefetch.__init__", refuse)


def bring_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let deletions of this process's stores tell of a disk that may undo them."""
    at_once, later = BlockingStore.delete, AsyncStore.delete

    def delete(store: BlockingStore, keys: Any) -> int:
        at_once(store, keys)
        raise DiskFailed("it may bring back what is deleted")

    async def delete_later(store: AsyncStore, keys: Any) -> int:
        await later(store, keys)
        raise DiskFailed("it may bring back what is deleted")

    monkeypatch.setattr(BlockingStore, "delete", delete)
    monkeypatch.setattr(AsyncStore, "delete", delete_later)
