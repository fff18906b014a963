"""The NUMA nodes of this machine: which there are, and how a process stays on one.

A server on a machine with several sockets is fastest if its threads, its pool and its
network card are on one node. `bind_process` keeps a thread and its memory there, and
what it starts; `bind_memory` does so for a shared mapping, whoever touches it first.
Memory is *preferred* on the node: when that is full, other nodes help out, where a
strict policy would have the kernel kill the process.

Files are read below a root that is given. The two system calls are made by number,
because libc does not have them and libnuma may be missing.
"""

import ctypes
import errno
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from infinistore.errors import ConfigError
from infinistore.settings import declare, integer

__all__ = ["MOST_NODES", "bind_memory", "bind_process", "cores_of", "nodes_here", "numa_node", "parse_list"]

MOST_NODES: Final = 1024
"""Linux has no more."""
_ROOT: Final = Path("/")
_NODES: Final = Path("sys/devices/system/node")
_MPOL_PREFERRED: Final = 1
_CALLS: Final = {"x86_64": (237, 238), "aarch64": (235, 237)}  # mbind, set_mempolicy
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)

SystemCall: TypeAlias = Callable[..., int]
"""Makes a system call by its number; returns 0, or an errno."""


def numa_node() -> Any:
    """Declare the node of a server."""
    return declare(
        "numa_node",
        integer(0, MOST_NODES - 1, "NODE"),
        None,
        "Keep the threads and the pool on this NUMA node, as far as it has memory; doctor lists the nodes",
        group="Memory",
        default_text="any",
    )


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
    set_cores: Callable[[int, frozenset[int]], object] = os.sched_setaffinity,
    call: SystemCall | None = None,
) -> None:
    """Keep this thread on the cores of a node, and let its memory come from there. The
    same holds of threads and processes that it starts from now on.

    Raises:
        ConfigError: there is no such node, or the kernel does not let this process
            choose. Nothing was changed.
    """
    cores = cores_of(node, nodes_here(root), frozenset(os.sched_getaffinity(0)) if allowed is None else allowed)
    mask, bits = _mask(node)
    _bind(node, 1, call, _MPOL_PREFERRED, mask, bits)
    set_cores(0, cores)


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
    calls = _CALLS.get(platform.machine())
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
