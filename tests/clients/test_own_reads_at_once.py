"""Reads without asking that are given up anywhere, and many at a time."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import infinistore
from infinistore import blocking
from infinistore.blocking import BlockingStore
from tests.clients.on_this_host import server_process
from tests.clients.own_reading import arrays_of, knows, needs_tables
from tests.clients.shared_serving import Shared
from tests.clients.test_cancellation import cancel_at_each_await
from tests.server.running import MIB, make_config, running_server

pytestmark = [needs_tables, pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")]


@pytest.mark.parametrize("method", ["get_many", "get_many_into", "lease"])
async def test_a_read_without_asking_that_is_cancelled_anywhere_leaves_nothing_pinned(
    tmp_path: Path, method: str
) -> None:
    config = make_config(unix_socket=str(tmp_path / "store.sock"), prealloc_bytes=16 * MIB)
    url = f"shm://{tmp_path}/store.sock"
    blocks = {"a": b"a" * (3 * MIB), "b": b"b" * (3 * MIB), "c": b"c" * 10}
    async with running_server(config) as server, infinistore.open_store(url) as keeper:
        await keeper.put_many(blocks)

        async def call() -> None:
            async with infinistore.open_store(url, copy_threads=1) as store:
                for _ in range(3):
                    if method == "get_many":
                        assert await store.get_many(blocks) == list(map(bytearray, blocks.values()))
                    elif method == "get_many_into":
                        buffers = [bytearray(len(value)) for value in blocks.values()]
                        await store.get_many_into(list(zip(blocks, buffers, strict=True)))
                        assert buffers == list(blocks.values())
                    else:
                        async with store.lease(list(blocks), verify=True) as views:
                            await trio.lowlevel.checkpoint()
                            del views

        async def after() -> None:
            with trio.fail_after(60):
                while server.server.telemetry.statistics().connections_open > 1:
                    await trio.lowlevel.checkpoint()
            found = server.core.statistics()
            assert (found.leases, found.pinned_bytes, found.quarantined_bytes) == (0, 0, 0)
            assert await keeper.get("c") == blocks["c"]

        assert await cancel_at_each_await(call, after) > 7


KEYS = [f"key {index}" for index in range(6)]


class Struggle:
    """Threads that write and threads that read, until the writers are done. Checksums
    are off: only what lies in the memory counts. Each value is one number again and
    again."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.written = dict.fromkeys(KEYS, 0)  # the least that a reader may find
        self.over = threading.Event()

    def write(self, store: BlockingStore, mine: list[str]) -> None:
        for number in range(1, 40):
            for key in mine:
                if number % 7 == 3:
                    store.delete([key])
                store.put(key, number.to_bytes(2, "big") * (4000 + 1000 * (number % 3)))
                self.written[key] = number

    def read(self, store: BlockingStore) -> None:
        kept: list[list[Any]] = []
        while not self.over.is_set():
            least = dict(self.written)
            for key, value in zip(KEYS, store.get_many(KEYS), strict=True):
                if value is not None:
                    assert value == value[:2] * (len(value) // 2)
                    assert int.from_bytes(value[:2], "big") >= least[key]
            kept.append(arrays_of(store, *KEYS[:3]))
            if len(kept) > 2:
                assert all(len(set(array[start::2].tolist())) == 1 for array in kept.pop(0) for start in (0, 1))

    def work(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            self.failures.append(error)

    def thread(self, function: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=self.work, args=(function, *arguments))
        thread.start()
        return thread


@pytest.mark.process
def test_many_threads_read_replace_and_delete_at_once_and_see_no_wrong_byte(tmp_path: Path) -> None:
    url = f"shm://{tmp_path}/store.sock"
    options: dict[str, Any] = {"verify": "never", "inline_bytes": 0}
    with (
        server_process(tmp_path, "--prealloc-size", "1MiB"),
        blocking.open_store(url, **options) as one,
        blocking.open_store(url, **options) as two,
    ):
        struggle = Struggle()
        writers = [struggle.thread(struggle.write, store, mine) for store, mine in ((one, KEYS[:3]), (two, KEYS[3:]))]
        readers = [struggle.thread(struggle.read, store) for store in (one, one, two)]
        for thread in writers:
            thread.join()
        struggle.over.set()
        for thread in readers:
            thread.join()
        assert struggle.failures == []
        gc.collect()
        while one.stats().store.leases:
            one.exists("anything")


def test_one_store_in_many_threads_keeps_apart_what_each_reads(one_kind: Shared) -> None:
    blocks = {f"key {index}": bytes([index]) * 50_000 for index in range(8)}
    store, other = one_kind.open(), one_kind.open()
    other.put_many(blocks)
    knows(store, blocks)
    failures: list[BaseException] = []

    def work(key: str) -> None:
        try:
            for _ in range(40):
                assert store.get(key) == blocks[key]
                (array,) = arrays_of(store, key)
                assert array.tobytes() == blocks[key]
                assert store.exists(key)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    one_kind.until(leases=0, pinned_bytes=0)
    assert one_kind.core_statistics().hits >= 8 * 80
