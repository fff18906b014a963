"""NUMA nodes: what is on which, and where running servers have their memory."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from infinistore.doctor.findings import Finding, Host, good, warning
from infinistore.host import nodes_here, parse_list
from infinistore.sizes import KIB, describe_size

__all__ = ["examine_numa", "gpus"]

_TOPIC: Final = "NUMA"
_PCI: Final = "sys/bus/pci/devices"
_RDMA: Final = "sys/class/infiniband"
_ACCELERATOR_CLASSES: Final = ("0x0302", "0x1200")
"""3D controllers and processing accelerators: data centre GPUs of NVIDIA and others."""
_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"
_ARENA: Final = "infinistore-arena-"
_ON_NODE: Final = re.compile(r"\bN(\d+)=(\d+)")
_PAGE: Final = re.compile(r"\bkernelpagesize_kB=(\d+)")


def examine_numa(host: Host) -> Iterator[Finding]:
    """Yield what is on each node, and where each server of this user is."""
    nodes = nodes_here(host.root)
    if not nodes:
        yield good(_TOPIC, "nodes", "this kernel tells of none, and --numa-node cannot be used")
        return
    devices = list(_devices(host))
    for node in nodes:
        on_it = [name for name, where in devices if where == node]
        cores = host.text(f"sys/devices/system/node/node{node}/cpulist")
        parts = [f"cores {cores}" if cores else "no cores", *_memory(host, node), *on_it]
        yield good(_TOPIC, f"node {node}", ", ".join(parts))
    if len(nodes) == 1:
        return  # everything is on it
    for process in sorted((name for name in host.names("proc") if name.isdecimal()), key=int):
        yield from _server(host, process, nodes)


def _memory(host: Host, node: int) -> Iterator[str]:
    text = host.text(f"sys/devices/system/node/node{node}/meminfo")
    sizes = {name: int(number) * KIB for name, number in re.findall(r"(MemTotal|MemFree):\s+(\d+) kB", text)}
    if total_bytes := sizes.get("MemTotal"):
        yield f"{describe_size(total_bytes)} of memory, {describe_size(sizes.get('MemFree', 0))} free"
    elif sizes:
        yield "no memory"


def _devices(host: Host) -> Iterator[tuple[str, int | None]]:
    """Yield RDMA devices and GPUs, each with its node."""
    for name in host.names(_RDMA):
        yield name, host.number(f"{_RDMA}/{name}/device/numa_node")
    for name in gpus(host):
        yield f"GPU {name}", host.number(f"{_PCI}/{name}/numa_node")


def gpus(host: Host) -> Iterator[str]:
    """Yield the addresses of GPUs on the PCI bus, as `0000:17:00.0`."""
    for name in host.names(_PCI):
        kind = host.text(f"{_PCI}/{name}/class")
        is_nvidia = kind.startswith(_DISPLAY_CLASS) and host.text(f"{_PCI}/{name}/vendor") == _NVIDIA
        if is_nvidia or kind.startswith(_ACCELERATOR_CLASSES):
            yield name


def _server(host: Host, process: str, nodes: dict[int, frozenset[int]]) -> Iterator[Finding]:
    """Yield where a process is that has a pool, if it is one and may be looked at."""
    if "infinistore" not in host.text(f"proc/{process}/cmdline"):
        return
    pool_bytes: Counter[int] = Counter()
    for line in host.text(f"proc/{process}/numa_maps").splitlines():
        if _ARENA in line:
            page = _PAGE.search(line)
            for node, pages in _ON_NODE.findall(line):
                pool_bytes[int(node)] += int(pages) * int(page[1] if page else 4) * KIB
    if not pool_bytes:
        return
    allowed = re.search(r"^Cpus_allowed_list:\s*(\d[\d,-]*)$", host.text(f"proc/{process}/status"), re.MULTILINE)
    cores = parse_list(allowed[1]) if allowed else frozenset()
    threads = [node for node, its in nodes.items() if its & cores]
    where = " and ".join(f"{describe_size(size)} on node {node}" for node, size in sorted(pool_bytes.items()))
    text = f"threads on node {', '.join(map(str, threads))}; pool: {where}"
    subject = f"process {process}"
    if len(threads) == 1 and set(pool_bytes) == set(threads):
        yield good(_TOPIC, subject, text)
        return
    if len(threads) == 1:
        yield warning(_TOPIC, subject, text, f"free memory on node {threads[0]}, or use a smaller pool, and restart it")
        return
    most = pool_bytes.most_common(1)[0][0]
    yield warning(
        _TOPIC, subject, text, f"--numa-node N, such as {most}, keeps a server on one node; or run one on each"
    )
