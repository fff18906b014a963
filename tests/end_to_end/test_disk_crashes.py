"""Servers with a disk that are killed at any moment: what was durable is there, and
nothing else is anything but what was put.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from tests import warm
from tests.cli.in_process import run_here

KIB = 1024
ROUNDS = 4


@contextmanager
def served(folder: Path, *settings: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server on the disk, and its URL; killed at the end unless it has ended."""
    socket = folder / "socket"
    command = [
        *(sys.executable, "-m", "infinistore", "serve", "--service-port", "0", "--manage-port", "off"),
        *("--unix-socket", str(socket), "--prealloc-size", "4MiB", "--minimal-allocate-size", "4KiB"),
        *("--disk", f"{folder / 'disk'}:64MiB", "--disk-admission", "eager", "--log-level", "error", *settings),
    ]
    server = warm.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("listening")
        yield server, f"shm://{socket}"
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


def until_recovered(store: BlockingStore) -> None:
    while True:
        disk = store.stats().disk
        assert disk is not None
        if disk.disks[0].state != "recovering":
            return


@pytest.mark.nightly
def test_what_was_flushed_survives_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    chance = random.Random(3)
    durable: dict[str, bytes] = {}
    later: dict[str, set[bytes]] = {}
    """What may be there instead of what is durable: puts that came after it."""
    deleted: set[str] = set()
    for turn in range(ROUNDS):
        with served(tmp_path) as (server, url), blocking.open_store(url) as store:
            until_recovered(store)
            assert not any(store.exists_many(sorted(deleted)))
            for key, found in zip(durable, store.get_many(list(durable)), strict=True):
                assert found is not None, f"{key} was durable"
                assert bytes(found) in {durable[key], *later.get(key, ())}
                durable[key] = bytes(found)
            later.clear()
            for step in range(chance.randrange(3, 12)):
                batch = {f"k{chance.randrange(120)}": chance.randbytes(chance.randrange(1, 64 * KIB)) for _ in range(8)}
                store.put_many(batch)
                deleted -= batch.keys()
                if chance.random() < 0.7:
                    assert store.flush(list(batch)) == len(batch), (turn, step)
                    durable |= batch
                    for key in batch:
                        later.pop(key, None)
                else:
                    for key, block in batch.items():
                        if key in durable:
                            later.setdefault(key, set()).add(block)
                if chance.random() < 0.3:
                    gone = [key for key in durable if chance.random() < 0.1]
                    store.delete(gone)
                    deleted |= set(gone)
                    for key in gone:
                        del durable[key]
                        later.pop(key, None)
            server.send_signal(signal.SIGKILL)


def test_what_waited_is_written_when_the_server_is_stopped(tmp_path: Path) -> None:
    blocks = {f"k{index}": bytes([index]) * 5000 for index in range(50)}
    with served(tmp_path) as (server, url):
        with blocking.open_store(url) as store:
            store.put_many(blocks)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    with served(tmp_path) as (server, url), blocking.open_store(url) as store:
        until_recovered(store)
        assert store.exists_many(list(blocks)).in_memory == 0
        assert [bytes(block or b"") for block in store.get_many(list(blocks))] == list(blocks.values())


def refusal_of(disk: str, folder: Path) -> str:
    """What a server says that may not have this disk; it leaves the folder alone."""
    (folder / "file").write_text("mine")
    flags = ("--service-port", "0", "--manage-port", "off", "--unix-socket", "off", "--prealloc-size", "4MiB")
    ended = run_here("serve", *flags, "--disk", disk, environment=os.environ, cwd=folder)
    assert ended.returncode == 2
    assert (folder / "file").read_text() == "mine"
    return ended.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize(
    ("disk", "message"),
    [
        ("{0}/file:64MiB", "file"),
        ("{0}/none/disk:64MiB", "none"),
        ("{0}/full:1MiB", "has a size of 1MiB"),
        ("{0}/large:1PiB", "large"),
    ],
)
def test_a_disk_that_cannot_be_used_is_refused_before_anything_is_changed(
    disk: str, message: str, tmp_path: Path
) -> None:
    assert message in refusal_of(disk.format(tmp_path), tmp_path)


def test_a_disk_of_another_server_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _):
        refusal = refusal_of(f"{tmp_path}/disk:64MiB", tmp_path)
        assert f"is in use by process {server.pid}" in refusal
