"""RDMA: devices, ports and GIDs, the selection and its reason, system requirements."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import attrs

from infinistore.doctor.findings import UNLIMITED, Finding, Host, Level, bad, good, warning
from infinistore.doctor.machine import gpus, kernel_version
from infinistore.sizes import MIB, describe_size
from infinistore.transports.rdma.choice import NoRdma, Wanted, choose, judge_gids, judge_port
from infinistore.transports.rdma.devices import (
    Link,
    RdmaDevice,
    RdmaPort,
    RdmaSystem,
    pci_place,
    read_system,
    roce_mtu_bytes,
)

_TOPIC = "RDMA"
_CAP_IPC_LOCK = 14
_LITTLE_MEMLOCK_BYTES = 64 * MIB
_FIRST_WITH_DMABUF = (5, 12)
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")


def examine_rdma(host: Host, wanted: Wanted, pyverbs: Callable[[], str]) -> Iterator[Finding]:
    """Yield the findings. `pyverbs` returns its version, or raises NoRdma."""
    system = read_system(host.root)
    for device in system.devices:
        yield _device(device, host)
        for port in device.ports:
            yield from _port(system, device, port)
    yield _choice(system, wanted)
    yield from _choice_by_gpu(host, system, wanted)
    yield _pyverbs(pyverbs, needed=bool(system.devices))
    yield _memlock(host, needed=bool(system.devices))
    yield _gpu_memory(host)


def _device(device: RdmaDevice, host: Host) -> Finding:
    parts = ["software" if device.is_software else f"driver {device.driver or 'unknown'}"]
    parts += [f"firmware {device.firmware}"] if device.firmware else []
    parts += [device.verbs_node] if device.verbs_node else []
    parts += [_numa(device.place.numa_node, host)] if device.place.numa_node is not None else []
    text = ", ".join(parts)
    try:
        for port in device.ports[:1]:
            judge_port(device, Wanted(ib_port=port.number))
    except NoRdma as error:
        if not device.may_open or device.node_type != "CA":
            return warning(_TOPIC, device.name, f"{text}: {error.problem}", error.remedy)
    return good(_TOPIC, device.name, text)


def _numa(node: int, host: Host) -> str:
    nodes = [name for name in host.names("sys/devices/system/node") if name.removeprefix("node").isdecimal()]
    if len(nodes) < 2:
        return f"NUMA node {node}"
    return f"NUMA node {node} of {len(nodes)}: start a server there (--numa-node {node})"


def _port(system: RdmaSystem, device: RdmaDevice, port: RdmaPort) -> Iterator[Finding]:
    subject = f"{device.name} port {port.number}"
    link = port.link.value if port.link else "unknown link"
    text = f"{link}, {port.state}" + (f", {port.rate}" if port.rate else "")
    if port.link is Link.INFINIBAND:
        text += f", LID {port.lid}"
    try:
        judge_port(device, Wanted(ib_port=port.number))
    except NoRdma as error:
        yield warning(_TOPIC, subject, text, error.remedy, details=_gid_table(system, port))
        return
    interfaces = [system.interfaces[name] for name in _interface_names(port) if name in system.interfaces]
    mtu_bytes = min((interface.mtu_bytes for interface in interfaces), default=0)
    if mtu_bytes and roce_mtu_bytes(mtu_bytes) < 4096:
        names = ", ".join(interface.name for interface in interfaces)
        text += f", {roce_mtu_bytes(mtu_bytes)} bytes in a packet (the MTU of {names} is {mtu_bytes})"
        remedy = f"if the switches allow it: ip link set {interfaces[0].name} mtu 9000, at both ends"
        yield warning(_TOPIC, subject, text, remedy, details=_gid_table(system, port))
        return
    yield good(_TOPIC, subject, text, details=_gid_table(system, port))


def _interface_names(port: RdmaPort) -> list[str]:
    return list(dict.fromkeys(gid.interface for gid in port.gids if gid.interface))


def _gid_table(system: RdmaSystem, port: RdmaPort) -> Iterator[str]:
    for verdict in judge_gids(system, port):
        gid = verdict.gid
        where = f" on {gid.interface}" if gid.interface else ""
        text = verdict.text if verdict.usable else f"not usable here: {verdict.text}"
        yield f"GID {gid.index}: {gid.kind.value}, {gid.address}{where}: {text}"


def _choice(system: RdmaSystem, wanted: Wanted) -> Finding:
    try:
        chosen = choose(system, wanted)
    except NoRdma as error:
        level = Level.WARNING if wanted == Wanted() else Level.BAD  # a requested device does not work
        text = f"{error.problem}. Without RDMA, TCP and shared memory are used"
        return Finding(_TOPIC, "choice", level, text, error.remedy or "see docs/rdma.md")
    return good(_TOPIC, "choice", f"{chosen.device} port {chosen.number}, {chosen.reason}")


def _choice_by_gpu(host: Host, system: RdmaSystem, wanted: Wanted) -> Iterator[Finding]:
    """Say which of several devices a process takes that uses a GPU."""
    if len(system.devices) < 2 or wanted.dev_name is not None:
        return
    for address in gpus(host):
        with suppress(NoRdma):  # said of the choice
            chosen = choose(system, attrs.evolve(wanted, place=pci_place(address, host.root)))
            yield good(_TOPIC, f"GPU {address}", f"{chosen.device} port {chosen.number} is nearest")


def _pyverbs(probe: Callable[[], str], *, needed: bool) -> Finding:
    try:
        return good(_TOPIC, "pyverbs", probe())
    except NoRdma as error:
        if not needed:
            return good(_TOPIC, "pyverbs", "not there, and not needed without an RDMA device")
        return warning(_TOPIC, "pyverbs", error.problem, error.remedy)


def _memlock(host: Host, *, needed: bool) -> Finding:
    soft, hard = host.limits["memlock"]
    if soft == UNLIMITED:
        return good(_TOPIC, "memlock", "unlimited: a device may pin the whole pool")
    limit = describe_size(soft)
    if host.may(_CAP_IPC_LOCK):
        return good(_TOPIC, "memlock", f"{limit}, but this process has CAP_IPC_LOCK and may pin all")
    if not needed:
        return good(_TOPIC, "memlock", f"{limit}: matters for RDMA alone, which pins the pool")
    here = "ulimit -l unlimited, or " if hard == UNLIMITED else ""
    remedy = (
        f"{here}limits.conf: '* - memlock unlimited'; systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1"
    )
    text = f"{limit}: RDMA pins the whole pool, and registered memory of clients"
    return (bad if soft < _LITTLE_MEMLOCK_BYTES else warning)(_TOPIC, "memlock", text, remedy)


def _gpu_memory(host: Host) -> Finding:
    """Check how a card's driver can locate GPU memory: dmabuf or peer memory."""
    subject = "memory of GPUs"
    driver = host.text("proc/driver/nvidia/version")
    if not driver:
        return good(_TOPIC, subject, "no NVIDIA driver here")
    exports = "Open Kernel Module" in driver
    version = kernel_version(host)
    imports = version is not None and version >= _FIRST_WITH_DMABUF
    loaded = [name for name in _PEER_MEMORY_MODULES if host.exists(f"sys/module/{name}")]
    ways = ["as a dmabuf, which the open NVIDIA driver exports"] * (exports and imports)
    ways += [f"by {name.replace('_', '-')}, which is loaded" for name in loaded]
    if ways:
        return good(
            _TOPIC, subject, f"can be registered {', and '.join(ways)}, if the RDMA device's driver takes it so"
        )
    why = "Linux before 5.12 hands no dmabuf to RDMA" if exports else "only its open kernel modules export a dmabuf"
    return warning(
        _TOPIC,
        subject,
        f"the NVIDIA driver is there, but not nvidia-peermem, and {why}: RDMA goes by way of the host's memory",
        "as root: modprobe nvidia-peermem",
    )
