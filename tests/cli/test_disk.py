"""`infinistore disk` on real disks, whole and damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from infinistore.disk_io import open_folder
from infinistore.sizes import KIB, MIB
from tests import warm
from tests.cli.conftest import Run
from tests.disk_io.volumes import fill_disk

BLOCK_BYTES = 64 * KIB
BATCHES = [{f"batch {number}/block {block}": os.urandom(BLOCK_BYTES) for block in range(8)} for number in range(3)]
REPLACED = {"batch 0/block 0": os.urandom(1000), "batch 1/block 1": b""}
"""A block that replaces another one, and a deletion."""
KEYS = 23
BLOCKS = 25


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk that was closed, with blocks in three segments."""
    fill_disk(tmp_path / "nvme0", [*BATCHES, REPLACED])
    return tmp_path / "nvme0"


@pytest.fixture
def crashed_disk(tmp_path: Path) -> Path:
    """The same after a crash."""
    fill_disk(tmp_path / "nvme0", [*BATCHES, REPLACED], clean=False)
    return tmp_path / "nvme0"


def damage(disk: Path, block: bytes) -> tuple[int, int]:
    """Flip a bit of a block, wherever it is; return its segment and offset."""
    for segment in (disk / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        place = data.find(block)
        if place >= 0:
            data[place + 17] ^= 4
            segment.write_bytes(data)
            return int(segment.name), place
    raise AssertionError("it is nowhere")


def test_a_disk_says_what_is_on_it(command: Run, disk: Path) -> None:
    ended = command("disk", "inspect", "--json", str(disk))

    assert (ended.returncode, ended.stderr) == (0, b"")
    found = json.loads(ended.stdout)
    assert found["uuid"] == b"u".hex() * 16
    assert (found["clean"], found["session"], found["in_use_by"]) == (True, 1, None)
    assert (found["keys"], found["keys_bytes"]) == (KEYS, 22 * BLOCK_BYTES + 1000)
    assert (found["blocks"], found["tombstones"], found["batches"]) == (BLOCKS, 1, 4)
    assert (found["damaged_batches"], found["unreadable_segments"]) == (0, [])
    assert sum(segment["blocks"] for segment in found["segments"]) == BLOCKS
    assert found["segment_bytes"] == MIB
    assert found["allocated_bytes"] >= 2 * MIB


def test_what_is_on_it_can_be_read_by_people(command: Run, disk: Path) -> None:
    ended = command("disk", "inspect", "--segments", str(disk))

    assert (ended.returncode, ended.stderr) == (0, b"")
    lines = ended.stdout.decode().splitlines()
    assert "ended        cleanly" in lines
    assert "keys         23, 1.38 MiB" in lines
    assert any(line.startswith("dead         2 blocks, 128 KiB, and 1 tombstones") for line in lines)
    assert any(line.split()[:2] == ["0", "sealed"] for line in lines)


def test_after_a_crash_it_says_the_same(command: Run, crashed_disk: Path) -> None:
    found = json.loads(command("disk", "inspect", "--json", str(crashed_disk)).stdout)

    assert found["clean"] is False
    assert (found["keys"], found["blocks"], found["damaged_batches"]) == (KEYS, BLOCKS, 0)
    assert json.loads(command("disk", "verify", "--json", str(crashed_disk)).stdout)["blocks"] == BLOCKS


USES_IT = """
import sys
from pathlib import Path
from infinistore.disk_io import open_folder
used = open_folder(Path(sys.argv[1]))
print("opened", flush=True)
sys.stdin.read()
used.close()
"""


@pytest.mark.process
def test_a_disk_in_use_can_be_inspected_and_nothing_else(command: Run, disk: Path) -> None:
    with warm.Popen(
        [sys.executable, "-c", USES_IT, str(disk)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"opened\n"
        ended = command("disk", "inspect", str(disk))
        assert ended.returncode == 0
        assert f"in use       by process {process.pid}" in ended.stdout.decode().splitlines()

        for arguments in (["verify"], ["wipe", "--yes"]):
            ended = command("disk", *arguments, str(disk))
            assert ended.returncode == 2
            who = f"process {process.pid}; end that first, or give another folder\n"
            assert ended.stderr.decode() == f"infinistore: disk {disk} is in use by {who}"
        process.communicate()


def test_nothing_is_changed_by_looking(command: Run, disk: Path) -> None:
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in disk.rglob("*")}

    command("disk", "inspect", str(disk))
    command("disk", "verify", str(disk))

    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in disk.rglob("*")} == before


def test_a_whole_disk_is_verified(command: Run, disk: Path) -> None:
    ended = command("disk", "verify", str(disk))

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == b"verified 25 blocks, 1.5 MiB: 0 damaged\n"


def test_a_damaged_block_is_named(command: Run, disk: Path) -> None:
    live = damage(disk, BATCHES[2]["batch 2/block 3"])
    dead = damage(disk, BATCHES[0]["batch 0/block 0"])

    ended = command("disk", "verify", str(disk))
    assert ended.returncode == 6
    assert ended.stderr == b"infinistore: 2 of 25 blocks are damaged, 1 of them in use\n"
    assert ended.stdout.decode().splitlines() == [
        f"batch 0/block 0: segment {dead[0]}, offset {dead[1]}, dead: wrong checksum",
        f"batch 2/block 3: segment {live[0]}, offset {live[1]}, in use: wrong checksum",
        "verified 25 blocks, 1.5 MiB: 2 damaged",
    ]
    found = json.loads(command("disk", "verify", "--json", str(disk)).stdout)
    assert (found["ok"], len(found["damaged"])) == (False, 2)
    assert found["damaged"][1] == {
        "key": "batch 2/block 3", "segment": live[0], "offset": live[1],
        "length": BLOCK_BYTES, "live": True, "errno": 0,
    }  # fmt: skip


def test_a_segment_that_was_cut_off_costs_only_the_blocks_that_are_gone(command: Run, crashed_disk: Path) -> None:
    os.truncate(crashed_disk / "segments/0", MIB // 2)

    ended = command("disk", "verify", "--json", str(crashed_disk))

    found = json.loads(ended.stdout)
    assert (ended.returncode, found["blocks"], found["damaged_batches"]) == (0, BLOCKS - 1, 1)
    assert ended.stderr == (
        b"infinistore: 1 batches are not whole, as after a crash; what is whole in them was verified\n"
    )


def test_a_folder_that_is_no_disk_is_refused(command: Run, tmp_path: Path) -> None:
    for arguments in (["inspect"], ["verify"], ["wipe", "--yes"]):
        ended = command("disk", *arguments, str(tmp_path))
        assert ended.returncode == 2
        assert b"is not a disk of InfiniStore" in ended.stderr


def test_what_is_not_a_whole_disk_says_what_to_do(command: Run, tmp_path: Path) -> None:
    (tmp_path / "tenants").mkdir()
    ended = command("disk", "wipe", "--yes", str(tmp_path))
    assert f"give one of them, such as {tmp_path}/tenants/NAME" in ended.stderr.decode()
    (tmp_path / "left" / "tenants" / "ann").mkdir(parents=True)
    left = tmp_path / "left" / "tenants" / "ann"
    (left / "snapshot.new").write_bytes(b"a part")
    assert command("disk", "wipe", "--yes", str(left)).returncode == 0
    assert os.listdir(left) == []
    open_folder(left).close()
    for name in ("inspect", "verify"):
        assert b"is empty: no server has written to it yet" in command("disk", name, str(left)).stderr


def test_a_disk_of_another_version_is_refused_and_can_be_wiped(command: Run, disk: Path) -> None:
    data = bytearray((disk / "disk").read_bytes())
    for copy in (0, 4096):
        data[copy + 16 : copy + 20] = (9).to_bytes(4, "little")
        data[copy + 8 : copy + 16] = xxh3_64_intdigest(bytes(data[copy + 16 : copy + 4096])).to_bytes(8, "little")
    (disk / "disk").write_bytes(data)

    for name in ("inspect", "verify"):
        ended = command("disk", name, str(disk))
        assert ended.returncode == 2
        assert b"has format version 9, and this release reads versions 1 and 2" in ended.stderr
    assert command("disk", "wipe", "--yes", str(disk)).returncode == 0


def test_wiping_asks_first_and_needs_a_word_without_a_terminal(command: Run, disk: Path) -> None:
    ended = command("disk", "wipe", str(disk))

    assert ended.returncode == 2
    assert b"add --yes to say that you mean it" in ended.stderr
    assert command("disk", "verify", str(disk)).returncode == 0


def test_a_wiped_disk_is_a_new_one(command: Run, disk: Path) -> None:
    ended = command("disk", "wipe", "--yes", "--json", str(disk))

    assert (ended.returncode, ended.stderr) == (0, b"")
    wiped = json.loads(ended.stdout)
    assert wiped["wiped"] == str(disk) and wiped["freed_bytes"] >= 2 * MIB
    assert os.listdir(disk) == []
    folder = open_folder(disk)
    assert folder.superblock() == b""
    folder.close()


def test_there_is_help(command: Run) -> None:
    assert b"verify" in command("disk", "--help").stdout
    assert b"exit code is 6" in command("disk", "verify", "--help").stdout
