"""The folders of tenants on a disk: each has one of its own, `tenants/NAME`, which is a
disk as any other is.

So what is on disk says whose it is, and nothing of one tenant is in the files of
another. What belongs to nobody any more is removed.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from infinistore.disk_io.folder import SUPERBLOCK, TENANTS, is_disk, lock, open_existing_folder
from infinistore.errors import ConfigError
from infinistore.host import let_go_in_child

__all__ = ["TenantFolders"]

_NOT_FOREIGN: Final = {TENANTS, "lost+found"}


class TenantFolders:
    """The folders `tenants` on several disks, locked by this process. Its methods
    block."""

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
        """Unlock the disks, and remove what was made and has stayed empty;
        idempotent."""
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
        foreign = sorted(set(names) - _NOT_FOREIGN)
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
