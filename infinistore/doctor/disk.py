"""Folders for the SSD tier: room, O_DIRECT, and what lies below the folder."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

from infinistore.doctor.findings import Finding, Host, bad, good, warning
from infinistore.sizes import GIB, describe_size

__all__ = ["examine_disk"]

_TOPIC: Final = "disk"
_LITTLE_BYTES: Final = 10 * GIB
_OTHER_FOLDER: Final = "give a folder on a local SSD, with ext4 or XFS"
_IN_MEMORY: Final = {"tmpfs", "ramfs", "devtmpfs"}
_LAYERED: Final = {"overlay", "aufs"}
_COPY_ON_WRITE: Final = {"btrfs", "zfs", "bcachefs"}


def examine_disk(host: Host, path: Path, probe: Callable[[int], bool]) -> Iterator[Finding]:
    """Yield the findings about a folder that is, or is to be, a disk.

    `probe` tells whether O_DIRECT works in an open folder.
    """
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    yield _folder(path, existing)
    if not existing.is_dir():
        return
    yield _room(path, existing)
    yield _direct(path, existing, probe)
    yield from _below(host, path, os.stat(existing).st_dev)


def _folder(path: Path, existing: Path) -> Finding:
    if not existing.is_dir():
        return bad(_TOPIC, str(path), f"{existing} is no folder", "give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        return bad(
            _TOPIC, str(path), f"this user may not write {existing}", "chown or chmod it, or give another folder"
        )
    if existing == path:
        return good(_TOPIC, str(path), "this user may write it")
    if existing == path.parent:
        return good(_TOPIC, str(path), "will be made by the server")
    return bad(_TOPIC, str(path), f"{path.parent} is missing", f"mkdir -p {path.parent}, or correct the path")


def _room(path: Path, existing: Path) -> Finding:
    room = os.statvfs(existing)
    free_bytes = room.f_bavail * room.f_frsize
    text = f"{describe_size(free_bytes)} of {describe_size(room.f_blocks * room.f_frsize)} are free"
    if free_bytes >= _LITTLE_BYTES:
        return good(_TOPIC, f"{path}: room", text)
    return warning(_TOPIC, f"{path}: room", text, "free some room, or give a folder on a larger disk")


def _direct(path: Path, existing: Path, probe: Callable[[int], bool]) -> Finding:
    subject = f"{path}: O_DIRECT"
    try:
        fd = os.open(existing, os.O_RDONLY | os.O_DIRECTORY)
        try:
            works = probe(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return bad(_TOPIC, subject, f"a file cannot be written: {error.strerror}", "see the kernel's log (dmesg)")
    if works:
        return good(_TOPIC, subject, "works: blocks go from the pool to the disk and back without a copy")
    return warning(_TOPIC, subject, "does not work: the page cache takes memory, and loads stall others", _OTHER_FOLDER)


def _below(host: Host, path: Path, device: int) -> Iterator[Finding]:
    mount = _mount(host, f"{os.major(device)}:{os.minor(device)}")
    subject = f"{path}: file system"
    if mount is None:
        yield good(_TOPIC, subject, "unknown")
        return
    kind, source = mount.kind, f"{mount.kind} on {mount.source}"
    if kind in _IN_MEMORY:
        yield bad(_TOPIC, subject, f"{kind}, which is memory, and lost with a restart", _OTHER_FOLDER)
        return
    if kind in _LAYERED:
        yield warning(_TOPIC, subject, f"{source}: lost with its container", "mount a volume into the container")
    elif kind in _COPY_ON_WRITE:
        text = f"{source}, which never overwrites in place: room that was taken is not kept free, and writes cost more"
        yield warning(_TOPIC, subject, text, _OTHER_FOLDER)
    elif kind.startswith(("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "lustre")):
        yield warning(_TOPIC, subject, f"{source}, which is not local: reads wait for others", _OTHER_FOLDER)
    else:
        yield good(_TOPIC, subject, source)
    yield from _device(host, path, mount.device)


def _device(host: Host, path: Path, device: str) -> Iterator[Finding]:
    queue = next(
        (f for f in (f"sys/dev/block/{device}/queue", f"sys/dev/block/{device}/../queue") if host.exists(f)), ""
    )
    rotational = host.number(f"{queue}/rotational") if queue else None
    if rotational:
        remedy = "use an SSD, unless this is a virtual disk, which often says so without being one"
        yield warning(
            _TOPIC, f"{path}: device", "says that it rotates: a hard disk reads blocks a hundred times slower", remedy
        )
    elif rotational == 0:
        yield good(_TOPIC, f"{path}: device", "does not rotate")
    cache = host.text(f"{queue}/write_cache") if queue else ""
    if cache == "write back":
        yield good(_TOPIC, f"{path}: write cache", "volatile; it is flushed once for each batch before that counts")
    elif cache:
        yield good(_TOPIC, f"{path}: write cache", "none that loses anything; flushing costs little")


@attrs.frozen
class _Mount:
    kind: str
    source: str
    device: str


def _mount(host: Host, device: str) -> _Mount | None:
    """Return the mount of a device, MAJOR:MINOR (proc(5), mountinfo)."""
    for line in host.text("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words, (kind, source, *_) = before.split(), [*after.split(), "", ""]
        if len(words) > 2 and words[2] == device:
            return _Mount(kind, source, device)
    return None
