"""The kernel around the store: its version, sockets, descriptors, and the clock."""

import re
from collections.abc import Iterator

from infinistore.config import ServerConfig
from infinistore.doctor.findings import UNLIMITED, Finding, Host, bad, good, warning
from infinistore.sizes import MIB, describe_size

__all__ = ["examine_kernel", "kernel_version"]

_TOPIC = "system"
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
        return warning(_TOPIC, "kernel", release or "unknown", "InfiniStore needs Linux")
    if version >= (5, 14):
        return good(_TOPIC, "kernel", f"Linux {release}")
    text = f"Linux {release} is older than 5.14: the first touch of the pool's memory is slower"
    if version < (5, 12):
        text += ", and RDMA with fork needs RDMAV_FORK_SAFE=1"
    return warning(_TOPIC, "kernel", text, "a newer kernel, if start-up takes too long")


def kernel_version(host: Host) -> tuple[int, int] | None:
    """Return the first two numbers of the kernel's version, or None."""
    found = re.match(r"(\d+)\.(\d+)", host.text("proc/sys/kernel/osrelease"))
    return None if found is None else (int(found[1]), int(found[2]))


def _descriptors(host: Host) -> Finding:
    soft, hard = host.limits["nofile"]
    connections = ServerConfig().max_connections
    wanted = 2 * connections + _DESCRIPTORS_BESIDE_CONNECTIONS
    if UNLIMITED in (soft, hard) or hard >= wanted:  # a server raises the soft limit as far as it needs
        return good(_TOPIC, "file descriptors", "unlimited" if hard == UNLIMITED else f"up to {hard}")
    text = f"at most {hard}; a server that takes {connections} connections needs up to {wanted}"
    remedy = f"limits.conf: '* - nofile {wanted}'; systemd: LimitNOFILE={wanted}; as root: ulimit -n {wanted}"
    return (bad if hard < _TOO_FEW_DESCRIPTORS else warning)(_TOPIC, "file descriptors", text, remedy)


def _queue(host: Host) -> Finding:
    length = host.number("proc/sys/net/core/somaxconn")
    if length is None:
        return good(_TOPIC, "somaxconn", "not told")
    if length >= _SMALL_QUEUE:
        return good(_TOPIC, "somaxconn", str(length))
    return warning(
        _TOPIC,
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
            yield good(_TOPIC, subject, "not told")
            continue
        most = int(sizes[2])
        text = f"TCP may use up to {describe_size(most)} for a connection ({name})"
        if most >= _SMALL_BUFFER_BYTES:
            yield good(_TOPIC, subject, text)
        else:
            remedy = (
                f"for distant clients, as root: sysctl net.ipv4.{name}='{sizes[0]} {sizes[1]} {_SMALL_BUFFER_BYTES}'"
            )
            yield warning(_TOPIC, subject, text, remedy)
    core = {name: host.number(f"proc/sys/net/core/{name}_max") for name in ("rmem", "wmem")}
    told = ", ".join(f"{name}_max {describe_size(size)}" for name, size in core.items() if size is not None)
    if told:
        yield good(
            _TOPIC, "buffers by hand", f"{told}; the kernel sizes buffers of TCP, wmem_max bounds those of Unix sockets"
        )


def _clock(host: Host) -> Finding:
    source = host.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source:
        return good(_TOPIC, "clock", "not told")
    if source in _QUICK_CLOCKS:
        return good(_TOPIC, "clock", source)
    return warning(
        _TOPIC,
        "clock",
        f"{source}: each look at the clock is a system call",
        "if the processor has a steady one, as root: "
        "echo tsc >/sys/devices/system/clocksource/clocksource0/current_clocksource",
    )
