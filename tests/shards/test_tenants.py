"""A server with shards and tenants: all shards read one file, and each has a part of
what a tenant may take.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import attrs
import pytest

from infinistore import blocking
from infinistore.access.tenants import digest_of, make_token
from infinistore.blocking import BlockingStore
from infinistore.cli.root import run
from infinistore.errors import AuthenticationFailed, LimitExceeded
from infinistore.sizes import KIB
from tests.asking import until
from tests.cluster_client.clusters import PATIENT

from .conftest import HOST, POOL, RunningShards, running_shards

FREE_PORTS = ("--service-port", "0", "--manage-port", "0", *POOL)
NAMES = ("ann", "ben", "ops")
TOKENS = {name: make_token(name, os.urandom) for name in NAMES}
GROUPS = "groups: {team: 2MiB}\n"
OPS = "    roles: [read, write, monitor, admin]\n    operator: true\n    group: team\n"
KEYS = [f"key {number}" for number in range(64)]
MEMBER = "    group: team\n    roles: [read, write, admin]\n"
LIMITED = MEMBER + "    max_bytes: 128KiB\n"


def text_of(groups: str = GROUPS, **tenants: str) -> str:
    entries = [f"  {name}:\n    tokens: [{digest_of(TOKENS[name])}]\n{more}" for name, more in tenants.items()]
    return groups + "tenants:\n" + "".join(entries)


@attrs.define
class Tenanted:
    """A server with two shards, and its tenants file."""

    server: RunningShards
    file: Path

    def open(self, name: str) -> AbstractContextManager[BlockingStore]:
        return blocking.open_store(f"infinistore://{HOST}:{self.server.port}", token=TOKENS[name], **PATIENT)

    def reload(self) -> tuple[int, str]:
        status, body = self.server.ask("/reload", "POST")
        return status, body.decode()


@pytest.fixture(scope="module")
def tenanted(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenanted]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    file.write_text(text_of(ann=LIMITED, ben=MEMBER, ops=OPS))
    with running_shards(environment, "--tenants", str(file)) as server:
        server.token = TOKENS["ops"]
        yield Tenanted(server, file)


@pytest.mark.process
def test_each_tenant_has_its_own_keys_in_all_shards(tenanted: Tenanted) -> None:
    with tenanted.open("ann") as ann, tenanted.open("ben") as ben:
        ann.put_many([(key, b"ann") for key in KEYS])
        assert not any(ben.exists_many(KEYS))
        ben.put_many([(key, b"ben") for key in KEYS[:32]])
        assert ann.get_many(KEYS) == [bytearray(b"ann")] * 64
        assert ben.purge() == 32
        assert all(ann.exists_many(KEYS))
        assert ann.purge() == 64


@pytest.mark.process
def test_the_shards_together_are_within_a_tenants_limits(tenanted: Tenanted) -> None:
    with tenanted.open("ann") as ann:
        for key in KEYS * 3:
            ann.put(key, bytes(4 * KIB))
        kept = sum(ann.exists_many(KEYS))
        assert 16 <= kept <= 32  # 128 KiB in all, a half in each shard
        with pytest.raises(LimitExceeded, match="max_bytes=64 KiB"):
            ann.put("large", bytes(65 * KIB))
        ann.purge()


def is_refused(url: str, token: str) -> bool:
    try:
        with blocking.open_store(url, token=token, **PATIENT):
            return False
    except AuthenticationFailed:
        return True


@pytest.mark.process
def test_a_signal_has_all_shards_read_the_file(tenanted: Tenanted) -> None:
    before = tenanted.file.read_text()
    tenanted.file.write_text(text_of(ann=LIMITED, ops=OPS))
    tenanted.server.process.send_signal(signal.SIGHUP)
    for shard in tenanted.server.shards():
        until(partial(is_refused, f"infinistore://{HOST}:{shard['port']}", TOKENS["ben"]))
    with tenanted.open("ann") as ann:
        ann.put_many([(key, b"ann") for key in KEYS])
    tenanted.file.write_text(before)
    assert tenanted.reload()[0] == 200
    with tenanted.open("ben") as ben:
        ben.put_many([(key, b"ben") for key in KEYS])
        assert ben.purge() == 64


@pytest.mark.process
def test_a_file_that_no_shard_can_use_changes_nothing_in_any(tenanted: Tenanted) -> None:
    before = tenanted.file.read_text()
    tenanted.file.write_text(text_of(ann="    group: team\n    reserved_bytes: 3MiB\n", ops=OPS))
    status, said = tenanted.reload()
    assert status == 409
    assert "group 'team': 3 MiB are reserved for tenants together, and the pool that they share has 2 MiB" in said
    with tenanted.open("ben") as ben:
        ben.put("still", b"there")
        assert ben.purge() == 1
    tenanted.file.write_text(before)
    assert tenanted.reload()[0] == 200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            text_of("groups: {team: 100KiB}\n", ann="    group: team\n"),
            "group 'team' has 100 KiB for 2 shards; give it",
        ),
        (text_of("groups: {team: 9MiB}\n", ann="    group: team\n"), "--prealloc-size is 8 MiB"),
        (text_of(ann="    group: team\n    reserved_bytes: 3MiB\n"), "3 MiB are reserved for tenants together"),
        (text_of(ann=MEMBER, ben=MEMBER), "2 tenants cannot share 1 connections"),
    ],
)
def test_what_does_not_fit_is_refused_once_in_the_sizes_of_the_whole(
    tmp_path: Path, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    assert run(["--shards", "2", "--max-connections", "1", *FREE_PORTS, "--tenants", str(file)]) != 0
    said = capsys.readouterr().err
    assert problem in said
    assert "Traceback" not in said
    assert "shard 0" not in said


@pytest.mark.process
def test_each_shard_has_its_part_of_a_tenants_disk(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, disk = tmp_path / "tenants.yaml", tmp_path / "disk"
    file.write_text(text_of("", ann="    roles: [read, write, monitor, admin]\n    disk_max_bytes: 128MiB\n"))
    flags = ("--tenants", str(file), "--disk", f"{disk}:256MiB", "--disk-admission", "eager")
    with running_shards(environment, *flags) as server:
        tenanted = Tenanted(server, file)
        with tenanted.open("ann") as ann:
            ann.put_many([(key, key.encode()) for key in KEYS])
            assert ann.flush(KEYS) == 64
            assert ann.evict(0.0, 0.0) == 64
            assert ann.get_many(KEYS) == [bytearray(key.encode()) for key in KEYS]
            stats = ann.stats()
    assert stats.disk is not None
    assert sorted(Path(one.path).relative_to(disk).as_posix() for one in stats.disk.disks) == [
        "shard-0-of-2/tenants/ann",
        "shard-1-of-2/tenants/ann",
    ]
    file.write_text(text_of("", ann="    disk_max_bytes: 100MiB\n"))
    assert run(["--shards", "2", *FREE_PORTS, *flags]) != 0
    assert "give it a disk_max_bytes of 128 MiB or more, or none" in capsys.readouterr().err
    file.write_text(text_of("", ann="    disk_max_bytes: 128MiB\n"))
    assert run([*FREE_PORTS, *flags]) != 0
    assert "is not empty (shard-0-of-2, shard-1-of-2) and not a disk of tenants" in capsys.readouterr().err
