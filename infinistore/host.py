"""What this machine grants a process, and how the process stays within it: threads,
which the system may refuse; memory, before the kernel starts to kill; NUMA nodes; and
what becomes of open stores in a forked child.

Files are read below a root that is given, and what cannot be read does not limit. The
two system calls for NUMA nodes are made by number, because libc does not have them and
libnuma may be missing. Memory is *preferred* on a node: when that is full, other nodes
help out, where a strict policy would have the kernel kill the process. In a forked
child every store that was open raises `StoreUnavailable`.
"""

import ctypes
import errno
import os
import platform
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, TypeAlias
from weakref import WeakSet

import attrs

from infinistore.errors import ConfigError, StoreUnavailable


def no_linux(what: str, remedy: str) -> ConfigError:
    """Return the error for what works on Linux only."""
    return ConfigError(f"{what} needs Linux, and this is {sys.platform}; {remedy}")


def check_server_runs_here() -> None:
    """Raise `ConfigError` where only clients and embedded stores work."""
    if sys.platform != "linux":
        raise no_linux("a server", "run it on Linux, and give its URL to clients here; or use an embedded store")


def make_eventfd() -> int:
    """Return an eventfd(2) that does not block. Who writes `ONE` makes it readable.

    Raises:
        ConfigError: this is no Linux.
    """
    if sys.platform != "linux":
        raise no_linux("a disk or shared memory", "do without")
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


ONE: Final = (1).to_bytes(8, sys.byteorder)
NO_THREAD = (RuntimeError, MemoryError)
"""What Python raises if the system refuses a thread."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StoreUnavailable: the system refused it.
    """
    try:
        thread.start()
    except NO_THREAD as error:
        raise _no_thread(error) from error


def _no_thread(error: Exception) -> StoreUnavailable:
    """Return the error for a thread that the system refused with one of `NO_THREAD`."""
    return StoreUnavailable(f"this process gets no more threads: {error}")


FORKED = "this store was opened before a fork and lives on in the parent; open another one in the child"


class Forkable(Protocol):
    """Something that must not be used by a forked child."""

    def let_go(self) -> None:
        """In the child: close the descriptors, leave memory and locks alone, and refuse
        everything from now on.
        """


# The interpreter has one list of fork hooks, which cannot be taken out again: so there
# is one hook, with a weak list.
_open: "WeakSet[Forkable]" = WeakSet()


def let_go_in_child(store: Forkable) -> None:
    """Have `store.let_go` called in every child that is forked while the store
    lives.
    """
    _open.add(store)


def _after_fork_in_child() -> None:
    for store in list(_open):
        store.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)


@attrs.frozen
class MemoryLimit:
    """The tightest bound found: `available_bytes` more may be taken, as `source` says
    (for messages)."""

    available_bytes: int
    source: str


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryLimit:
    """Return how many bytes this process may still take, and who says so.

    `proc` and `cgroups` are where proc(5) and cgroups(7) are mounted; tests give their
    own.
    """
    limits = [MemoryLimit(_meminfo(proc).get("MemAvailable", 1 << 62), "MemAvailable in /proc/meminfo")]
    limits.extend(_cgroup_limits(proc, cgroups))
    return min(limits, key=lambda limit: limit.available_bytes)


def free_huge_pages(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return (free huge pages of the default size, bytes in one); (0, 2 MiB) where the
    kernel does not say."""
    meminfo = _meminfo(proc)
    return meminfo.get("HugePages_Free", 0), meminfo.get("Hugepagesize", 2 << 20)


def _meminfo(proc: Path) -> dict[str, int]:
    """Return /proc/meminfo as bytes (or plain counts, for the lines without a unit)."""
    values: dict[str, int] = {}
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            yield from _group_limits(cgroups, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _group_limits(
                cgroups / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _group_limits(root: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[MemoryLimit]:
    """Yield what the group and each of its parents leave.

    Inside a container the path may name a group that is not mounted here; then its
    parents, down to the root of the mount (which is the container's own group), are
    what counts.
    """
    folder = root / group.strip("/")
    while True:
        bound, used = _number(folder / limit), _number(folder / usage)
        if bound is not None and used is not None:
            # The kernel gives file cache back before it kills.
            left = max(0, bound - used + _field(folder / "memory.stat", cache))
            yield MemoryLimit(left, str(folder / limit))
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None if there is no file, or it says
    "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _field(path: Path, name: str) -> int:
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


MOST_NODES: Final = 1024
"""Linux has no more."""
_ROOT: Final = Path("/")
_NODES: Final = Path("sys/devices/system/node")
_MPOL_PREFERRED: Final = 1
_CALLS: Final = {"x86_64": (237, 238), "aarch64": (235, 237)}  # mbind, set_mempolicy
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

SystemCall: TypeAlias = Callable[..., int]
"""Makes a system call by its number; returns 0, or an errno."""


def nodes_here(root: Path = _ROOT) -> dict[int, frozenset[int]]:
    """Return the cores of each node, which has none if it is memory only; no node if
    the kernel tells of none.
    """
    found: dict[int, frozenset[int]] = {}
    try:
        names = os.listdir(root / _NODES)
    except OSError:
        names = []
    for name in names:
        if match := re.fullmatch(r"node(\d+)", name):
            try:
                found[int(match[1])] = parse_list((root / _NODES / name / "cpulist").read_text(encoding="ascii"))
            except (OSError, ValueError):
                continue
    return dict(sorted(found.items()))


def parse_list(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it: `0-3,8`.

    Raises:
        ValueError: it is none.
    """
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(one for low, _, high in ranges for one in range(int(low), int(high or low) + 1))


def cores_of(node: int, nodes: Mapping[int, frozenset[int]], allowed: frozenset[int]) -> frozenset[int]:
    """Return the cores of a node that this process may use.

    Raises:
        ConfigError: there is no such node, or none of its cores may be used.
    """
    if not nodes:
        raise ConfigError(f"NUMA node {node}: this kernel tells of no nodes (/{_NODES}); leave the setting out")
    if node not in nodes:
        numbers = ", ".join(map(str, nodes))
        raise ConfigError(f"NUMA node {node}: this machine has no such node; choose one of {numbers}")
    cores = nodes[node] & allowed
    if not cores:
        raise ConfigError(
            f"NUMA node {node}: this process may use none of its cores; choose another node, or allow them (taskset;"
            " containers: --cpuset-cpus)"
        )
    return cores


def bind_process(
    node: int,
    *,
    root: Path = _ROOT,
    allowed: frozenset[int] | None = None,
    set_cores: Callable[[int, frozenset[int]], object] | None = None,
    call: SystemCall | None = None,
) -> None:
    """Keep this thread on the cores of a node, and let its memory come from there. The
    same holds of threads and processes that it starts from now on.

    Raises:
        ConfigError: there is no such node, or the kernel does not let this process
            choose. Nothing was changed.
    """
    if sys.platform != "linux":
        raise no_linux(f"NUMA node {node}", "leave the setting out")
    cores = cores_of(node, nodes_here(root), frozenset(os.sched_getaffinity(0)) if allowed is None else allowed)
    mask, bits = _mask(node)
    _bind(node, 1, call, _MPOL_PREFERRED, mask, bits)
    (set_cores or os.sched_setaffinity)(0, cores)


def bind_memory(address: int, length_bytes: int, node: int, *, call: SystemCall | None = None) -> None:
    """Let those pages of a mapping come from a node that are not there yet. Of shared
    memory, this is a property of the memory, whoever maps it.

    Raises:
        ConfigError: there is no such node, or the kernel does not let this process
            choose.
    """
    mask, bits = _mask(node)
    place, length = ctypes.c_void_p(address), ctypes.c_ulong(length_bytes)
    _bind(node, 0, call, place, length, _MPOL_PREFERRED, mask, bits, 0)


def _mask(node: int) -> tuple["ctypes.Array[ctypes.c_ulong]", ctypes.c_ulong]:
    """Return a mask with the bit of a node, and the number of bits to be read, of which
    the kernel reads one less.
    """
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return mask, ctypes.c_ulong(words * _WORD_BITS + 1)


def _bind(node: int, which: int, call: SystemCall | None, *arguments: object) -> None:
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    code = (call or _system_call)(calls[which], *arguments) if calls else errno.ENOSYS
    if not code:
        return
    if code == errno.EPERM:
        problem = (
            "the kernel does not let this process say where its memory is; allow mbind and set_mempolicy (containers:"
            " --cap-add SYS_NICE), or leave the setting out and start it on the node (--cpuset-cpus, --cpuset-mems)"
        )
    elif code == errno.EINVAL:
        problem = (
            "it has no memory that this process may use; choose another node, or allow it (containers: --cpuset-mems)"
        )
    elif code == errno.ENOSYS:
        problem = "this kernel cannot keep memory on a node; leave the setting out"
    else:
        problem = f"the kernel refused it ({os.strerror(code)}); leave the setting out"
    raise ConfigError(f"NUMA node {node}: {problem}")


def _system_call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return 0 if libc.syscall(ctypes.c_long(number), *arguments) == 0 else ctypes.get_errno()


def raise_descriptor_limit(wanted: int) -> int:
    """Raise the soft limit of descriptors to `wanted` if possible; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
