"""What the doctor says of folders for the SSD tier."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infinistore.doctor import Finding, Level, examine_disk
from infinistore.sizes import KIB

from .machines import machine


def works(folder_fd: int) -> bool:
    return True


def diagnose(
    tmp_path: Path,
    kind: str = "ext4",
    *,
    path: Path | None = None,
    queue: dict[str, str] | None = None,
    queue_folder: str = "queue",
    probe: Callable[[int], bool] = works,
) -> dict[str, Finding]:
    """What is found of a folder on a file system of a kind, on a device that says
    this of itself.
    """
    disk = path or tmp_path / "nvme0"
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    other = f"{os.major(device)}:{os.minor(device) + 1}"
    others, ours = (
        f"22 1 {other} / /proc rw - proc proc rw",
        f"36 1 {number} / /mnt rw shared:1 - {kind} /dev/nvme0n1 rw",
    )
    files = {"proc/self/mountinfo": f"{others}\n{ours}\n"}
    for name, text in (queue or {"rotational": "0\n", "write_cache": "write back\n"}).items():
        files[f"sys/dev/block/{number}/{queue_folder}/{name}"] = text
    host = machine(tmp_path / "machine", files)
    return {
        finding.subject.removeprefix(str(disk)).removeprefix(": "): finding
        for finding in examine_disk(host, disk, probe)
    }


def complaints(found: dict[str, Finding]) -> dict[str, Level]:
    return {subject: finding.level for subject, finding in found.items() if finding.level is not Level.GOOD}


def test_a_folder_to_be_made_on_an_ssd_is_good(tmp_path: Path) -> None:
    found = diagnose(tmp_path)

    assert set(complaints(found)) <= {"room"}  # which is this machine's own
    assert found[""].text == "will be made by the server"
    assert found["O_DIRECT"].text.startswith("works")
    assert found["file system"].text == "ext4 on /dev/nvme0n1"
    assert found["device"].text == "does not rotate"
    assert found["write cache"].text.startswith("volatile")
    assert os.listdir(tmp_path) == ["machine"]


def test_an_existing_folder_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "nvme0").mkdir()
    assert diagnose(tmp_path)[""].text == "this user may write it"


def test_a_path_that_cannot_become_a_folder_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    found = diagnose(tmp_path, path=tmp_path / "file")
    assert (found[""].level, found[""].remedy) == (Level.BAD, "give a folder")
    assert len(found) == 1
    found = diagnose(tmp_path, path=tmp_path / "missing/nvme0")
    assert (found[""].level, found[""].remedy) == (Level.BAD, f"mkdir -p {tmp_path}/missing, or correct the path")


def test_without_direct_io_another_file_system_is_recommended(tmp_path: Path) -> None:
    found = diagnose(tmp_path, probe=lambda folder_fd: False)

    assert found["O_DIRECT"].level is Level.WARNING
    assert found["O_DIRECT"].remedy == "give a folder on a local SSD, with ext4 or XFS"


def test_a_disk_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    def probe(folder_fd: int) -> bool:
        raise OSError(5, "Input/output error")

    found = diagnose(tmp_path, probe=probe)

    assert found["O_DIRECT"].level is Level.BAD
    assert found["O_DIRECT"].text == "a file cannot be written: Input/output error"


@pytest.mark.parametrize(
    ("kind", "level", "word"),
    [
        ("xfs", Level.GOOD, "xfs"),
        ("tmpfs", Level.BAD, "memory"),
        ("overlay", Level.WARNING, "container"),
        ("btrfs", Level.WARNING, "in place"),
        ("nfs4", Level.WARNING, "not local"),
        ("fuse.sshfs", Level.WARNING, "not local"),
    ],
)
def test_file_systems_that_do_not_suit_are_named(tmp_path: Path, kind: str, level: Level, word: str) -> None:
    found = diagnose(tmp_path, kind)["file system"]

    assert (found.level, word in found.text) == (level, True)


def test_a_hard_disk_is_warned_of(tmp_path: Path) -> None:
    found = diagnose(tmp_path, queue={"rotational": "1\n", "write_cache": "write through\n"})

    assert found["device"].level is Level.WARNING
    assert "unless this is a virtual disk" in found["device"].remedy
    assert found["write cache"].text.startswith("none")


def test_a_partition_is_asked_by_its_disk(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    (tmp_path / f"machine/sys/dev/block/{os.major(device)}:{os.minor(device)}").mkdir(parents=True)

    found = diagnose(tmp_path, queue={"rotational": "1\n"}, queue_folder="../queue")

    assert found["device"].level is Level.WARNING


def test_little_room_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    values = list(real)
    values[:5] = [4 * KIB, 4 * KIB, 1000, 100, 100]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))

    found = diagnose(tmp_path)["room"]

    assert (found.level, found.text) == (Level.WARNING, "400 KiB of 3.91 MiB are free")
