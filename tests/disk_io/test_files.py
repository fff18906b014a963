"""The files of a disk, with real ones: transfers, room, durability, replacement."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinistore.disk.jobs import ALIGNMENT_BYTES
from infinistore.disk_io import DiskFolder, open_folder
from infinistore.disk_io.direct_io import aligned_memory
from infinistore.disk_io.files import DiskFiles
from infinistore.sizes import MIB
from tests.bad_days.test_fork import in_child

SEGMENT = "segments/0"


@pytest.fixture
def files(path: Path) -> Iterator[DiskFiles]:
    opened = DiskFiles(open_folder(path))
    yield opened
    opened.close()


@pytest.fixture(params=["past the page cache", "by the page cache"])
def either_files(path: Path, request: pytest.FixtureRequest) -> Iterator[DiskFiles]:
    """Files with O_DIRECT, if it works here, and without."""
    direct = request.param == "past the page cache"
    folder = open_folder(path) if direct else open_folder(path, probe=lambda folder_fd: False)
    opened = DiskFiles(folder)
    if direct and not folder.direct:
        opened.close()
        pytest.skip(f"O_DIRECT does not work in {path}")
    yield opened
    opened.close()


def pages(*contents: int) -> list[memoryview]:
    """Pages in places of their own, each full of one byte."""
    views = []
    for content in contents:
        views.append(aligned_memory(ALIGNMENT_BYTES))
        views[-1][:] = bytes([content]) * ALIGNMENT_BYTES
    return views


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the folder itself
            continue
    return found


def test_what_is_written_is_read_from_and_to_scattered_memory(either_files: DiskFiles, path: Path) -> None:
    files = either_files
    files.allocate(SEGMENT, MIB)

    assert files.write(SEGMENT, 3 * ALIGNMENT_BYTES, pages(1, 2, 3)) == 3 * ALIGNMENT_BYTES
    files.flush(SEGMENT)

    read = pages(9, 9)
    assert files.read(SEGMENT, 4 * ALIGNMENT_BYTES, read) == 2 * ALIGNMENT_BYTES
    assert read == pages(2, 3)
    assert (path / SEGMENT).stat().st_size == MIB


def test_a_file_is_read_up_to_its_end(either_files: DiskFiles, path: Path) -> None:
    (path / "snapshot").write_bytes(b"s" * (ALIGNMENT_BYTES + 100))
    read = pages(9, 9, 9)

    assert either_files.read("snapshot", 0, read) == ALIGNMENT_BYTES + 100
    assert bytes(read[0]) + bytes(read[1][:100]) == b"s" * (ALIGNMENT_BYTES + 100)
    assert either_files.read("snapshot", 2 * ALIGNMENT_BYTES, read) == 0


def test_a_segment_gets_its_room_at_once_and_is_this_users_alone(files: DiskFiles, path: Path) -> None:
    files.allocate(SEGMENT, MIB)

    status = (path / SEGMENT).stat()
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB
    assert status.st_mode & 0o777 == 0o600


def test_to_allocate_what_is_there_keeps_its_bytes(files: DiskFiles, path: Path) -> None:
    files.allocate(SEGMENT, MIB)
    files.write(SEGMENT, 0, pages(7))
    files.allocate(SEGMENT, 2 * MIB)

    assert (path / SEGMENT).stat().st_size == 2 * MIB
    assert (path / SEGMENT).read_bytes()[:ALIGNMENT_BYTES] == bytes(pages(7)[0])


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_preallocate_is_written_instead(path: Path, code: int) -> None:
    def preallocate(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    files = DiskFiles(open_folder(path), preallocate=preallocate)
    (path / SEGMENT).write_bytes(b"kept")
    files.allocate(SEGMENT, MIB + ALIGNMENT_BYTES)

    assert (path / SEGMENT).read_bytes() == b"kept".ljust(MIB + ALIGNMENT_BYTES, b"\0")
    assert (path / SEGMENT).stat().st_blocks * 512 >= MIB
    files.close()


def test_a_full_disk_leaves_a_segment_as_long_as_it_was(path: Path) -> None:
    def preallocate(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = DiskFiles(open_folder(path), preallocate=preallocate)
    (path / SEGMENT).write_bytes(b"kept")

    with pytest.raises(OSError, match="No space left"):
        files.allocate(SEGMENT, MIB)
    assert (path / SEGMENT).read_bytes() == b"kept"
    files.close()


def test_a_file_that_is_missing_is_not_created_by_writing(files: DiskFiles, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write(SEGMENT, 0, pages(1))
    with pytest.raises(FileNotFoundError):
        files.read(SEGMENT, 0, pages(1))
    with pytest.raises(FileNotFoundError):
        files.flush(SEGMENT)
    assert os.listdir(path / "segments") == []


@pytest.mark.parametrize("length", [0, 1, ALIGNMENT_BYTES, MIB - 1, MIB, 2 * MIB + 5])
def test_a_file_is_replaced_as_a_whole(either_files: DiskFiles, path: Path, length: int) -> None:
    contents = os.urandom(length)
    cut = length // 3
    either_files.replace("snapshot", [memoryview(b"old")])
    read = pages(0)
    either_files.read("snapshot", 0, read)

    either_files.replace("snapshot", [memoryview(contents[:cut]), memoryview(contents[cut:])])

    assert (path / "snapshot").read_bytes() == contents
    assert sorted(os.listdir(path)) == ["disk", "segments", "snapshot"]
    either_files.read("snapshot", 0, read)  # not by the descriptor of the old one
    assert bytes(read[0][:length]) == contents[:ALIGNMENT_BYTES]


def test_a_replacement_that_fails_leaves_the_file_as_it_was(files: DiskFiles, path: Path) -> None:
    files.replace("snapshot", [memoryview(b"old")])
    released = memoryview(bytearray(5))
    released.release()

    with pytest.raises(ValueError, match="released"):
        files.replace("snapshot", [memoryview(b"new"), released])

    assert (path / "snapshot").read_bytes() == b"old"
    assert sorted(os.listdir(path)) == ["disk", "segments", "snapshot"]


def test_the_copies_of_a_superblock_do_not_touch_each_other(files: DiskFiles) -> None:
    files.write_superblock(1, b"second")
    files.write_superblock(0, b"first")
    files.write_superblock(1, b"third")

    assert files.folder.superblock() == b"first".ljust(ALIGNMENT_BYTES, b"\0") + b"third".ljust(ALIGNMENT_BYTES, b"\0")


def test_few_files_stay_open_and_none_that_was_written_and_not_flushed(path: Path) -> None:
    files = DiskFiles(open_folder(path), max_open=2)
    for number in range(6):
        files.allocate(f"segments/{number}", ALIGNMENT_BYTES)
    files.write("segments/5", 0, pages(1))
    for number in range(5):
        files.read(f"segments/{number}", 0, pages(0))

    def opened() -> set[str]:
        return {Path(name).name for name in open_files() if name.startswith(str(path / "segments"))}

    assert len(opened()) == 2 and "5" in opened()
    files.flush("segments/5")
    for number in range(5):
        files.read(f"segments/{number}", 0, pages(0))
    assert len(opened()) == 2 and "5" not in opened()
    files.close()
    assert not opened()


@pytest.mark.process
def test_a_forked_child_closes_its_copies_and_the_parent_goes_on(files: DiskFiles, path: Path) -> None:
    files.allocate(SEGMENT, MIB)
    files.write(SEGMENT, 0, pages(1))

    def nothing_is_open_here() -> None:
        assert not [name for name in open_files() if name.startswith(str(path))]

    in_child(nothing_is_open_here)
    files.flush(SEGMENT)
    assert files.read(SEGMENT, 0, read := pages(0)) == ALIGNMENT_BYTES
    assert read == pages(1)


def test_a_disk_that_is_closed_can_be_opened_again(files: DiskFiles, path: Path) -> None:
    files.allocate(SEGMENT, MIB)
    files.write(SEGMENT, 0, pages(1))
    files.close()
    files.close()

    folder: DiskFolder = open_folder(path)
    assert folder.files() == {SEGMENT: MIB}
    folder.close()
