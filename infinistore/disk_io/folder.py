"""The folder of a disk: found usable, created, and locked, before anything is written.

A folder belongs to one process at a time. It holds a lock (flock(2)) on the file `disk`
until it closes the folder or ends, however it ends. Nothing is changed in a folder that
is in use, that is not a disk of InfiniStore, or that cannot be written. Whatever is
wrong with a folder is a `ConfigError`, which says what to do.

Each tenant has a folder of its own, `tenants/NAME`, which is a disk as any other is. So
what is on disk says whose it is, and nothing of one tenant is in the files of another.
What belongs to nobody any more is removed.

Leaves to others: what the files contain (`infinistore/disk/`), and to read and write
them (`files.py`).
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from infinistore.disk.format import COPIES, SUPERBLOCK_BYTES, Superblock, is_unwritten
from infinistore.disk_io.direct_io import PROBE, aligned_memory, direct_io_works
from infinistore.errors import ConfigError
from infinistore.host import let_go_in_child
from infinistore.sizes import MIB, format_size, in_units

SUPERBLOCK: Final = "disk"
SEGMENTS: Final = "segments"
SNAPSHOT: Final = "snapshot"
TENANTS: Final = "tenants"
NEW: Final = ".new"
"""What the name of a file ends in until it has replaced another one."""
_STAT_BLOCK_BYTES: Final = 512  # whatever the file system's blocks are
_LEFT_BEHIND: Final = {SNAPSHOT + NEW, PROBE}
"""What a server leaves that was killed while it wrote a snapshot, or created a disk."""
_NOT_FOREIGN: Final = {SUPERBLOCK, "lost+found", *_LEFT_BEHIND}
"""These, and what file systems put into their top folder."""

_REMEDIES: Final = {
    errno.ENOENT: "create the folder that it is to be in, or correct the path",
    errno.ENOTDIR: "give a folder",
    errno.EACCES: "let this user enter and write it (chown, chmod), or give another folder",
    errno.EPERM: "let this user enter and write it (chown, chmod), or give another folder",
    errno.EROFS: "mount it writable, or give another folder",
    errno.ENOSPC: "free some room, or give another folder",
    errno.EDQUOT: "raise the quota, or give another folder",
    errno.ELOOP: "give the folder itself, without symbolic links inside",
    errno.EISDIR: "give an empty folder",
}


class DiskFolder:
    """The folder of one disk, open and locked by this process.

    `fd` is the folder's descriptor, `superblock_fd` the locked file's, `direct` whether
    files are read and written past the page cache, `writable` whether they may be
    written, `is_made` whether the folder was made to be this. Make one with
    `open_folder`.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        superblock_fd: int,
        *,
        direct: bool,
        writable: bool = True,
        is_made: bool = False,
    ) -> None:
        self.path = path
        self.fd = fd
        self.superblock_fd = superblock_fd
        self.direct = direct
        self.writable = writable
        self._is_made = is_made
        let_go_in_child(self)

    def superblock(self) -> bytes:
        """Return all of the file `disk`; empty if the disk is new."""
        return _superblock(self.superblock_fd)

    def files(self) -> dict[str, int]:
        """Return the length in bytes of each other file of the disk, by name."""
        found = {f"{SEGMENTS}/{name}": status.st_size for name, status in self._segments()}
        with suppress(FileNotFoundError):
            found[SNAPSHOT] = os.stat(SNAPSHOT, dir_fd=self.fd, follow_symlinks=False).st_size
        return found

    def used_bytes(self) -> int:
        """Return how much of its file system the disk's segments take."""
        return sum(status.st_blocks * _STAT_BLOCK_BYTES for _, status in self._segments())

    def _segments(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            fd = os.open(SEGMENTS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            return
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.name.isdecimal():
                        yield entry.name, entry.stat(follow_symlinks=False)
        finally:
            os.close(fd)

    def wipe(self) -> None:
        """Remove all files, durably. The disk is new from the first moment on.

        The folder stays, and so does what is not InfiniStore's. Blocks are not
        overwritten: who can read the device may still find them.
        """
        os.ftruncate(self.superblock_fd, 0)
        os.fsync(self.superblock_fd)
        for name in (*self.files(), *_LEFT_BEHIND):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
        with suppress(OSError):  # something else is in it
            os.rmdir(SEGMENTS, dir_fd=self.fd)
        os.fsync(self.fd)  # first: what is left without a superblock is no disk
        os.unlink(SUPERBLOCK, dir_fd=self.fd)
        os.fsync(self.fd)

    def free_bytes(self) -> int:
        """Return how much of its file system is left for this user."""
        room = os.fstatvfs(self.fd)
        return room.f_bavail * room.f_frsize

    def close(self) -> None:
        """Unlock the folder; idempotent."""
        for fd in (self.superblock_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self.superblock_fd = self.fd = -1

    def discard(self) -> None:
        """Close a folder that is not used after all, and remove what was made."""
        with suppress(OSError):
            if self.fd >= 0 and not self.superblock():
                self.wipe()
                if self._is_made:
                    self.path.rmdir()
        self.close()

    def let_go(self) -> None:
        """In a forked child: close the copies, which would keep the lock."""
        self.close()


def open_folder(path: Path, *, probe: Callable[[int], bool] = direct_io_works) -> DiskFolder:
    """Open and lock the folder of a disk, and create it if it is missing.

    `probe` tells whether O_DIRECT works in a folder. Blocks for some milliseconds.

    Raises:
        ConfigError: the folder cannot be used. Nothing that was there was changed.
    """
    no_folders = "its file system takes no folders; give one on a disk" if path.parent.is_dir() else ""
    with _explained(path, missing=no_folders), ExitStack() as undo:
        is_made = False
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            is_made = True
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        _check_contents(path, os.listdir(fd))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        superblock_fd = os.open(SUPERBLOCK, flags, 0o600, dir_fd=fd)
        undo.callback(os.close, superblock_fd)
        _check_and_lock(path, superblock_fd, fcntl.LOCK_EX)
        _check_superblock(path, superblock_fd)
        undo.pop_all()
        folder = DiskFolder(path, fd, superblock_fd, direct=False, is_made=is_made)
        undo.callback(folder.discard)
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o700)
        with suppress(FileExistsError):
            os.mkdir(SEGMENTS, 0o700, dir_fd=fd)
        folder.direct = probe(fd)
        undo.pop_all()
    return folder


def check_folder(path: Path, *, has_parts: bool = False) -> str:
    """Return who is using the folder of a disk now, in a sentence; empty if nobody is.

    It may be missing: `open_folder` creates it. With `has_parts`, its disks are in
    folders of their own, which are not looked at. Nothing is changed; what is there is
    locked for a moment.

    Raises:
        ConfigError: the folder cannot be used.
    """
    with _explained(path), ExitStack() as undo:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            _check_writable(path.parent)
            return ""
        undo.callback(os.close, fd)
        _check_writable(path)
        if has_parts:
            return ""
        names = os.listdir(fd)
        _check_contents(path, names)
        if SUPERBLOCK not in names:
            return ""
        superblock_fd = os.open(SUPERBLOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
        undo.callback(os.close, superblock_fd)
        _check_is_file(path, superblock_fd)
        _check_superblock(path, superblock_fd)
        try:
            lock(path, superblock_fd, fcntl.LOCK_SH)
        except ConfigError as error:
            return str(error)
    return ""


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number))


def open_existing_folder(path: Path, *, to_wipe: bool = False, locked: bool = True) -> DiskFolder:
    """Open the folder of a disk that exists: to read it, or to wipe it.

    Nothing is changed. While it is open to be read, no server can open it, unless
    `locked` is False: then a server may even be using it, and change it. To wipe it, it
    may also be what is left of a disk.

    Raises:
        ConfigError: it is no disk, cannot be used, or is in use.
    """
    with _explained(path, missing="give the folder that a server was given with --disk"), ExitStack() as undo:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        names = os.listdir(fd)
        if SUPERBLOCK not in names and not (to_wipe and is_disk(names)):
            remedy = "give the folder that a server was given with --disk"
            if TENANTS in names:
                remedy = f"it has those of tenants: give one of them, such as {path / TENANTS / 'NAME'}"
            raise ConfigError(f"{path} is not a disk of InfiniStore; {remedy}")
        flags = (os.O_RDWR | os.O_CREAT if to_wipe else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        superblock_fd = os.open(SUPERBLOCK, flags, 0o600, dir_fd=fd)
        undo.callback(os.close, superblock_fd)
        if locked:
            _check_and_lock(path, superblock_fd, fcntl.LOCK_EX if to_wipe else fcntl.LOCK_SH)
        _check_superblock(path, superblock_fd)
        direct = _can_be_read_directly(fd)
        undo.pop_all()
    return DiskFolder(path, fd, superblock_fd, direct=direct, writable=to_wipe)


def open_folders(
    disks: Sequence[tuple[Path, int]], *, probe: Callable[[int], bool] = direct_io_works
) -> list[DiskFolder]:
    """Open the folders of several disks, each with the bytes that it may use.

    Raises:
        ConfigError: one of them cannot be used, is given twice, or wants more than its
            file system has left. None of them stays open, and none is made.
    """
    given: dict[tuple[int, int], Path] = {}
    wanted_bytes: dict[int, int] = {}
    with ExitStack() as undo:
        folders: list[DiskFolder] = []
        for path, size_bytes in disks:
            _check_given_once(path, given)
            folder = open_folder(path, probe=probe)
            folders.append(folder)
            undo.callback(folder.discard)
            given[_identity(os.fstat(folder.fd))] = path
            with _explained(path):
                _check_room(folder, size_bytes, wanted_bytes)
        undo.pop_all()
    return folders


def lock_holder(fd: int, locks: Path = Path("/proc/locks")) -> int | None:
    """Return the process that holds a lock (flock) on an open file, if that is known.

    It is not if the process is in another container.
    """
    status = os.fstat(fd)
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in locks.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words[1:2] == ["FLOCK"] and file in words and int(words[4]) > 0:
                return int(words[4])
    return None


def is_disk(names: Collection[str]) -> bool:
    """Whether a folder that has these names is a disk, or what is left of one."""
    return SUPERBLOCK in names or (_NOT_FOREIGN.issuperset(names) and not _LEFT_BEHIND.isdisjoint(names))


def _check_contents(path: Path, names: Sequence[str]) -> None:
    """Refuse a folder that holds anything, but no disk."""
    foreign = sorted(set(names) - _NOT_FOREIGN)
    if foreign and SUPERBLOCK not in names:
        tenants = f"; remove {TENANTS} if its tenants are not to come back" if TENANTS in names else ""
        raise ConfigError(
            f"disk {path} is not empty ({', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}) and not a disk of"
            f" InfiniStore{tenants}; give an empty folder, or one that does not exist yet"
        )


def _check_and_lock(path: Path, fd: int, kind: int) -> None:
    _check_is_file(path, fd)
    lock(path, fd, kind)


def _check_is_file(path: Path, fd: int) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise ConfigError(
            f"disk {path} is not a disk of InfiniStore: its {SUPERBLOCK} is no file; give an empty folder"
        )


def lock(path: Path, fd: int, kind: int = fcntl.LOCK_EX) -> None:
    """Lock an open file of a disk, or a folder there, with flock.

    Raises:
        ConfigError: another process, or this one, has it.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock_holder(fd)
        who = "this process" if holder == os.getpid() else f"process {holder}" if holder else "another process"
        raise ConfigError(f"disk {path} is in use by {who}; end that first, or give another folder") from None


def _superblock(fd: int) -> bytes:
    data = os.pread(fd, COPIES * SUPERBLOCK_BYTES, 0)
    return b"" if is_unwritten(data) else data


def _check_superblock(path: Path, fd: int) -> None:
    data = _superblock(fd)
    if data and not any(data[copy * SUPERBLOCK_BYTES :].startswith(Superblock.MAGIC) for copy in range(COPIES)):
        raise ConfigError(
            f"disk {path} has no superblock of InfiniStore in its file {SUPERBLOCK}; give another folder, or empty this"
            " one, if nothing in it is needed"
        )


def _can_be_read_directly(folder_fd: int) -> bool:
    """Whether O_DIRECT works in a folder that may not be written."""
    try:
        fd = os.open(SUPERBLOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        os.preadv(fd, [aligned_memory(SUPERBLOCK_BYTES)], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _check_given_once(path: Path, given: Mapping[tuple[int, int], Path]) -> None:
    with suppress(OSError):  # `open_folder` creates it, or says what is wrong
        first = given.get(_identity(path.stat()))
        if first is not None:
            raise ConfigError(f"disk {path} is given twice{'' if first == path else f' (as {first})'}; give it once")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _check_room(folder: DiskFolder, size_bytes: int, wanted_bytes: dict[int, int]) -> None:
    """Check that the disks given so far fit into this one's file system."""
    device = os.fstat(folder.fd).st_dev
    others_bytes = wanted_bytes.get(device, 0)
    used_bytes = folder.used_bytes()
    wanted_bytes[device] = others_bytes + max(0, size_bytes - used_bytes)
    free_bytes = folder.free_bytes()
    if wanted_bytes[device] <= free_bytes:
        return
    most_bytes = max(0, free_bytes + used_bytes - others_bytes) // MIB * MIB
    shared = f", of which other disks want {in_units(others_bytes)}" if others_bytes else ""
    raise ConfigError(
        f"disk {folder.path} has no room for {in_units(size_bytes)}: its file system has {in_units(free_bytes)} left"
        f"{shared}, and the disk has {in_units(used_bytes)} of it already; give at most {format_size(most_bytes)}, or"
        " free some room"
    )


@contextmanager
def _explained(path: Path, *, missing: str = "") -> Iterator[None]:
    """Say what to do about an error of the system; `missing` is for ENOENT."""
    try:
        yield
    except OSError as error:
        remedy = missing if error.errno == errno.ENOENT and missing else ""
        remedy = remedy or _REMEDIES.get(error.errno or 0, "see the kernel's log (dmesg), or give another folder")
        raise ConfigError(f"disk {path} cannot be used: {error.strerror}; {remedy}") from error


_NOT_A_TENANT: Final = {TENANTS, "lost+found"}


class TenantFolders:
    """The locked folders `tenants` on several disks. Methods block."""

    def __init__(self, disks: Sequence[Path]) -> None:
        """Create what is missing, and lock it.

        Raises:
            ConfigError: a disk cannot be used, or has blocks of a server without
                tenants. Nothing that was there was changed.
        """
        self._disks = disks
        self._fds: list[int] = []
        self._made: list[Path] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for disk in disks:
                try:
                    self._fds.append(self._opened(disk))
                except OSError as error:
                    raise ConfigError(
                        f"disk {disk} cannot be used: {error.strerror}; correct the path or its permissions, or give"
                        " another folder"
                    ) from error
            undo.pop_all()
        let_go_in_child(self)

    def of(self, tenant: str) -> list[Path]:
        """Return the folder of a tenant on each disk."""
        return [disk / TENANTS / tenant for disk in self._disks]

    def wipe_all_but(self, tenants: Collection[str]) -> list[str]:
        """Remove the blocks of everybody else, and return whose there were.

        Raises:
            ConfigError: they cannot be removed.
        """
        found = {name for fd in self._fds for name in os.listdir(fd)}
        others = sorted(found - set(tenants))
        for tenant in others:
            self.wipe(tenant)
        return others

    def wipe(self, tenant: str) -> None:
        """Remove the blocks of a tenant.

        Raises:
            ConfigError: they cannot be removed.
        """
        for folder in self.of(tenant):
            try:
                if folder.is_dir() and is_disk(os.listdir(folder)):
                    opened = open_existing_folder(folder, to_wipe=True)
                    try:
                        opened.wipe()
                    finally:
                        opened.close()
                if folder.is_dir():
                    folder.rmdir()
            except OSError as error:
                raise ConfigError(
                    f"disk {folder} belongs to no tenant, and cannot be removed: {error.strerror}; remove it"
                ) from error

    def close(self) -> None:
        """Unlock the disks, and remove new folders that stayed empty; idempotent."""
        while self._made:
            with suppress(OSError):
                self._made.pop().rmdir()
        self._unlock()

    def _unlock(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def let_go(self) -> None:
        """In a forked child: close its copies, which would keep the locks."""
        self._unlock()

    def _make(self, folder: Path) -> None:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            self._made.append(folder)

    def _opened(self, disk: Path) -> int:
        """Return the folder `tenants` of a disk, open and locked."""
        self._make(disk)
        names = os.listdir(disk)
        if SUPERBLOCK in names:
            raise ConfigError(
                f"disk {disk} has blocks of a server without tenants, which belong to none of them; give another"
                f" folder, or remove them: infinistore disk wipe {disk}"
            )
        foreign = sorted(set(names) - _NOT_A_TENANT)
        if foreign:
            raise ConfigError(
                f"disk {disk} is not empty ({', '.join(foreign[:3])}{', ...' if foreign[3:] else ''}) and not a disk of"
                " tenants; give an empty folder, or one that does not exist yet"
            )
        folder = disk / TENANTS
        self._make(folder)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            lock(disk, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd
