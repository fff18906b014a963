"""Several processes with one GPU and one server, by shared memory: at the same time,
killed with copies under way, and forked after CUDA has started.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from infinistore import StoreUnavailable
from infinistore.blocking import BlockingStore, open_store
from infinistore.tensors import read_blocks, write_blocks
from tests.asking import until
from tests.bad_days.servers import running_server_process
from tests.gpu.device import DEVICE, REHEARSAL, synchronize
from tests.gpu.peer import BLOCK, BLOCKS, content, named

TOP = Path(__file__).parents[2]
PEERS = 2 if REHEARSAL else 4


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with a pool of 64 MiB that is reached by shared memory."""
    with running_server_process("--prealloc-size", "64MiB", unix_socket=tmp_path / "store.sock") as server:
        yield server.url.replace("tcp", "shm")


@pytest.fixture
def store(url: str) -> Iterator[BlockingStore]:
    with open_store(url, inline_bytes=0) as opened:
        yield opened


def peer(url: str, what: str, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.gpu.peer", url, str(DEVICE), what, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TOP)


def said(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.strip()


def works(store: BlockingStore, name: str) -> None:
    tensor, back = content(name, DEVICE), torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device=DEVICE)
    for _ in range(2):
        write_blocks(store, named(name), BLOCK, tensor)
        read_blocks(store, named(name), BLOCK, back)
    assert torch.equal(back[::2], tensor[::2]) and not back[1::2].any()


def what_is_left(store: BlockingStore) -> tuple[int, int, int]:
    """Clients, leases, and bytes that lost clients can still write."""
    found = store.stats().store
    return found.clients, found.leases, found.quarantined_bytes


@pytest.mark.timeout(300)
def test_processes_share_a_gpu_and_a_pool(url: str, store: BlockingStore) -> None:
    names = [f"peer {number}" for number in range(PEERS)]
    writers = [peer(url, "write", name) for name in names]
    works(store, "here")
    assert [said(writer) for writer in writers] == PEERS * ["right"]
    readers = [peer(url, "read", name) for name in [*names, "here"]]
    assert [said(reader) for reader in readers] == (PEERS + 1) * ["right"]


@pytest.mark.timeout(300)
def test_a_process_that_is_killed_with_copies_under_way_leaves_nothing_behind(url: str, store: BlockingStore) -> None:
    works(store, "here")
    looping = [peer(url, "loop", f"peer {number}") for number in range(PEERS)]
    for process in looping:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(5)] == 5 * ["right\n"]
        process.send_signal(signal.SIGKILL)
        works(store, "here")
    for process in looping:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    until(lambda: what_is_left(store) == (1, 0, 0))
    store.purge()
    works(store, "afterwards")


def test_a_child_that_is_forked_after_cuda_is_refused_and_harms_nobody(store: BlockingStore) -> None:
    works(store, "here")
    synchronize()
    kept: list[Any] = [store]
    child = os.fork()
    if not child:
        status = 1
        try:
            kept[0].put("child/0", b"value")
        except StoreUnavailable:
            status = 0
        with suppress(RuntimeError):
            torch.zeros(1, device=DEVICE)
            status = status if REHEARSAL else 2
        kept.clear()
        gc.collect()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(store, "here")
    assert not store.exists("child/0")
