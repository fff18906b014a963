"""The folder of a disk: what is refused, what is created, and who holds the lock."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinistore.disk.format import SUPERBLOCK_BYTES, Superblock, encode_superblock
from infinistore.disk_io import DiskFolder, check_folder, open_existing_folder, open_folder, open_folders
from infinistore.disk_io.folder import lock_holder
from infinistore.errors import ConfigError
from infinistore.sizes import GIB, MIB
from tests.bad_days.test_fork import in_child

SUPERBLOCK = encode_superblock(Superblock(0, bytes(16), bytes(16), 1, 0, 0, MIB, 0, 0, 0))
HOLDS_A_DISK = """
import pathlib, sys
from infinistore.disk_io import open_folder
folder = open_folder(pathlib.Path(sys.argv[1]))
print("holds it", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_holding(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", HOLDS_A_DISK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "holds it\n"
        yield process
        process.stdin.close()


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_missing_folder_is_created_for_this_user_alone(path: Path) -> None:
    folder = open_folder(path)

    assert mode_of(path) == mode_of(path / "segments") == 0o700
    assert mode_of(path / "disk") == 0o600
    assert sorted(os.listdir(path)) == ["disk", "segments"]
    assert folder.superblock() == b""
    assert folder.files() == {}
    folder.close()


def test_an_empty_folder_of_others_becomes_this_users_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    (path / "lost+found").mkdir()

    open_folder(path).close()

    assert mode_of(path) == 0o700


def test_a_disk_is_opened_again_with_what_it_had(path: Path) -> None:
    open_folder(path).close()
    (path / "disk").write_bytes(SUPERBLOCK)
    (path / "segments/7").write_bytes(bytes(8192))
    (path / "segments/7.new").write_bytes(b"left behind")
    (path / "snapshot").write_bytes(b"12345")

    folder = open_folder(path)

    assert folder.superblock() == SUPERBLOCK
    assert folder.files() == {"segments/7": 8192, "snapshot": 5}
    assert folder.used_bytes() == (path / "segments/7").stat().st_blocks * 512
    folder.close()


def test_a_file_is_no_disk(path: Path) -> None:
    path.write_text("a file")

    with pytest.raises(ConfigError, match=r"nvme0 cannot be used: Not a directory; give a folder$"):
        open_folder(path)


def test_a_folder_in_a_missing_folder_is_not_created(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; create the folder that it is to be in"):
        open_folder(path / "deeper")
    assert not path.exists()


def test_a_folder_with_other_files_is_refused_and_left_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    for name in ("a", "b", "c", "d"):
        (path / name).touch()

    with pytest.raises(ConfigError, match=r"not empty \(a, b, c, \.\.\.\) and not a disk of InfiniStore; give an"):
        open_folder(path)
    assert sorted(os.listdir(path)) == ["a", "b", "c", "d"]
    assert mode_of(path) == 0o755


def test_a_superblock_that_leads_elsewhere_is_refused(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    (tmp_path / "passwd").write_text("precious")
    (path / "disk").symlink_to(tmp_path / "passwd")

    with pytest.raises(ConfigError, match="give the folder itself, without symbolic links inside"):
        open_folder(path)
    assert (tmp_path / "passwd").read_text() == "precious"


def test_a_superblock_that_is_no_file_is_refused(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "disk")

    with pytest.raises(ConfigError, match="its disk is no file; give an empty folder"):
        open_folder(path)


@pytest.mark.process
def test_a_folder_in_use_is_refused_and_names_who_uses_it(path: Path) -> None:
    with another_process_holding(path) as holder:
        expected = rf"nvme0 is in use by process {holder.pid}; end that first, or give another folder"
        with pytest.raises(ConfigError, match=expected):
            open_folder(path)
    open_folder(path).close()


@pytest.mark.process
def test_the_lock_ends_with_its_process_however_it_ends(path: Path) -> None:
    with another_process_holding(path) as holder:
        holder.kill()
        holder.wait()
        open_folder(path).close()


def test_a_folder_that_this_process_uses_already_is_refused(folder: DiskFolder) -> None:
    with pytest.raises(ConfigError, match="in use by this process; end that first"):
        open_folder(folder.path)


@pytest.mark.process
def test_a_forked_child_does_not_keep_the_lock(path: Path) -> None:
    folder = open_folder(path)

    def the_parents_folder_is_closed_here() -> None:
        assert folder.fd == folder.superblock_fd == -1

    in_child(the_parents_folder_is_closed_here)
    with pytest.raises(ConfigError, match="in use by this process"):
        open_folder(path)
    folder.close()


def test_the_holder_of_a_lock_is_unknown_where_the_kernel_does_not_say(folder: DiskFolder, tmp_path: Path) -> None:
    inode = os.fstat(folder.superblock_fd).st_ino
    locks = tmp_path / "locks"
    assert lock_holder(folder.superblock_fd) == os.getpid()
    assert lock_holder(folder.superblock_fd, locks) is None
    locks.write_text(f"1: FLOCK  ADVISORY  WRITE 0 fe:00:{inode} 0 EOF\n2: POSIX  ADVISORY  WRITE 17 fe:00:1 0 EOF\n")
    assert lock_holder(folder.superblock_fd, locks) is None


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, r"let this user enter and write it \(chown, chmod\)"),
        (errno.ENOSPC, "free some room"),
        (errno.EIO, r"see the kernel's log \(dmesg\)"),
    ],
)
def test_what_the_system_refuses_comes_with_a_remedy(path: Path, code: int, remedy: str) -> None:
    def probe(folder_fd: int) -> bool:
        raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError, match=rf"nvme0 cannot be used: {os.strerror(code)}; {remedy}"):
        open_folder(path, probe=probe)
    open_folder(path).close()  # nothing is left open


def test_a_folder_where_the_file_system_takes_none_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"disk /proc/disk cannot be used: .*takes no folders; give one on a disk"):
        open_folder(Path("/proc/disk"))


def test_a_disk_to_look_at_that_does_not_exist_is_the_wrong_path(path: Path) -> None:
    with pytest.raises(ConfigError, match="give the folder that a server was given with --disk"):
        open_existing_folder(path)


@pytest.mark.process
def test_a_disk_on_a_read_only_file_system_is_refused(path: Path) -> None:
    path.mkdir()
    mount = f"mount --bind {path} {path} && mount -o remount,bind,ro {path}"
    namespace = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    if subprocess.run([*namespace, mount], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let us mount, not even in a namespace")
    script = f"{mount} && exec {sys.executable} -c '{HOLDS_A_DISK}' {path}"

    ended = subprocess.run([*namespace, script], capture_output=True, text=True, input="", check=False)

    assert ended.stderr.splitlines()[-1].endswith(
        "nvme0 cannot be used: Read-only file system; mount it writable, or give another folder"
    )
    assert os.listdir(path) == []


def test_a_disk_that_is_given_twice_is_refused(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    (tmp_path / "other-name").symlink_to(path)

    with pytest.raises(ConfigError, match=r"nvme0 is given twice; give it once$"):
        open_folders([(path, MIB), (path, MIB)])
    with pytest.raises(ConfigError, match=r"other-name is given twice \(as .*nvme0\); give it once$"):
        open_folders([(path, MIB), (tmp_path / "other-name", MIB)])
    open_folder(path).close()


def test_disks_that_want_more_room_than_there_is_are_refused(path: Path, tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    total_bytes = room.f_frsize * room.f_blocks

    with pytest.raises(ConfigError, match=r"no room for .* left, .* has 0 bytes .* give at most \d+\w+, or free"):
        open_folders([(path, total_bytes + GIB)])
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match=r"two has no room for .*, of which other disks want .*; give at most"):
        open_folders([(path, MIB), (tmp_path / "two", total_bytes)])
    assert os.listdir(tmp_path) == []
    for folder in open_folders([(path, MIB), (tmp_path / "two", MIB)]):
        folder.close()


def test_the_room_that_a_disk_has_already_counts(path: Path, tmp_path: Path) -> None:
    open_folder(path).close()
    (path / "segments/0").write_bytes(bytes(4 * MIB))
    os.sync()
    [folder] = open_folders([(path, MIB)])

    assert folder.used_bytes() >= 4 * MIB
    folder.close()


def test_a_file_of_that_name_that_is_another_programs_is_refused_and_left_alone(path: Path) -> None:
    path.mkdir(mode=0o755)
    (path / "disk").write_bytes(b"an image of a virtual machine")

    with pytest.raises(ConfigError, match="has no superblock of InfiniStore in its file disk; give another folder"):
        open_folder(path)
    assert (mode_of(path), os.listdir(path)) == (0o755, ["disk"])


def test_a_superblock_of_zeros_is_what_a_crash_leaves_of_a_new_disk(path: Path) -> None:
    path.mkdir()
    (path / "disk").write_bytes(bytes(2 * SUPERBLOCK_BYTES))

    folder = open_folder(path)
    assert folder.superblock() == b""
    folder.close()


# Disks that exist


def spoil(what: str, path: Path) -> None:
    if what.startswith("in a"):
        path.parent.rmdir()
        if what == "in a file":
            path.parent.touch()
        return
    if what == "a file":
        path.touch()
        return
    path.mkdir()
    match what:
        case "other files":
            (path / "a").touch()
        case "a superblock elsewhere":
            (path / "disk").symlink_to("/dev/null")
        case "a superblock that is no file":
            os.mkfifo(path / "disk")
        case "another program's":
            (path / "disk").write_text("the blocks of another program" * 1000)


UNUSABLE = {
    "a file": "Not a directory",
    "in a missing folder": "create the folder that it is to be in",
    "in a file": "Not a directory",
    "other files": "is not empty",
    "a superblock elsewhere": "symbolic links",
    "a superblock that is no file": "its disk is no file",
    "another program's": "has no superblock",
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_check_refuses_what_a_server_would_refuse_and_changes_nothing(what: str, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "nvme0"
    path.parent.mkdir()
    spoil(what, path)
    before = sorted(tmp_path.rglob("*"))
    for look in (check_folder, open_folder):
        with pytest.raises(ConfigError, match=UNUSABLE[what]):
            look(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_check_of_a_folder_that_can_be_used_changes_nothing_and_says_who_uses_it(path: Path) -> None:
    assert check_folder(path) == ""
    assert not path.exists()
    path.mkdir(mode=0o755)
    assert check_folder(path) == ""
    assert (os.listdir(path), mode_of(path)) == ([], 0o755)
    folder = open_folder(path)
    assert "is in use by this process" in check_folder(path)
    folder.close()
    assert check_folder(path) == ""
    (path / "disk").unlink()
    (path / "tenants").mkdir()
    assert check_folder(path, has_parts=True) == ""


def test_a_check_refuses_a_folder_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may always
    for _ in range(2):
        with pytest.raises(ConfigError, match="Permission denied; let this user enter and write it"):
            check_folder(path)
        path.mkdir(exist_ok=True)


@pytest.fixture
def disk(path: Path) -> Path:
    """A disk with some files."""
    open_folder(path).close()
    (path / "disk").write_bytes(SUPERBLOCK)
    (path / "segments/0").write_bytes(bytes(4096))
    (path / "snapshot").write_bytes(b"1")
    return path


def test_a_disk_that_is_read_is_not_changed(disk: Path) -> None:
    before = sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*"))

    folder = open_existing_folder(disk)
    assert (folder.superblock(), folder.files()) == (SUPERBLOCK, {"segments/0": 4096, "snapshot": 1})
    with pytest.raises(ConfigError, match="in use by this process"):
        open_folder(disk)
    open_existing_folder(disk).close()  # others may read it, too
    folder.close()

    assert sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*")) == before


def test_a_disk_in_use_is_read_only_without_a_lock(disk: Path) -> None:
    used = open_folder(disk)

    with pytest.raises(ConfigError, match="in use by this process"):
        open_existing_folder(disk)
    with pytest.raises(ConfigError, match="in use by this process"):
        open_existing_folder(disk, to_wipe=True)
    open_existing_folder(disk, locked=False).close()
    used.close()


def test_a_folder_that_is_no_disk_can_neither_be_read_nor_wiped(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        open_existing_folder(path)
    path.mkdir()
    with pytest.raises(ConfigError, match="nvme0 is not a disk of InfiniStore; give the folder that a"):
        open_existing_folder(path, to_wipe=True)
    assert os.listdir(path) == []


def test_wiping_leaves_a_folder_for_a_new_disk_and_what_is_not_ours(disk: Path) -> None:
    (disk / "segments/notes").touch()
    folder = open_existing_folder(disk, to_wipe=True)
    folder.wipe()
    folder.close()
    assert [str(file.relative_to(disk)) for file in sorted(disk.rglob("*"))] == ["segments", "segments/notes"]

    (disk / "segments/notes").unlink()
    (disk / "segments").rmdir()
    open_folder(disk).close()
