"""The disks of a store as they are written: `PATH:SIZE`, one or several.

A server and an embedded store take the same values. Whether a disk can be used is found
when it is opened; that numpy is there, which disks need, is found here.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from infinistore.errors import ConfigError
from infinistore.settings import Kind, path, switch
from infinistore.sizes import GIB, MIB, format_size, parse_size

ADMISSIONS: Final = ("lazy", "eager", "second-use")
"""When a block is written to disk: once a quarter of the pool has been put after it, at
once, or when it was read once."""
SMALLEST_DISK_BYTES: Final = 64 * MIB
"""How much a disk must be allowed to take."""
MOST_OPEN_FILES: Final = 32
"""How many files of one disk stay open between uses. To open one again costs a few
microseconds, and a read some hundred."""
DESCRIPTORS_OF_A_DISK: Final = MOST_OPEN_FILES + 16
"""With the folder, the lock, and what is in use beyond that: one file for each thread,
and what was written and is not flushed."""
_LARGEST_BYTES: Final = 1 << 50


@attrs.frozen
class DiskPlace:
    """A folder for blocks, and how many bytes of its disk they may take."""

    folder: Path
    size_bytes: int

    def __str__(self) -> str:
        """As it is written: `/mnt/nvme0:1TiB`."""
        return f"{self.folder}:{format_size(self.size_bytes)}"


def disk_places() -> Kind:
    """Disks as `PATH:SIZE`; several as a list, or as text with commas between them. The
    value is a tuple of `DiskPlace`.
    """

    def parse(raw: Any) -> tuple[DiskPlace, ...]:
        if isinstance(raw, str):
            raw = raw.split(",")
        if not isinstance(raw, Sequence):
            raise ValueError(_FORM)
        return tuple(one if isinstance(one, DiskPlace) else _parse_one(one) for one in raw)

    return Kind("PATH:SIZE", parse, _check, several=True)


_FORM: Final = "must be PATH:SIZE, such as /mnt/nvme0:1TiB"


def _parse_one(raw: Any) -> DiskPlace:
    folder, colon, size = str(raw).rpartition(":")
    if not isinstance(raw, str) or not colon or not folder.strip():
        raise ValueError(_FORM)
    try:
        size_bytes = parse_size(size, GIB)
    except ValueError as error:
        raise ValueError(f"{_FORM}: {size!r} {error}") from None
    return DiskPlace(path("PATH").parse(folder.strip()), size_bytes)


def check_disks_work() -> None:
    """Raise `ConfigError` if numpy is missing, or this is no Linux."""
    if sys.platform != "linux":
        raise ConfigError(f"a disk needs Linux, and this is {sys.platform}; leave it out, or use a server")
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise ConfigError(_NO_NUMPY) from None


def disk_compression() -> Kind:
    """On or off; on needs zstandard."""

    def check(value: Any) -> None:
        if value:
            try:
                import zstandard  # noqa: F401
            except ImportError:
                raise ValueError(_NO_ZSTANDARD) from None

    return attrs.evolve(switch(), check=check)


_NOT_HERE: Final = "which is not installed here"
_NO_ZSTANDARD: Final = f"needs zstandard, {_NOT_HERE}: pip install zstandard (the extra `compression`)"
_NO_NUMPY: Final = f"disks need numpy, {_NOT_HERE}: pip install numpy"


def _check(value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(one, DiskPlace) for one in value):
        raise ValueError(_FORM)
    for one in value:
        if not SMALLEST_DISK_BYTES <= one.size_bytes <= _LARGEST_BYTES:
            raise ValueError(
                f"has a size of {format_size(one.size_bytes)}; "
                f"it must be between {format_size(SMALLEST_DISK_BYTES)} and {format_size(_LARGEST_BYTES)}"
            )
    if value:
        try:
            check_disks_work()
        except ConfigError as error:
            raise ValueError(str(error)) from None
    twice = _twice(os.path.realpath(one.folder) for one in value)
    if twice:
        raise ValueError(f"names {twice} twice; give each disk once")


def _twice(folders: Iterable[str]) -> str:
    seen: set[str] = set()
    for folder in folders:
        if folder in seen:
            return folder
        seen.add(folder)
    return ""
