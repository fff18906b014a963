"""Which port of which RDMA device to use, and which of its addresses (GIDs) to speak
from, with the reason for each.

Pure: it looks at an `RdmaSystem` and nothing else. What it promises:

- A port is taken only if it is active, of the link that was asked for, and this process
  may open its device.
- A GID is taken only if its network interface is up and, like its address, of this
  network namespace: in a container the table also shows what is the host's, and a queue
  pair that uses that fails with EINVAL or is never answered.
- Among those, RoCE v2 comes before v1, an address that is asked to be near before
  others, routable IPv4 before routable IPv6 before link-local, and then the lower
  index. --hint-gid-index wins over that if its entry can be used.
- Where there is no choice, the error says what would help.

A GID table changes when addresses do: read and choose again when a queue pair refuses a
GID with EINVAL.
"""

import difflib
import enum
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import attrs

from infinistore.transports.rdma.devices import (
    ROOT,
    Address,
    Gid,
    GidKind,
    Interface,
    Link,
    Place,
    RdmaDevice,
    RdmaPort,
    RdmaSystem,
    natural,
    read_system,
)


class NoRdma(Exception):
    """RDMA cannot be used here. The message is one line: `problem; remedy`."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class NoDevice(NoRdma):
    """This machine has no RDMA device."""


class UnknownDevice(NoRdma):
    """There is no device, or no port, of the name that was asked for."""


class UnusableDevice(NoRdma):
    """This process may not open the device, or it has no connected queue pairs."""


class WrongLink(NoRdma):
    """The port is InfiniBand and Ethernet was asked for, or the other way round."""


class PortNotActive(NoRdma):
    """The port cannot send: no cable, no subnet manager, or its interface is down."""


class NoGid(NoRdma):
    """The port is active, but none of its addresses can be used here."""


@attrs.frozen
class Wanted:
    """What was asked for: the flags of the same names."""

    dev_name: str | None = None
    ib_port: int = 1
    link_type: str | None = None
    """IB or Ethernet."""
    hint_gid_index: int = -1
    near: Address | None = None
    """A local address that the peer reaches, such as the control connection's."""
    peer: Address | None = None
    """The address of that peer."""
    place: Place | None = None
    """Where the memory is that is to be moved: of a GPU, or on a NUMA node."""


@attrs.frozen
class ChosenPort:
    """An active port, the address to speak from, and why these."""

    device: str
    number: int
    link: str
    """InfiniBand or Ethernet."""
    lid: int
    """0 on Ethernet."""
    gid: str
    """32 hexadecimal digits."""
    gid_index: int
    reason: str

    def describe(self) -> str:
        """Name it for people."""
        return f"{self.device} port {self.number} ({self.link}, GID index {self.gid_index})"


class _Rank(enum.IntEnum):
    """How good an address is; less is better."""

    ROUTABLE_IPV4 = 0
    ROUTABLE_IPV6 = 1
    LINK_LOCAL = 2
    LOOPBACK = 3

    @property
    def text(self) -> str:
        return ("a routable IPv4 address", "a routable IPv6 address", "a link-local address", "a loopback address")[
            self
        ]


@attrs.frozen
class GidVerdict:
    """What is to be said of one GID."""

    gid: Gid
    usable: bool
    text: str
    """Why not, or what kind of address it is."""
    order: tuple[int, ...] = ()
    """The least of a port wins. Ports are compared without the last, the index."""


def choose_port(
    dev_name: str | None = None,
    ib_port: int = 1,
    link_type: str | None = None,
    hint_gid_index: int = -1,
    *,
    near: Address | None = None,
    peer: Address | None = None,
    place: Place | None = None,
    root: Path = ROOT,
) -> ChosenPort:
    """Read this machine's devices and choose among them; see `choose`."""
    return choose(read_system(root), Wanted(dev_name, ib_port, link_type, hint_gid_index, near, peer, place))


def near_address(host: str) -> Address | None:
    """Return the address that a socket of this machine has, as `getsockname` or a
    setting names it, to choose near it.

    None if it is none by which another machine reaches this one: a path, a name,
    loopback, or all addresses.
    """
    try:
        address: Address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return None if address.is_unspecified or address.is_loopback else address


def choose(system: RdmaSystem, wanted: Wanted) -> ChosenPort:
    """Choose a port and a GID. Without a device name, the best of all devices: a card
    comes before software, then one that is known to reach the peer, then the one
    nearest to the place.

    Raises:
        NoRdma: there is nothing to choose. Its class says what kind of trouble it is,
            its message what would help.
    """
    devices = [_named(system, wanted.dev_name)] if wanted.dev_name is not None else system.devices
    if not devices:
        raise NoDevice(
            "this machine has no RDMA device",
            "for a card, load its driver (such as mlx5_ib); for Soft-RoCE, as root: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev INTERFACE",
        )
    found: list[tuple[tuple[object, ...], ChosenPort]] = []
    refused: list[tuple[type[NoRdma], str]] = []
    for device in devices:
        try:
            found.append(_candidate(system, device, wanted))
        except NoRdma as error:
            refused.append((type(error), str(error)))
    if found:
        return min(found, key=lambda candidate: candidate[0])[1]
    kinds = {kind for kind, _ in refused}
    raise (kinds.pop() if len(kinds) == 1 else NoRdma)("; ".join(why for _, why in refused))


def judge_port(device: RdmaDevice, wanted: Wanted) -> RdmaPort:
    """Return the port of `device` that is wanted, whatever its GIDs.

    Raises:
        UnknownDevice, UnusableDevice, WrongLink, PortNotActive: it cannot be used.
    """
    number, place = wanted.ib_port, f"port {wanted.ib_port} of {device.name}"
    port = next((port for port in device.ports if port.number == number), None)
    if port is None:
        numbers = _listed(str(port.number) for port in device.ports)
        raise UnknownDevice(f"there is no {place}", f"--ib-port can be {numbers}" if numbers else "")
    if device.node_type != "CA" or port.link is None:
        kind = {"RNIC": "iWARP"}.get(device.node_type, device.node_type or "unknown")
        raise UnusableDevice(f"{device.name} is of the kind {kind}", "InfiniBand or RoCE is needed")
    if device.verbs_node is None:
        raise UnusableDevice(f"{device.name} cannot be opened by programs", "as root: modprobe ib_uverbs")
    if not device.may_open:
        raise UnusableDevice(
            f"{device.name} cannot be opened: this process has no access to {device.verbs_node}",
            "give a container --device=/dev/infiniband, and a user the file's group",
        )
    if wanted.link_type is not None and wanted.link_type != port.link.flag:
        raise WrongLink(
            f"{place} is {port.link.value}, and --link-type says {wanted.link_type}",
            "leave --link-type out, or name another device by --dev-name",
        )
    if not port.is_active:
        raise PortNotActive(f"{place} is {port.state or 'in an unknown state'}", _remedy(port))
    return port


def judge_gids(system: RdmaSystem, port: RdmaPort, wanted: Wanted = Wanted()) -> list[GidVerdict]:
    """Say of each GID of a port, in order, whether it can be used, and why."""
    return [_judge_gid(system, gid, wanted) for gid in port.gids]


def _named(system: RdmaSystem, name: str) -> RdmaDevice:
    names = [device.name for device in system.devices]
    for device in system.devices:
        if device.name == name:
            return device
    if not names:
        raise NoDevice(f"there is no RDMA device {name!r} here, and no other either", "is the driver loaded?")
    stem, colon, number = name.partition(":")
    if colon and stem in names:  # as other programs of this field write it
        raise UnknownDevice(f"there is no RDMA device {name!r}", f"say --dev-name {stem} --ib-port {number or 1}")
    behind = [
        device.name
        for device in system.devices
        if any(gid.interface == name for port in device.ports for gid in port.gids)
    ]
    if behind:
        raise UnknownDevice(f"{name} is a network interface", f"its RDMA device is --dev-name {_listed(behind)}")
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    question = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownDevice(f"there is no RDMA device {name!r}", f"{question}these are there: {_listed(names)}")


def _candidate(system: RdmaSystem, device: RdmaDevice, wanted: Wanted) -> tuple[tuple[object, ...], ChosenPort]:
    """The best of one device, and how good it is among others: the least is best."""
    port = judge_port(device, wanted)
    assert port.link is not None  # judged
    verdicts = judge_gids(system, port, wanted)
    best = _best(f"port {port.number} of {device.name}", verdicts, wanted)
    gid = best.gid
    where = f" on {gid.interface}" if gid.interface else ""
    what = f"GID {gid.index} ({gid.kind.value}, {gid.address}{where})"
    reason = f"{what}: {_why(verdicts, wanted, best)}"
    lid = port.lid if port.link is Link.INFINIBAND else 0
    chosen = ChosenPort(device.name, port.number, port.link.value, lid, gid.digits, gid.index, reason)
    is_near = _is_near(gid, wanted.near)
    distance: tuple[int, ...] = ()
    if wanted.place is not None:
        distance = (not (is_near or system.reaches(gid.interface, wanted.peer)), *device.place.distance(wanted.place))
    return (device.is_software, distance, not is_near, best.order[:-1], natural(device.name)), chosen


def _best(place: str, verdicts: list[GidVerdict], wanted: Wanted) -> GidVerdict:
    usable = [verdict for verdict in verdicts if verdict.usable]
    if usable:
        hinted = [verdict for verdict in usable if verdict.gid.index == wanted.hint_gid_index]
        return hinted[0] if hinted else min(usable, key=lambda verdict: verdict.order)
    if not verdicts:
        raise NoGid(f"{place} has no GID", "give its network interface an address")
    why = _listed(f"GID {verdict.gid.index} {verdict.text}" for verdict in verdicts)
    raise NoGid(
        f"{place} has no GID that can be used here: {why}",
        "give an interface of this network namespace an address, or run in the namespace that has it (containers: "
        "--network=host)",
    )


def _why(verdicts: list[GidVerdict], wanted: Wanted, chosen: GidVerdict) -> str:
    hint = wanted.hint_gid_index
    if hint == chosen.gid.index:
        return f"as --hint-gid-index says; {chosen.text}"
    usable = sum(verdict.usable for verdict in verdicts)
    of = "the only one that can be used here" if usable == 1 else f"the best of {usable} that can be used here"
    reason = f"{chosen.text}; {of}"
    if hint < 0:
        return reason
    unusable = next((verdict.text for verdict in verdicts if verdict.gid.index == hint), "is empty")
    return f"{reason}; not GID {hint} as --hint-gid-index says, since that {unusable}"


def _judge_gid(system: RdmaSystem, gid: Gid, wanted: Wanted) -> GidVerdict:
    if gid.kind is GidKind.INFINIBAND:
        return GidVerdict(gid, True, "made of the subnet and the port's GUID", (gid.index,))
    if gid.interface is None:
        return GidVerdict(gid, False, "has no network interface")
    interface = system.interfaces.get(gid.interface)
    if interface is None:
        return GidVerdict(gid, False, f"is of {gid.interface}, which is in another network namespace")
    if not interface.is_up:
        return GidVerdict(gid, False, f"is of {gid.interface}, which is down")
    rank = _rank(gid.address)
    # Names of interfaces repeat in every namespace, addresses do not. A link-local GID
    # is made by the driver from the card's number, and need not be an address of the
    # interface.
    if rank is not _Rank.LINK_LOCAL and system.addresses is not None and gid.address not in system.addresses:
        return GidVerdict(gid, False, f"is for {gid.address}, which is in another network namespace")
    old, near = gid.kind is GidKind.ROCE_V1, _is_near(gid, wanted.near)
    return GidVerdict(gid, True, _praise(interface, rank, old=old, near=near), (old, not near, rank, gid.index))


def _praise(interface: Interface, rank: _Rank, *, old: bool, near: bool) -> str:
    text = "the address that the peer knows" if near else rank.text
    if interface.is_vlan:
        text += " in a VLAN"
    if old:
        text += ", RoCE v1: both ends must be in one Ethernet segment and choose v1"
    return text


def _rank(address: Address) -> _Rank:
    if address.is_loopback:
        return _Rank.LOOPBACK
    if address.is_link_local:
        return _Rank.LINK_LOCAL
    return _Rank.ROUTABLE_IPV4 if address.version == 4 else _Rank.ROUTABLE_IPV6


def _is_near(gid: Gid, near: Address | None) -> bool:
    return near is not None and gid.address == near


def _remedy(port: RdmaPort) -> str:
    if port.link is Link.ETHERNET:
        names = _listed(dict.fromkeys(gid.interface for gid in port.gids if gid.interface)) or "INTERFACE"
        return f"look at its network interface (ip link show {names}), and at the cable"
    if port.state in {"INIT", "ARMED"}:
        return "no subnet manager has set it up: look whether the switch runs one, or start opensm on one host"
    if port.physical_state == "Disabled":
        return "it is disabled: ibportstate enables it"
    return "look at the cable, and at the port of the switch"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
