"""A fault of one tenant's disk, and everything that has to do with it: nothing else is
taken down, and what may come back is told.
"""

import errno
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import trio

from infinistore.client import AsyncStore, open_store
from infinistore.config import ServerConfig
from infinistore.disk.demotion import Demotion
from infinistore.disk.jobs import Allocate, Flush, Job, ReadInto, Replace, Write, WriteSuperblock
from infinistore.disk_io.store_disks import StoreDisks, open_disks
from infinistore.disk_settings import DiskPlace
from infinistore.errors import DiskFailed
from infinistore.server.environment import Environment
from infinistore.sizes import KIB, MIB
from tests.cluster_io.etcd import Etcd
from tests.disk_io.faulty_runner import Fail, FaultyRunner, Hang
from tests.server.etcd_keys import needs_etcd, put, read
from tests.server.http_client import ask
from tests.server.running import make_config, recovered, running_server, until
from tests.server.tenants_files import TOKENS, store_of, text_of, write

KEYS = [f"key {number}" for number in range(160)]
CHANGES = (Write, Flush, Allocate, Replace, WriteSuperblock)
DISK = {"disk_max_bytes": "64MiB"}


@attrs.define
class OneDisk:
    """The disk of the tenant ann: from `begin` on, it has the fault of this name."""

    fault: str
    monkeypatch: pytest.MonkeyPatch
    begun: bool = False

    @property
    def may_bring_back(self) -> bool:
        """Whether it does not take that something is gone."""
        return self.fault != "full"

    def of(self, job: Job) -> Fail | None:
        if self.fault == "full":
            return Fail(errno.ENOSPC) if self.begun and isinstance(job, Allocate | Replace) else None
        code = {"off": errno.ENODEV, "read-only": errno.EROFS}.get(self.fault)
        return Fail(code) if code is not None and self.begun and isinstance(job, CHANGES) else None

    def open_disks(self, places: Sequence[DiskPlace], random: Random) -> StoreDisks:
        opened = open_disks(places, random)
        is_anns = places[0].folder.name == "ann"
        return attrs.evolve(opened, runner=FaultyRunner(opened.runner, self.of)) if is_anns else opened

    async def begin(self, ann: AsyncStore) -> None:
        """Let the fault happen, and be noticed."""
        self.begun = True
        await ann.put("new", bytes(5000))
        if self.fault == "tier failed":
            self.monkeypatch.setattr(Demotion, "durable", _failing)
            with pytest.raises(DiskFailed, match="ZeroDivisionError: as told"):
                await ann.flush(["new"])
            self.monkeypatch.undo()
        else:
            assert await ann.flush(["new"]) == int(self.fault == "full")


def _failing(*_: object) -> bool:
    raise ZeroDivisionError("as told")


@pytest.fixture(params=["off", "read-only", "full", "tier failed"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OneDisk:
    return OneDisk(request.param, monkeypatch)


def configured(folder: Path, text: str = "", **settings: Any) -> ServerConfig:
    if text:
        settings["tenants"] = write(folder, text)
    return make_config(
        prealloc_bytes=8 * MIB,
        minimal_allocate_bytes=4 * KIB,
        disk_admission="eager",
        max_batch_keys=128,  # so that calls have parts
        disks=(DiskPlace(folder / ("disk" if text else "ann"), 256 * MIB),),
        **settings,
    )


async def fill(*stores: AsyncStore) -> None:
    for store in stores:
        await store.put_many({key: bytes(KIB) for key in KEYS})
        assert await store.flush(KEYS) == len(KEYS)


async def test_a_fault_of_one_disk_takes_nothing_else_down(disk: OneDisk, tmp_path: Path) -> None:
    config = configured(tmp_path, text_of(ann=DISK, ben=DISK, ops={"roles": "[admin]", "operator": "true"}))
    async with running_server(config, Environment(open_disks=disk.open_disks)) as server:
        async with store_of(server, "ann") as ann, store_of(server, "ben") as ben:
            await fill(ann, ben)
            await disk.begin(ann)
            with pytest.raises(DiskFailed) if disk.may_bring_back else nullcontext():
                await ann.delete(await ann.keys("key"))
            assert not any(await ann.exists_many(KEYS))
            headers = {"Authorization": f"Bearer {TOKENS['ops']}"}
            answer = await ask(server.server.addresses.management[0], "POST", "/purge", headers=headers)
            assert answer.status == (503 if disk.may_bring_back else 200)
            assert answer.json.get("error", "of tenants ann: ").startswith("of tenants ann: ")
            for store in (ann, ben):
                assert not any(await store.exists_many([*KEYS, "new"]))
            await fill(ben)
            await ann.put("new", b"1")
            assert await ann.get("new") == b"1"
        server.server.drain()
        await server.finished.wait()
    async with running_server(config) as server, store_of(server, "ben") as ben:
        await recovered(server)
        assert all(await ben.exists_many(KEYS))


async def test_reads_and_writes_that_queue_for_one_disk_hold_up_no_other(tmp_path: Path) -> None:
    queued = list[Job]()

    def queue(job: Job) -> Hang | None:
        queued.append(job)
        return Hang()

    def opened_with_a_queue(places: Sequence[DiskPlace], random: Random) -> StoreDisks:
        opened = open_disks(places, random)
        runner = FaultyRunner(opened.runner, lambda job: None)
        runners[places[0].folder.name] = runner
        return attrs.evolve(opened, runner=runner)

    runners: dict[str, FaultyRunner] = {}
    config = configured(tmp_path, text_of(ann=DISK, ben=DISK), disk_wait_s=600.0)
    async with (
        running_server(config, Environment(open_disks=opened_with_a_queue)) as server,
        store_of(server, "ann") as ann,
        store_of(server, "ben") as ben,
        trio.open_nursery() as nursery,
    ):
        await fill(ann, ben)
        for store in (ann, ben):
            await store.evict(0.0, 0.0)
        runners["ann"].fault_of = queue
        await ann.put_many({f"new {number}": bytes(KIB) for number in range(100)})
        for key in KEYS:
            nursery.start_soon(ann.get, key)
        await until(lambda: any(isinstance(job, ReadInto) for job in queued))
        await until(lambda: any(not isinstance(job, ReadInto) for job in queued))
        assert await ben.get_many(KEYS) == [bytearray(KIB)] * len(KEYS)
        await ben.put("new", bytes(KIB))
        assert await ben.flush(["new"]) == 1
        runners["ann"].fault_of = lambda job: None
        runners["ann"].end_hangs()


@needs_etcd
async def test_a_purge_of_the_cluster_that_a_disk_does_not_take_is_carried_out_again(
    disk: OneDisk, tmp_path: Path, etcd: Etcd
) -> None:
    cluster = f"faults-{disk.fault.replace(' ', '-')}"
    mark = f"/infinistore/{cluster}/purged/a"
    config = configured(tmp_path, cluster=etcd.url_of(cluster), node_id="a")
    async with running_server(config, Environment(open_disks=disk.open_disks)) as server:
        async with open_store(server.url) as store:
            await fill(store)
            await disk.begin(store)
            await put(etcd, f"/infinistore/{cluster}/purge")
            await until(lambda: not len(server.core))
            await store.put("new", b"1")
            assert await store.get("new") == b"1"
        server.server.drain()
        await server.finished.wait()
    assert (await read(etcd, mark))[mark] == b"0" or not disk.may_bring_back
    async with running_server(config) as server, open_store(server.url) as store:
        await recovered(server)
        assert not any(await store.exists_many(KEYS))
        assert (await read(etcd, mark))[mark] != b"0"
