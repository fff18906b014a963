"""Servers whose disk fails or hangs: what it has is missing, and all else goes on."""

import errno
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import trio

from infinistore.client import AsyncStore, open_store
from infinistore.disk.jobs import Job, ReadInto, Write
from infinistore.disk_io.store_disks import StoreDisks, open_disks
from infinistore.disk_settings import DiskPlace
from infinistore.server.environment import Environment
from tests.disk_io.faulty_runner import Fail, Fault, FaultyRunner, Hang, Rot
from tests.server.running import KIB, MIB, RunningServer, make_config, running_server, until

BLOCKS = {f"k{index}": bytes([index]) * (64 * KIB) for index in range(48)}
KEYS = list(BLOCKS)


@attrs.define
class Faults:
    """What becomes of reads and writes of blocks from now on."""

    reads: Fault | None = None
    writes: Fault | None = None
    runner: FaultyRunner | None = None

    def of(self, job: Job) -> Fault | None:
        """The fault of a job."""
        return self.reads if isinstance(job, ReadInto) else self.writes if isinstance(job, Write) else None

    def open_disks(self, places: Sequence[DiskPlace], random: Random) -> StoreDisks:
        """Open disks whose runner has these faults."""
        opened = open_disks(places, random)
        self.runner = FaultyRunner(opened.runner, self.of)
        return attrs.evolve(opened, runner=self.runner)


@asynccontextmanager
async def serving(folder: Path, faults: Faults, **settings: Any) -> AsyncGenerator[tuple[AsyncStore, RunningServer]]:
    """A server whose disk has more than its memory, by a store that is open."""
    config = make_config(
        prealloc_bytes=MIB,
        minimal_allocate_bytes=4 * KIB,
        disks=(DiskPlace(folder / "disk", 64 * MIB),),
        disk_admission="eager",
        **settings,
    )
    async with (
        running_server(config, Environment(open_disks=faults.open_disks)) as server,
        open_store(server.url) as store,
    ):
        for first in range(0, len(KEYS), 4):
            some = KEYS[first : first + 4]
            await store.put_many({key: BLOCKS[key] for key in some})
            assert await store.flush(some) == len(some)
        yield store, server


@pytest.mark.parametrize("fault", [Fail(), Rot(), Hang()], ids=lambda fault: type(fault).__name__)
async def test_what_cannot_be_read_is_missing_and_the_rest_is_there(fault: Fault, tmp_path: Path) -> None:
    faults = Faults()
    async with serving(tmp_path, faults, disk_wait_s=0.1 if isinstance(fault, Hang) else 600.0) as (store, _):
        faults.reads = fault
        assert await store.get_many(KEYS[:2]) == [None, None]
        assert await store.get(KEYS[-1]) == BLOCKS[KEYS[-1]]  # which is in memory
        faults.reads = None
        assert faults.runner is not None
        faults.runner.end_hangs()
        await store.put("new", b"1")
        assert await store.get("new") == b"1"
        disk = (await store.stats()).disk
        assert disk is not None
        one = disk.disks[0]
        assert (one.read_errors + one.damaged_blocks > 0) == (not isinstance(fault, Hang))
        found = await store.get_many(KEYS[2:])  # what is late on a busy machine is missing
        assert all(block in (None, BLOCKS[key]) for key, block in zip(KEYS[2:], found, strict=True))


async def test_what_cannot_be_written_is_not_durable_and_is_served_from_memory(tmp_path: Path) -> None:
    faults = Faults()
    async with serving(tmp_path, faults) as (store, _):
        faults.writes = Fail(errno.EIO)
        await store.put("new", b"1" * 5000)
        assert await store.flush(["new"]) == 0
        assert await store.get("new") == b"1" * 5000
        disk = (await store.stats()).disk
        assert disk is not None
        assert disk.disks[0].write_errors > 0
        assert await store.get(KEYS[0]) == BLOCKS[KEYS[0]]


async def test_what_is_evicted_while_other_blocks_are_read_is_not_missing(tmp_path: Path) -> None:
    faults = Faults()
    async with serving(tmp_path, faults, disk_wait_s=60.0) as (store, server):
        keys = [KEYS[0], KEYS[-1]]  # on disk, in memory
        faults.reads = Hang()
        found: list[Any] = []

        async def get() -> None:
            found.extend(await store.get_many(keys))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            assert faults.runner is not None
            await until(faults.runner.hanging)
            assert server.core.evict_keys(keys[1:]) == 1
            faults.reads = None
            faults.runner.end_hangs()
        assert found == [BLOCKS[key] for key in keys]


async def test_a_get_that_is_cancelled_frees_no_room_under_a_read(tmp_path: Path) -> None:
    faults = Faults()
    async with serving(tmp_path, faults, disk_wait_s=60.0) as (store, server):
        faults.reads = Hang()
        assert faults.runner is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get_many, KEYS[:2])
            await until(faults.runner.hanging)
            nursery.cancel_scope.cancel()
        reserved = server.core.statistics().reserved_bytes
        assert reserved >= len(BLOCKS[KEYS[0]])
        faults.reads = None
        faults.runner.end_hangs()
        await server.until(reserved_bytes=0)
        assert await store.get(KEYS[0]) == BLOCKS[KEYS[0]]
