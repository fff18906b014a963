"""Memory: space for a pool, huge pages, and the limits of shared memory."""

import os
from collections.abc import Iterator

from infinistore.config import ServerConfig
from infinistore.doctor.findings import UNLIMITED, Finding, Host, bad, good, warning
from infinistore.host import available_memory, free_huge_pages
from infinistore.sizes import describe_size

__all__ = ["examine_memory"]

_TOPIC = "memory"


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
        return good(_TOPIC, "room for a pool", text)
    remedy = f"a server takes {describe_size(pool_bytes)} unless told otherwise: --prealloc-size"
    if "cgroup" in limit.source:
        remedy += ", or a larger limit of the control group (containers: --memory)"
    return warning(_TOPIC, "room for a pool", text, remedy)


def _huge_pages(host: Host) -> Finding:
    free, size_bytes = free_huge_pages(host.root / "proc")
    total = next(
        (line.split()[1] for line in host.text("proc/meminfo").splitlines() if line.startswith("HugePages_Total:")), "0"
    )
    if total == "0":
        return good(_TOPIC, "huge pages", "none reserved; only --huge-pages needs them (sysctl vm.nr_hugepages=N)")
    text = f"{free} of {total} are free, {describe_size(free * size_bytes)} in all"
    if free:
        return good(_TOPIC, "huge pages", f"{text}; --huge-pages uses them")
    return warning(_TOPIC, "huge pages", text, "for --huge-pages, reserve more: sysctl vm.nr_hugepages=N")


def _memfd(host: Host) -> Finding:
    subject = "shared memory"
    problem = host.try_memfd()
    if not problem:
        return good(_TOPIC, subject, "memfd_create and its seals work")
    remedy = "the pool cannot be made; let the container's seccomp profile allow memfd_create"
    if host.number("proc/sys/vm/memfd_noexec") == 2:
        remedy = "the pool cannot be made; as root: sysctl vm.memfd_noexec=1"
    return bad(_TOPIC, subject, problem, remedy)


def _file_size(host: Host) -> Finding:
    soft, _ = host.limits["fsize"]
    if soft == UNLIMITED:
        return good(_TOPIC, "file size", "unlimited: the pool is a file in memory")
    text = f"{describe_size(soft)} (ulimit -f), and the pool is a file in memory"
    pool_bytes = ServerConfig().prealloc_bytes
    return (bad if soft < pool_bytes else warning)(_TOPIC, "file size", text, "ulimit -f unlimited")


def _address_space(host: Host) -> Finding:
    soft, _ = host.limits["as"]
    if soft == UNLIMITED:
        return good(_TOPIC, "address space", "unlimited")
    return warning(
        _TOPIC,
        "address space",
        f"{describe_size(soft)} (ulimit -v); server and clients map the pool",
        "ulimit -v unlimited",
    )


def _dev_shm(host: Host) -> Finding:
    try:
        room = os.statvfs(host.root / "dev/shm")
    except OSError:
        return good(_TOPIC, "/dev/shm", "not there; InfiniStore does not use it")
    size = describe_size(room.f_frsize * room.f_blocks)
    return good(_TOPIC, "/dev/shm", f"{size}; InfiniStore does not use it, so that it does not limit the pool")


def _socket_folder(host: Host) -> Finding:
    subject, folder = "socket for shared memory", host.socket_folder
    try:
        status = folder.stat()
    except OSError:
        parent = next((path for path in folder.parents if path.exists()), folder)
        if os.access(parent, os.W_OK | os.X_OK):
            return good(_TOPIC, subject, f"{folder} will be made by the server")
        return bad(
            _TOPIC, subject, f"{folder} cannot be made", "set XDG_RUNTIME_DIR to a folder of yours, or --unix-socket"
        )
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return bad(
            _TOPIC,
            subject,
            f"{folder} is another user's, or open to others",
            f"chmod 700 {folder} if it is yours; else set XDG_RUNTIME_DIR, or --unix-socket",
        )
    return good(_TOPIC, subject, f"{folder} is this user's alone")
