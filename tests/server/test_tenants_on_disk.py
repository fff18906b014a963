"""Tenants with disks: each has its own blocks there, also after a restart, and nothing
of those who are gone.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from infinistore.client.api.store import AsyncStore
from infinistore.disk_io.folder import TenantFolders
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.server.composition import run_server
from infinistore.sizes import KIB, MIB
from tests.server.running import RunningServer, make_config, recovered, running_server, until
from tests.server.tenants_files import Serving, store_of, text_of, write

KEYS = [f"key {number}" for number in range(16)]
DISK = {"disk_max_bytes": "64MiB"}
SPREAD = {"disk_max_bytes": "128MiB"}  # on two disks


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Any]:
    """Returns configured(text of the tenants file, **settings): a configuration with a
    disk."""

    def configure(text: str, *, disks: Any = 1, **settings: Any) -> Any:
        if isinstance(disks, int):
            disks = tuple(DiskPlace(tmp_path / f"disk{number}", 256 * MIB) for number in range(disks))
        settings = {"prealloc_bytes": 8 * MIB, "disk_admission": "eager", "disks": disks, **settings}
        return make_config(tenants=write(tmp_path, text), **settings)

    return configure


@pytest.fixture
def serving(configured: Callable[..., Any]) -> Serving:
    """Returns serving(text of the tenants file, **settings): a running server."""
    return lambda text, **settings: running_server(configured(text, **settings))


def blocks_of(name: str) -> list[tuple[str, bytes]]:
    return [(key, f"{name}'s {key}".encode().ljust(KIB)) for key in KEYS]


async def put_on_disk(store: AsyncStore, name: str) -> None:
    await store.put_many(blocks_of(name))
    assert await store.flush(KEYS) == len(KEYS)


async def drained(server: RunningServer) -> None:
    server.server.drain()
    await server.finished.wait()


async def test_each_tenant_reads_its_own_blocks_from_disk(serving: Serving) -> None:
    async with (
        serving(text_of(ann=DISK, ben=DISK)) as server,
        store_of(server, "ann") as ann,
        store_of(server, "ben") as ben,
    ):
        await put_on_disk(ann, "ann")
        assert await ann.evict(0.0, 0.0) == len(KEYS)
        assert await ben.exists_many(KEYS) == [False] * len(KEYS)
        assert await ben.match_prefix(KEYS) == 0
        assert await ben.get_many(KEYS) == [None] * len(KEYS)
        await put_on_disk(ben, "ben")
        await ben.evict(0.0, 0.0)
        for name, store in (("ann", ann), ("ben", ben)):
            assert await store.match_prefix(KEYS) == len(KEYS)
            assert await store.get_many(KEYS) == [bytearray(block) for _, block in blocks_of(name)]
            stats = await store.stats()
            assert stats.disk is not None
            assert [disk.keys for disk in stats.disk.disks] == [len(KEYS)]
        whole = server.server.telemetry.disk()
        assert whole is not None
        assert sorted(Path(disk.path).name for disk in whole.disks) == ["ann", "ben"]


async def test_a_purge_on_disk_is_one_tenants(serving: Serving) -> None:
    text = text_of(ann=DISK, ben=DISK)
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "ben") as ben:
        await put_on_disk(ann, "ann")
        await put_on_disk(ben, "ben")
        await ann.evict(0.0, 0.0)
        await ben.evict(0.0, 0.0)
        await ann.purge()
        assert not any(await ann.exists_many(KEYS))
        assert all(await ben.exists_many(KEYS))
        assert await ben.delete(KEYS[:3]) == 3
        await drained(server)
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "ben") as ben:
        await recovered(server)
        assert not any(await ann.exists_many(KEYS))
        assert await ben.exists_many(KEYS) == [False] * 3 + [True] * 13


async def test_what_an_operator_purges_is_gone_from_all_disks(serving: Serving) -> None:
    text = text_of(ann=DISK, ben=DISK, cleo={})
    async with serving(text) as server, store_of(server, "ann") as ann, store_of(server, "cleo") as cleo:
        await put_on_disk(ann, "ann")
        await cleo.put_many(blocks_of("cleo"))
        assert await server.server.context.disks.purge() == 2 * len(KEYS)
        assert not any(await ann.exists_many(KEYS))
        assert not any(await cleo.exists_many(KEYS))


async def test_blocks_come_back_after_a_restart_to_whose_they_are(serving: Serving, tmp_path: Path) -> None:
    async with serving(text_of(ann=SPREAD, ben=SPREAD, cleo={}), disks=2) as server:
        for name in ("ann", "ben", "cleo"):
            async with store_of(server, name) as store:
                await store.put_many(blocks_of(name))
        await drained(server)
    assert sorted(path.name for path in (tmp_path / "disk1" / "tenants").iterdir()) == ["ann", "ben"]
    async with serving(text_of(ben=SPREAD, cleo=SPREAD), disks=2) as server:
        await recovered(server)
        async with store_of(server, "ben") as ben, store_of(server, "cleo") as cleo:
            assert await ben.get_many(KEYS) == [bytearray(block) for _, block in blocks_of("ben")]
            assert not any(await cleo.exists_many(KEYS))
        await drained(server)
    assert sorted(path.name for path in (tmp_path / "disk1" / "tenants").iterdir()) == ["ben", "cleo"]
    async with serving(text_of(ann=SPREAD), disks=2) as server, store_of(server, "ann") as ann:
        await recovered(server)
        assert not any(await ann.exists_many(KEYS)), "a tenant that was removed has nothing when it comes back"


async def test_a_tenant_overwrites_its_own_blocks_when_its_disk_is_full(serving: Serving) -> None:
    text = text_of(ann=DISK, ben=DISK)
    async with (
        serving(text, prealloc_bytes=32 * MIB) as server,
        store_of(server, "ann") as ann,
        store_of(server, "ben") as ben,
    ):
        await put_on_disk(ben, "ben")
        for number in range(40):
            await ann.put(f"large {number}", bytes([number]) * (4 * MIB))
            await ann.flush([f"large {number}"])
        await ben.evict(0.0, 0.0)
        stats = await ann.stats()
        assert stats.disk is not None
        assert sum(disk.used_bytes for disk in stats.disk.disks) <= 64 * MIB
        assert await ann.get("large 39") == bytes([39]) * (4 * MIB)
        assert not await ann.exists("large 0")
        assert await ben.get_many(KEYS) == [bytearray(block) for _, block in blocks_of("ben")]


async def test_tenants_and_their_disks_come_and_go_while_others_are_served(serving: Serving, tmp_path: Path) -> None:
    folders = tmp_path / "disk0" / "tenants"
    async with serving(text_of(ann=DISK)) as server, store_of(server, "ann") as ann:
        await put_on_disk(ann, "ann")
        write(tmp_path, text_of(ann=DISK, ben=DISK))
        assert await server.server.reloads.run() == []
        async with store_of(server, "ben") as ben:
            await put_on_disk(ben, "ben")
            await ben.evict(0.0, 0.0)
            assert await ben.match_prefix(KEYS) == len(KEYS)
            write(tmp_path, text_of(ann=DISK))
            assert await server.server.reloads.run() == []
            await until(lambda: not (folders / "ben").exists())
        write(tmp_path, text_of(ann=DISK, ben=DISK))
        assert await server.server.reloads.run() == []
        async with store_of(server, "ben") as ben:
            assert not any(await ben.exists_many(KEYS))
            await ben.put_many(blocks_of("ben"))
            assert await ben.purge() == len(KEYS), "without a disk until the server is started again"
        await ann.evict(0.0, 0.0)
        assert await ann.get_many(KEYS) == [bytearray(block) for _, block in blocks_of("ann")]


async def test_tenants_that_are_gone_leave_threads_to_others_if_their_disks_hang(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = threading.Event(), list[str]()

    def hang(folders: TenantFolders, tenant: str) -> None:
        trio.from_thread.run_sync(asked.append, tenant)
        assert answer.wait(60)

    async with serving(text_of(ann=DISK, ben=DISK, cleo=DISK, ops={})) as server:
        limiter = trio.to_thread.current_default_thread_limiter()
        monkeypatch.setattr(limiter, "total_tokens", 3)
        monkeypatch.setattr(TenantFolders, "wipe", hang)
        write(tmp_path, text_of(ops={}))
        assert await server.server.reloads.run() == []
        await until(lambda: len(asked) == 2)
        for _ in range(100):  # turns, in which the next one could begin
            await trio.lowlevel.checkpoint()
        with trio.fail_after(60):
            await trio.to_thread.run_sync(str)
        answer.set()
        await until(lambda: len(asked) == 3)
    assert sorted(asked) == ["ann", "ben", "cleo"]


async def test_a_file_that_the_disks_have_no_room_for_changes_nothing(serving: Serving, tmp_path: Path) -> None:
    async with serving(text_of(ann=DISK)) as server, store_of(server, "ann") as ann:
        write(tmp_path, text_of(ann=DISK, ben={"disk_max_bytes": "193MiB"}))
        (problem,) = await server.server.reloads.run()
        assert problem.startswith("tenants may have 257 MiB on disk together, and the disks have 256 MiB; lower")
        await put_on_disk(ann, "ann")
    assert not (tmp_path / "disk0" / "tenants" / "ben").exists()


async def refused(config: Any) -> str:
    with pytest.RaisesGroup(ConfigError, allow_unwrapped=True, flatten_subgroups=True) as caught:
        await run_server(config, on_listening=lambda server: None)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert "\n" not in str(error)
    return str(error)


async def test_what_disks_and_tenants_cannot_have_is_refused_in_one_line(
    configured: Callable[..., Any], tmp_path: Path
) -> None:
    assert "no tenant in" in await refused(configured(text_of(ann={})))
    small = text_of(ann={"disk_max_bytes": "100MiB"})
    assert "give it a disk_max_bytes of 128 MiB or more" in await refused(configured(small, disks=2))
    large = text_of(ann={"disk_max_bytes": "1GiB"})
    assert "the disks have 256 MiB; lower disk_max_bytes" in await refused(configured(large))
    huge = text_of(ann={"disk_max_bytes": "1PiB"})
    assert "no room for 1" in await refused(configured(huge, disks=(DiskPlace(tmp_path / "huge", 1 << 50),)))
    assert os.listdir(tmp_path) == ["tenants.yaml"], "nothing is made for what is refused"
    (tmp_path / "mine" / "photos").mkdir(parents=True)
    mine = (DiskPlace(tmp_path / "mine", 256 * MIB),)
    assert "is not empty (photos) and not a disk of tenants" in await refused(configured(text_of(ann=DISK), disks=mine))


async def test_a_disk_of_a_server_without_tenants_is_not_one_of_tenants(
    configured: Callable[..., Any], serving: Serving, tmp_path: Path
) -> None:
    place = DiskPlace(tmp_path / "disk0", 256 * MIB)
    async with running_server(make_config(disks=(place,))) as server:
        await drained(server)
    assert "has blocks of a server without tenants" in await refused(configured(text_of(ann=DISK)))
    other = (DiskPlace(tmp_path / "other", 256 * MIB),)
    async with serving(text_of(ann=DISK), disks=other) as server:
        assert "other is in use by this process" in await refused(configured(text_of(ben=DISK), disks=other))
    assert "is not empty (tenants) and not a disk" in await refused(make_config(disks=other))
