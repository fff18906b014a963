"""Blocks that are on disk only, for the tests of every engine: what a look-up finds
there is read ahead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinistore.blocking import BlockingStore
from tests.bad_days.servers import ServerProcess, running_server_process

__all__ = ["leave_on_disk", "no_prefetch", "running_server_with_disk", "wait_until_in_memory"]


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

    monkeypatch.setattr("infinistore.client.requests.Prefetch.__init__", refuse)
