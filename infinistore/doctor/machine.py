"""The machine around the store. The kernel: its version, sockets, descriptors, and the
clock. Memory: space for a pool, huge pages, and the limits of shared memory. NUMA
nodes: what is on which, and where running servers have their memory. Folders for the
SSD tier: room, O_DIRECT, and what lies below the folder.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

from infinistore.config import ServerConfig
from infinistore.doctor.findings import UNLIMITED, Finding, Host, bad, good, warning
from infinistore.host import available_memory, free_huge_pages, nodes_here, parse_list
from infinistore.sizes import GIB, KIB, MIB, describe_size

_KERNEL = "system"
_DESCRIPTORS_BESIDE_CONNECTIONS = 256
_TOO_FEW_DESCRIPTORS = 64
_SMALL_QUEUE = 1024
_SMALL_BUFFER_BYTES = 4 * MIB
_QUICK_CLOCKS = {"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"}


def examine_kernel(host: Host) -> Iterator[Finding]:
    """Yield the findings about the kernel and this process's limits."""
    yield _version(host)
    yield _descriptors(host)
    yield _queue(host)
    yield from _buffers(host)
    yield _clock(host)


def _version(host: Host) -> Finding:
    release = host.text("proc/sys/kernel/osrelease")
    version = kernel_version(host)
    if version is None:
        return warning(_KERNEL, "kernel", release or "unknown", "InfiniStore needs Linux")
    if version >= (5, 14):
        return good(_KERNEL, "kernel", f"Linux {release}")
    text = f"Linux {release} is older than 5.14: the first touch of the pool's memory is slower"
    if version < (5, 12):
        text += ", and RDMA with fork needs RDMAV_FORK_SAFE=1"
    return warning(_KERNEL, "kernel", text, "a newer kernel, if start-up takes too long")


def kernel_version(host: Host) -> tuple[int, int] | None:
    """Return the first two numbers of the kernel's version, or None."""
    found = re.match(r"(\d+)\.(\d+)", host.text("proc/sys/kernel/osrelease"))
    return None if found is None else (int(found[1]), int(found[2]))


def _descriptors(host: Host) -> Finding:
    soft, hard = host.limits["nofile"]
    connections = ServerConfig().max_connections
    wanted = 2 * connections + _DESCRIPTORS_BESIDE_CONNECTIONS
    if UNLIMITED in (soft, hard) or hard >= wanted:  # a server raises the soft limit as far as it needs
        return good(_KERNEL, "file descriptors", "unlimited" if hard == UNLIMITED else f"up to {hard}")
    text = f"at most {hard}; a server that takes {connections} connections needs up to {wanted}"
    remedy = f"limits.conf: '* - nofile {wanted}'; systemd: LimitNOFILE={wanted}; as root: ulimit -n {wanted}"
    return (bad if hard < _TOO_FEW_DESCRIPTORS else warning)(_KERNEL, "file descriptors", text, remedy)


def _queue(host: Host) -> Finding:
    length = host.number("proc/sys/net/core/somaxconn")
    if length is None:
        return good(_KERNEL, "somaxconn", "not told")
    if length >= _SMALL_QUEUE:
        return good(_KERNEL, "somaxconn", str(length))
    return warning(
        _KERNEL,
        "somaxconn",
        f"{length}: when more clients than that connect at once, some wait a second and more",
        f"as root: sysctl net.core.somaxconn={_SMALL_QUEUE}",
    )


def _buffers(host: Host) -> Iterator[Finding]:
    for subject, path, name in (
        ("receive buffers", "proc/sys/net/ipv4/tcp_rmem", "tcp_rmem"),
        ("send buffers", "proc/sys/net/ipv4/tcp_wmem", "tcp_wmem"),
    ):
        sizes = host.text(path).split()
        if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
            yield good(_KERNEL, subject, "not told")
            continue
        most = int(sizes[2])
        text = f"TCP may use up to {describe_size(most)} for a connection ({name})"
        if most >= _SMALL_BUFFER_BYTES:
            yield good(_KERNEL, subject, text)
        else:
            remedy = (
                f"for distant clients, as root: sysctl net.ipv4.{name}='{sizes[0]} {sizes[1]} {_SMALL_BUFFER_BYTES}'"
            )
            yield warning(_KERNEL, subject, text, remedy)
    core = {name: host.number(f"proc/sys/net/core/{name}_max") for name in ("rmem", "wmem")}
    told = ", ".join(f"{name}_max {describe_size(size)}" for name, size in core.items() if size is not None)
    if told:
        yield good(
            _KERNEL,
            "buffers by hand",
            f"{told}; the kernel sizes buffers of TCP, wmem_max bounds those of Unix sockets",
        )


def _clock(host: Host) -> Finding:
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        return good(_KERNEL, "clock", "not told")
    if source in _QUICK_CLOCKS:
        return good(_KERNEL, "clock", source)
    return warning(
        _KERNEL,
        "clock",
        f"{source}: each look at the clock is a system call",
        "if the processor has a steady one, as root: "
        "echo tsc >/sys/devices/system/clocksource/clocksource0/current_clocksource",
    )


_MEMORY = "memory"


def examine_memory(host: Host) -> Iterator[Finding]:
    """Yield the findings about memory."""
    yield _available(host)
    yield _huge_pages(host)
    yield _memfd(host)
    yield _file_size(host)
    yield _address_space(host)
    yield _dev_shm(host)
    yield _socket_folder(host)


def _available(host: Host) -> Finding:
    limit = available_memory(host.root / "proc", host.root / "sys/fs/cgroup")
    pool_bytes = ServerConfig().prealloc_bytes
    text = f"{describe_size(limit.available_bytes)} may be taken, says {limit.source}"
    if limit.available_bytes >= pool_bytes:
        return good(_MEMORY, "room for a pool", text)
    remedy = f"a server takes {describe_size(pool_bytes)} unless told otherwise: --prealloc-size"
    if "cgroup" in limit.source:
        remedy += ", or a larger limit of the control group (containers: --memory)"
    return warning(_MEMORY, "room for a pool", text, remedy)


def _huge_pages(host: Host) -> Finding:
    free, size_bytes = free_huge_pages(host.root / "proc")
    total = next(
        (line.split()[1] for line in host.text("proc/meminfo").splitlines() if line.startswith("HugePages_Total:")), "0"
    )
    if total == "0":
        return good(_MEMORY, "huge pages", "none reserved; only --huge-pages needs them (sysctl vm.nr_hugepages=N)")
    text = f"{free} of {total} are free, {describe_size(free * size_bytes)} in all"
    if free:
        return good(_MEMORY, "huge pages", f"{text}; --huge-pages uses them")
    return warning(_MEMORY, "huge pages", text, "for --huge-pages, reserve more: sysctl vm.nr_hugepages=N")


def _memfd(host: Host) -> Finding:
    subject = "shared memory"
    problem = host.try_memfd()
    if not problem:
        return good(_MEMORY, subject, "memfd_create and its seals work")
    remedy = "the pool cannot be made; let the container's seccomp profile allow memfd_create"
    if host.number("proc/sys/vm/memfd_noexec") == 2:
        remedy = "the pool cannot be made; as root: sysctl vm.memfd_noexec=1"
    return bad(_MEMORY, subject, problem, remedy)


def _file_size(host: Host) -> Finding:
    soft, _ = host.limits["fsize"]
    if soft == UNLIMITED:
        return good(_MEMORY, "file size", "unlimited: the pool is a file in memory")
    text = f"{describe_size(soft)} (ulimit -f), and the pool is a file in memory"
    pool_bytes = ServerConfig().prealloc_bytes
    return (bad if soft < pool_bytes else warning)(_MEMORY, "file size", text, "ulimit -f unlimited")


def _address_space(host: Host) -> Finding:
    soft, _ = host.limits["as"]
    if soft == UNLIMITED:
        return good(_MEMORY, "address space", "unlimited")
    return warning(
        _MEMORY,
        "address space",
        f"{describe_size(soft)} (ulimit -v); server and clients map the pool",
        "ulimit -v unlimited",
    )


def _dev_shm(host: Host) -> Finding:
    try:
        room = os.statvfs(host.root / "dev/shm")
    except OSError:
        return good(_MEMORY, "/dev/shm", "not there; InfiniStore does not use it")
    size = describe_size(room.f_frsize * room.f_blocks)
    return good(_MEMORY, "/dev/shm", f"{size}; InfiniStore does not use it, so that it does not limit the pool")


def _socket_folder(host: Host) -> Finding:
    subject, folder = "socket for shared memory", host.socket_folder
    try:
        status = folder.stat()
    except OSError:
        parent = next((path for path in folder.parents if path.exists()), folder)
        if os.access(parent, os.W_OK | os.X_OK):
            return good(_MEMORY, subject, f"{folder} will be made by the server")
        return bad(
            _MEMORY, subject, f"{folder} cannot be made", "set XDG_RUNTIME_DIR to a folder of yours, or --unix-socket"
        )
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return bad(
            _MEMORY,
            subject,
            f"{folder} is another user's, or open to others",
            f"chmod 700 {folder} if it is yours; else set XDG_RUNTIME_DIR, or --unix-socket",
        )
    return good(_MEMORY, subject, f"{folder} is this user's alone")


_NUMA: Final = "NUMA"
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
        yield good(_NUMA, "nodes", "this kernel tells of none, and --numa-node cannot be used")
        return
    devices = list(_devices(host))
    for node in nodes:
        on_it = [name for name, where in devices if where == node]
        cores = host.text(f"sys/devices/system/node/node{node}/cpulist")
        parts = [f"cores {cores}" if cores else "no cores", *_memory(host, node), *on_it]
        yield good(_NUMA, f"node {node}", ", ".join(parts))
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
        yield good(_NUMA, subject, text)
        return
    if len(threads) == 1:
        yield warning(_NUMA, subject, text, f"free memory on node {threads[0]}, or use a smaller pool, and restart it")
        return
    most = pool_bytes.most_common(1)[0][0]
    yield warning(
        _NUMA, subject, text, f"--numa-node N, such as {most}, keeps a server on one node; or run one on each"
    )


_DISK: Final = "disk"
_LITTLE_BYTES: Final = 10 * GIB
_OTHER_FOLDER: Final = "give a folder on a local SSD, with ext4 or XFS"
_IN_MEMORY: Final = {"tmpfs", "ramfs", "devtmpfs"}
_LAYERED: Final = {"overlay", "aufs"}
_COPY_ON_WRITE: Final = {"btrfs", "zfs", "bcachefs"}


def examine_disk(host: Host, path: Path, probe: Callable[[int], bool]) -> Iterator[Finding]:
    """Yield the findings about a folder that is, or is to be, a disk.

    `probe` tells whether O_DIRECT works in an open folder.
    """
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    yield _folder(path, existing)
    if not existing.is_dir():
        return
    yield _room(path, existing)
    yield _direct(path, existing, probe)
    yield from _below(host, path, os.stat(existing).st_dev)


def _folder(path: Path, existing: Path) -> Finding:
    if not existing.is_dir():
        return bad(_DISK, str(path), f"{existing} is no folder", "give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        return bad(_DISK, str(path), f"this user may not write {existing}", "chown or chmod it, or give another folder")
    if existing == path:
        return good(_DISK, str(path), "this user may write it")
    if existing == path.parent:
        return good(_DISK, str(path), "will be made by the server")
    return bad(_DISK, str(path), f"{path.parent} is missing", f"mkdir -p {path.parent}, or correct the path")


def _room(path: Path, existing: Path) -> Finding:
    room = os.statvfs(existing)
    free_bytes = room.f_bavail * room.f_frsize
    text = f"{describe_size(free_bytes)} of {describe_size(room.f_blocks * room.f_frsize)} are free"
    if free_bytes >= _LITTLE_BYTES:
        return good(_DISK, f"{path}: room", text)
    return warning(_DISK, f"{path}: room", text, "free some room, or give a folder on a larger disk")


def _direct(path: Path, existing: Path, probe: Callable[[int], bool]) -> Finding:
    subject = f"{path}: O_DIRECT"
    try:
        fd = os.open(existing, os.O_RDONLY | os.O_DIRECTORY)
        try:
            works = probe(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return bad(_DISK, subject, f"a file cannot be written: {error.strerror}", "see the kernel's log (dmesg)")
    if works:
        return good(_DISK, subject, "works: blocks go from the pool to the disk and back without a copy")
    return warning(_DISK, subject, "does not work: the page cache takes memory, and loads stall others", _OTHER_FOLDER)


def _below(host: Host, path: Path, device: int) -> Iterator[Finding]:
    mount = _mount(host, f"{os.major(device)}:{os.minor(device)}")
    subject = f"{path}: file system"
    if mount is None:
        yield good(_DISK, subject, "unknown")
        return
    kind, source = mount.kind, f"{mount.kind} on {mount.source}"
    if kind in _IN_MEMORY:
        yield bad(_DISK, subject, f"{kind}, which is memory, and lost with a restart", _OTHER_FOLDER)
        return
    if kind in _LAYERED:
        yield warning(_DISK, subject, f"{source}: lost with its container", "mount a volume into the container")
    elif kind in _COPY_ON_WRITE:
        text = f"{source}, which never overwrites in place: room that was taken is not kept free, and writes cost more"
        yield warning(_DISK, subject, text, _OTHER_FOLDER)
    elif kind.startswith(("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "lustre")):
        yield warning(_DISK, subject, f"{source}, which is not local: reads wait for others", _OTHER_FOLDER)
    else:
        yield good(_DISK, subject, source)
    yield from _device(host, path, mount.device)


def _device(host: Host, path: Path, device: str) -> Iterator[Finding]:
    queue = next(
        (f for f in (f"sys/dev/block/{device}/queue", f"sys/dev/block/{device}/../queue") if host.exists(f)), ""
    )
    rotational = host.number(f"{queue}/rotational") if queue else None
    if rotational:
        remedy = "use an SSD, unless this is a virtual disk, which often says so without being one"
        yield warning(
            _DISK, f"{path}: device", "says that it rotates: a hard disk reads blocks a hundred times slower", remedy
        )
    elif rotational == 0:
        yield good(_DISK, f"{path}: device", "does not rotate")
    cache = host.text(f"{queue}/write_cache") if queue else ""
    if cache == "write back":
        yield good(_DISK, f"{path}: write cache", "volatile; it is flushed once for each batch before that counts")
    elif cache:
        yield good(_DISK, f"{path}: write cache", "none that loses anything; flushing costs little")


@attrs.frozen
class _Mount:
    kind: str
    source: str
    device: str


def _mount(host: Host, device: str) -> _Mount | None:
    """Return the mount of a device, MAJOR:MINOR (proc(5), mountinfo)."""
    for line in host.text("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words, (kind, source, *_) = before.split(), [*after.split(), "", ""]
        if len(words) > 2 and words[2] == device:
            return _Mount(kind, source, device)
    return None
