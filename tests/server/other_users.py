"""Connections of other users, made by root in the test's own process: in Linux each
thread has credentials of its own, which only the C library keeps alike.
"""

import ctypes
import os
import platform
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

__all__ = ["connect_as", "needs_root"]

needs_root = pytest.mark.skipif(
    "os.getuid() != 0 or platform.machine() not in ('x86_64', 'aarch64')",
    reason="only root can become another user, and give files away",
)
_NUMBERS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""Of the system calls setgroups, setresgid and setresuid."""


def connect_as(path: Path, uid: int, gid: int, groups: Sequence[int] = ()) -> socket.socket:
    """Connect to a Unix socket as a user who is in these groups.

    Raises:
        OSError: the user may not.
    """
    sock = socket.socket(socket.AF_UNIX)
    refused: list[OSError] = []

    def connect() -> None:
        try:
            _become(uid, gid, groups)
            sock.connect(str(path))
        except OSError as error:
            refused.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    if refused:
        sock.close()
        raise refused[0]
    return sock


def _become(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Make the thread that calls this another user's, and no other thread."""
    system: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall
    set_groups, set_gid, set_uid = _NUMBERS[platform.machine()]
    calls = (
        (set_groups, len(groups), (ctypes.c_uint32 * len(groups))(*groups)),
        (set_gid, gid, gid, gid),
        (set_uid, uid, uid, uid),
    )
    for call in calls:
        if system(*call) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
