"""Runs a program as if this were a Mac: without what only Linux has.

    python without_linux.py CODE [ARGUMENT...]

Modules that were imported before keep what they have: Python's own, and those of other
packages, which have their own ways there. What is imported from now on finds neither
the names that Python has on Linux only, nor /proc and /sys, nor system calls of Linux.
"""

import ctypes
import errno
import fcntl
import importlib
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from fnmatch import fnmatch
from typing import Any

HIDDEN = {
    ctypes: "",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_* F_*PIPE_SZ F_NOTIFY DN_*",
    mmap: "MADV_DONTFORK MADV_DOFORK MADV_*HUGEPAGE MADV_*MERGEABLE MADV_HWPOISON MADV_REMOVE MADV_*DUMP MAP_POPULATE"
    " MAP_DENYWRITE MAP_EXECUTABLE MAP_STACK",
    os: "memfd_create MFD_* eventfd* EFD_* timerfd* TFD_* sched_*aff* posix_fa* POSIX_FADV_* O_DIRECT O_TMPFILE O_PATH"
    " O_NOATIME O_LARGEFILE pipe2 fdatasync RWF_* preadv pwritev pidfd_* P_PIDFD copy_file_range *splice* SPLICE_*"
    " getrandom GRND_* setns unshare CLONE_* *xattr XATTR_* getres?id setres?id PIDFD_*",
    resource: "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RT* RLIMIT_SIGPENDING RUSAGE_THREAD",
    select: "epoll EPOLL*",
    signal: "SIGRT* SIGPWR SIGSTKFLT SIGPOLL SIGCLD pidfd_send_signal sigwaitinfo sigtimedwait",
    socket: "MSG_CMSG_CLOEXEC MSG_NOSIGNAL MSG_MORE MSG_ERRQUEUE MSG_FASTOPEN MSG_CONFIRM SO_PEERCRED SO_PEERSEC"
    " SO_DOMAIN SO_PROTOCOL SO_BINDTODEVICE SO_MARK SO_PRIORITY SO_PASS* SOCK_NONBLOCK SOCK_CLOEXEC TCP_KEEPIDLE"
    " TCP_USER_TIMEOUT TCP_QUICKACK TCP_CORK TCP_DEFER_ACCEPT TCP_INFO TCP_LINGER2 TCP_SYNCNT TCP_WINDOW_CLAMP"
    " TCP_CONGESTION AF_NETLINK AF_PACKET AF_VSOCK AF_ALG AF_CAN AF_TIPC",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
FIRST = (
    "asyncio attrs bitarray cattrs concurrent.futures.thread h11 importlib.metadata logging.handlers msgpack numpy"
    " outcome platform prometheus_client rich.progress rich.table rich_click ssl starlette.applications subprocess"
    " tempfile termios trio urllib.request xxhash yaml"
)


class _Libc(ctypes.CDLL):
    """A C library without Linux's own functions, and with a kernel that does not know
    Linux's advice.
    """

    def __getattr__(self, name: str) -> Any:
        if name in ("inotify_init1", "inotify_add_watch", "syscall", "prctl", "memfd_create", "eventfd"):
            raise AttributeError(name)
        return _Madvise() if name == "madvise" else super().__getattr__(name)


class _Madvise:
    def __call__(self, address: int, length: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def _hide(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if path.startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _without(module: types.ModuleType, hidden: str) -> types.ModuleType:
    names = {
        name: value
        for name, value in vars(module).items()
        if not any(fnmatch(name, pattern) for pattern in hidden.split())
    }
    found = types.ModuleType(module.__name__)
    vars(found).update(names)
    return found


def main() -> None:
    """Run a program without Linux."""
    for name in FIRST.split():
        importlib.import_module(name)
    idle = socket.TCP_KEEPIDLE
    for module, hidden in HIDDEN.items():
        sys.modules[module.__name__] = _without(module, hidden)
    vars(sys.modules["socket"])["TCP_KEEPALIVE"] = idle  # what a Mac calls it
    vars(sys.modules["ctypes"])["CDLL"] = _Libc
    sys.platform = "darwin"
    sys.addaudithook(_hide)
    code = sys.argv[1]
    del sys.argv[1]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
