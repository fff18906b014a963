"""Waits until something in a folder changes: inotify of Linux, on Trio."""

import ctypes
import os
from pathlib import Path
from typing import Final

import trio

__all__ = ["FolderWatch"]

_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_MASK: Final = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF


class FolderWatch:
    """What happens to the entries of some folders, from when it is made until it is
    closed.
    """

    def __init__(self, folders: "set[Path]") -> None:
        """Raises OSError if a folder cannot be watched."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for folder in folders:
            if libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _MASK) < 0:
                number = ctypes.get_errno()
                os.close(self._descriptor)
                raise OSError(number, os.strerror(number))

    async def changed(self) -> None:
        """Wait until something has changed since the last call."""
        await trio.lowlevel.wait_readable(self._descriptor)
        try:
            while os.read(self._descriptor, 64 * 1024):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Watch no longer."""
        trio.lowlevel.notify_closing(self._descriptor)
        os.close(self._descriptor)
