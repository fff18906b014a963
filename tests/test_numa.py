"""Which NUMA nodes there are, and what a process asks of the kernel to stay on one. The
kernel is imitated: files below a folder, and a function for the system calls.
"""

import ctypes
import errno
import gc
import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infinistore
from infinistore import blocking
from infinistore import host as numa
from infinistore.core import create_arena
from infinistore.errors import ConfigError
from infinistore.sizes import MIB


def tree(root: Path, **nodes: str) -> Path:
    for name, cores in nodes.items():
        folder = root / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    (root / "sys/devices/system/node/online").write_text("0-1\n")
    return root


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return tree(tmp_path, node0="0-3,8-11", node1="4-7,12-15", node10="")


class Kernel:
    """Notes what it is asked, and answers `errno`."""

    def __init__(self, errno: int = 0) -> None:
        self.errno = errno
        self.calls: list[tuple[Any, ...]] = []
        self.cores: frozenset[int] | None = None

    def call(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return self.errno

    def set_cores(self, pid: int, cores: frozenset[int]) -> None:
        assert pid == 0
        self.cores = cores


ALL = frozenset(range(16))


def test_the_nodes_are_read_in_the_order_of_their_numbers(two: Path) -> None:
    nodes = numa.nodes_here(two)
    assert list(nodes) == [0, 1, 10]
    assert nodes[0] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert nodes[10] == frozenset()


def test_a_kernel_without_nodes_has_none_and_says_so(tmp_path: Path) -> None:
    assert numa.nodes_here(tmp_path) == {}
    with pytest.raises(ConfigError, match=r"NUMA node 0: this kernel tells of no nodes .*; leave the setting out"):
        numa.bind_process(0, root=tmp_path)


@given(st.frozensets(st.integers(0, 300)))
def test_a_list_of_the_kernel_is_read_back(numbers: frozenset[int]) -> None:
    def is_run(low: int, high: int) -> bool:
        return all(number in numbers for number in range(low, high + 1))

    starts = [number for number in sorted(numbers) if number - 1 not in numbers]
    ends = [max(end for end in numbers if end >= start and is_run(start, end)) for start in starts]
    parts = [f"{low}-{high}" if high > low else str(low) for low, high in zip(starts, ends, strict=True)]
    assert numa.parse_list(",".join(parts) + "\n") == numbers


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_process_is_kept_on_the_cores_and_the_memory_of_a_node(
    two: Path, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    kernel = Kernel()
    numa.bind_process(1, root=two, allowed=ALL, set_cores=kernel.set_cores, call=kernel.call)
    assert kernel.cores == frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    ((number, policy, mask, bits),) = kernel.calls
    assert number == {"x86_64": 238, "aarch64": 237}[machine]
    assert (policy, list(mask), bits.value) == (1, [0b10], 65)  # MPOL_PREFERRED


def test_only_the_cores_that_the_process_may_use_are_taken(two: Path) -> None:
    kernel = Kernel()
    allowed = frozenset({3, 4, 5})
    numa.bind_process(1, root=two, allowed=allowed, set_cores=kernel.set_cores, call=kernel.call)
    assert kernel.cores == frozenset({4, 5})


@pytest.mark.parametrize(
    ("node", "allowed", "problem"),
    [
        (2, ALL, "NUMA node 2: this machine has no such node; choose one of 0, 1, 10"),
        (1, frozenset({0}), "NUMA node 1: this process may use none of its cores; choose another node"),
        (10, ALL, "NUMA node 10: this process may use none of its cores"),
    ],
)
def test_a_node_that_cannot_be_used_is_one_error_and_nothing_changes(
    two: Path, node: int, allowed: frozenset[int], problem: str
) -> None:
    kernel = Kernel()
    with pytest.raises(ConfigError) as raised:
        numa.bind_process(node, root=two, allowed=allowed, set_cores=kernel.set_cores, call=kernel.call)
    assert problem in str(raised.value)
    assert (kernel.cores, kernel.calls) == (None, [])


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EPERM, "containers: --cap-add SYS_NICE"),
        (errno.EINVAL, "containers: --cpuset-mems"),
        (errno.ENOSYS, "leave the setting out"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_kernel_that_refuses_is_one_error_with_a_remedy_and_nothing_changes(
    two: Path, code: int, remedy: str
) -> None:
    kernel = Kernel(code)
    with pytest.raises(ConfigError) as raised:
        numa.bind_process(0, root=two, allowed=ALL, set_cores=kernel.set_cores, call=kernel.call)
    assert str(raised.value).startswith("NUMA node 0: ")
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)
    assert kernel.cores is None
    with pytest.raises(ConfigError, match="NUMA node 0: "):
        numa.bind_memory(4096, 4096, 0, call=kernel.call)


def test_a_mapping_is_bound_by_its_address_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    kernel = Kernel()
    numa.bind_memory(4096, 8192, 70, call=kernel.call)
    ((number, address, length, policy, mask, bits, flags),) = kernel.calls
    assert (number, address.value, length.value, policy, flags) == (237, 4096, 8192, 1, 0)
    assert (list(mask), bits.value) == ([0, 1 << 6], 129)


def test_a_machine_whose_calls_are_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    kernel = Kernel()
    with pytest.raises(ConfigError, match="leave the setting out"):
        numa.bind_memory(4096, 8192, 0, call=kernel.call)
    assert kernel.calls == []


def test_an_arena_is_bound_before_it_has_a_page_and_not_at_all_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is there stays where it is."""
    bound: list[tuple[int, int, int]] = []

    def note(address: int, length: int, node: int) -> None:
        assert present_pages(address) == 0
        bound.append((address, length, node))

    monkeypatch.setattr("infinistore.core.arena.bind_memory", note)
    create_arena(0, MIB, prefault_threads=1).close()
    arena = create_arena(0, MIB, prefault_threads=1, numa_node=3)
    assert bound == [(arena.address, MIB, 3)]
    assert present_pages(arena.address) == MIB // mmap.PAGESIZE
    arena.close()


HERE = numa.nodes_here()


def refused_here() -> str:
    """Why this machine cannot try it; empty if it can."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        numa.bind_memory(ctypes.addressof(ctypes.c_char.from_buffer(memory)), mmap.PAGESIZE, min(HERE, default=0))
    except ConfigError as error:
        return str(error)
    return "" if HERE else "this kernel tells of no nodes"


for_real = pytest.mark.skipif(bool(refused_here()), reason=refused_here())


@for_real
def test_this_kernel_takes_an_arena_on_the_first_of_its_nodes() -> None:
    node = min(HERE)
    arena = create_arena(0, MIB, prefault_threads=1, numa_node=node)
    (line,) = [line for line in mappings() if line.startswith(f"{arena.address:x} ")]
    assert f" prefer:{node} " in line.replace("=relative", "")
    assert f" N{node}={MIB // mmap.PAGESIZE}" in line
    arena.memory[:1] = b"x"
    arena.close()


@for_real
def test_this_kernel_has_no_memory_on_a_node_that_is_not_there() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="it has no memory that this process may use"):
        create_arena(0, MIB, numa_node=numa.MOST_NODES - 1)
    assert set(os.listdir("/proc/self/fd")) == before


@for_real
def test_an_embedded_store_has_its_pool_on_the_node() -> None:
    node = min(HERE)
    gc.collect()  # what other tests have left may have an arena, and it would take its address
    others = {line.split()[0] for line in mappings()}  # of this process, at what addresses
    with blocking.open_store(pool_bytes=MIB, numa_node=node) as store:
        store.put("key", b"value")
        assert store.get("key") == b"value"
        arenas = [line for line in mappings() if "infinistore-arena" in line]
        (line,) = [line for line in arenas if line.split()[0] not in others]
        assert f" prefer:{node} " in line.replace("=relative", "")


@for_real
async def test_an_embedded_store_of_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="NUMA node 1023: it has no memory"):
        async with infinistore.open_store(pool_bytes=MIB, numa_node=1023):
            pass


@for_real
@pytest.mark.process
def test_a_thread_that_is_bound_and_what_it_starts_stay_on_the_node() -> None:
    """In a process of its own, because it cannot be taken back."""
    node = min(HERE)
    program = f"""
import os, subprocess, sys, threading
from infinistore.host import bind_process
bind_process({node})
seen = []
thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
child = subprocess.run([sys.executable, "-c", "print(open('/proc/self/numa_maps').readline().split()[1])"],
                       capture_output=True, text=True, check=True)
print(seen[0], child.stdout.strip())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    cores = sorted(HERE[node] & os.sched_getaffinity(0))
    assert done.stdout.strip() == f"{cores} prefer:{node}"


def mappings() -> list[str]:
    return Path("/proc/self/numa_maps").read_text().splitlines()


def present_pages(address: int) -> int:
    """How many pages of a mapping this process has."""
    (line,) = [line for line in mappings() if line.startswith(f"{address:x} ")]
    return sum(int(pages) for pages in re.findall(r" N\d+=(\d+)", line))
