"""The end of a process, or of a machine, before every change of a disk's folder:
afterwards each command works, and so does a server, also one without the tenant whose
folder it is.

The folder is copied before every call that changes it. After the end of a machine,
files are there again that were removed since the folder was last synced, but for the
last one.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from infinistore.disk.format import Superblock, encode_superblock
from infinistore.disk_io import open_existing_folder, open_folder
from infinistore.disk_io.files import DiskFiles
from infinistore.disk_io.folder import TenantFolders
from infinistore.sizes import MIB

SUPERBLOCK = encode_superblock(Superblock(0, bytes(16), bytes(16), 1, 0, 0, MIB, 0, 0, 0))
CHANGES = ("open", "mkdir", "unlink", "rmdir", "rename", "ftruncate", "fsync", "pwritev")


class Copies:
    """Copies of a folder before each change."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._copies = top.with_name("copies")
        self._removed: dict[Path, bytes] = {}
        self.all: list[Path] = []
        self._is_copying = False

    def copy(self) -> None:
        self._is_copying = True
        lost = dict(list(self._removed.items())[:-1])
        for removed in ({}, lost) if lost else ({},):
            self.all.append(self._copies / str(len(self.all)))
            shutil.copytree(self._top, self.all[-1])
            for path, data in removed.items():
                back = self.all[-1] / path.relative_to(self._top)
                back.parent.mkdir(parents=True, exist_ok=True)
                back.write_bytes(data)
        self._is_copying = False

    def changing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for a call of the system."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_copying or (name == "open" and not arguments[1] & os.O_CREAT):
                return real(*arguments, **options)
            self.copy()
            if name == "unlink":
                path = Path(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), arguments[0])
                if path.exists():
                    self._removed[path] = path.read_bytes()
            if name == "fsync":
                synced = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                self._removed = {path: data for path, data in self._removed.items() if synced not in path.parents}
                return None
            return real(*arguments, **options)

        return call

    @contextmanager
    def made(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for name in CHANGES:
                patched.setattr(os, name, self.changing(name, getattr(os, name)))
            yield


# What changes the folder of the tenant ann, on the disk at `top`.


def begin(top: Path) -> None:
    with ExitStack() as undo:
        undo.callback(TenantFolders([top]).close)
        undo.callback(open_folder(top / "tenants" / "ann").close)


def write(top: Path) -> None:
    files = DiskFiles(open_folder(top / "tenants" / "ann"))
    files.write_superblock(0, SUPERBLOCK)
    files.allocate("segments/0", 8192)
    files.replace("snapshot", [memoryview(bytes(100))])
    files.replace("snapshot", [memoryview(bytes(200))])
    files.close()


def wipe(top: Path) -> None:
    folder = open_existing_folder(top / "tenants" / "ann", to_wipe=True)
    folder.wipe()
    folder.close()


def remove(top: Path) -> None:
    folders = TenantFolders([top])
    folders.wipe_all_but([])
    folders.close()
    assert os.listdir(top / "tenants") == []


def test_a_folder_can_be_used_whatever_was_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing here is for good
    top = tmp_path / "disk"
    (top / "tenants").mkdir(parents=True)
    copies = Copies(top)
    with copies.made():
        for step in (begin, write, wipe, begin, write, remove, begin):
            step(top)
    assert len(copies.all) > 50
    for copy in copies.all:
        for command in (begin, wipe, remove):
            again = shutil.copytree(copy, copy.with_name(f"{copy.name} {command.__name__}"))
            folder = again / "tenants" / "ann"
            if command is not wipe or (folder.exists() and os.listdir(folder) not in ([], ["segments"])):
                command(again)
            begin(again)
