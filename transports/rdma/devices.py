"""The RDMA devices of this machine as the kernel shows them: ports, links, states, GID
tables, network interfaces.

Everything is read from files below a root that is given, /sys and /proc of this machine
unless a test has recorded others, so that nothing here needs a device, a library or a
privilege. What cannot be read counts as not there: devices and addresses may go while
one looks. Which port and GID to use is decided in `choice`.

The files are described in Documentation/ABI/stable/sysfs-class-infiniband and
testing/sysfs-class-net of the kernel.
"""

import enum
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path("/")
_DEVICES: Final = Path("sys/class/infiniband")
_VERBS: Final = Path("sys/class/infiniband_verbs")
_INTERFACES: Final = Path("sys/class/net")
_PCI: Final = Path("sys/bus/pci/devices")
_ALL: Final = Path("sys/devices")

_IFF_UP: Final = 1
_RTF_UP: Final = 1
_RTF_REJECT: Final = 0x200
_NOT_RUNNING: Final = {"down", "lowerlayerdown", "notpresent", "dormant"}
_LOCAL_IPV4: Final = re.compile(r"\|-- ([\d.]+)\n(?: +/.*\n)*? +/32 host LOCAL$", re.MULTILINE)
_LOCAL_IPV6: Final = re.compile(r"^([0-9a-f]{32}) ", re.MULTILINE)
_ROCE_HEADERS_BYTES: Final = 96  # GRH, UDP, BTH, XRC, atomic and ICRC headers: what the kernel reserves of a frame

Address = IPv4Address | IPv6Address


class Link(enum.Enum):
    """What connects a port. The value is the kernel's word, `flag` --link-type's."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"

    @property
    def flag(self) -> str:
        """How --link-type calls it."""
        return "IB" if self is Link.INFINIBAND else "Ethernet"


class GidKind(enum.Enum):
    """What kind of network a GID is an address in."""

    INFINIBAND = "InfiniBand"
    ROCE_V1 = "RoCE v1"
    ROCE_V2 = "RoCE v2"


@attrs.frozen
class Interface:
    """A network interface of this network namespace."""

    name: str
    is_up: bool
    """It was set up, and its link is there."""
    mtu_bytes: int = 1500
    is_vlan: bool = False


@attrs.frozen
class Gid:
    """An entry of a port's GID table that is not empty."""

    index: int
    value: IPv6Address
    kind: GidKind
    interface: str | None = None
    """Its network interface, which may be of another network namespace."""

    @property
    def address(self) -> Address:
        """The address that it stands for: IPv4 where it is a mapped one."""
        return self.value.ipv4_mapped or self.value

    @property
    def digits(self) -> str:
        """The 32 hexadecimal digits."""
        return self.value.packed.hex()


@attrs.frozen
class RdmaPort:
    """A port of a device."""

    number: int
    link: Link | None
    """None for other links, whose devices have no queue pairs that connect."""
    state: str
    """ACTIVE, DOWN, INIT (no subnet manager yet), ARMED, or ACTIVE_DEFER."""
    physical_state: str = ""
    """LinkUp, Polling, Disabled, ..."""
    lid: int = 0
    """Address in an InfiniBand subnet; 0 on Ethernet, and before it is given."""
    rate: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it can send and receive."""
        return self.state == "ACTIVE"


@attrs.frozen
class Place:
    """Where a device is in the machine.

    `path` are the bridges and switches of the PCI bus that lead to it, from the host
    bridge on, and the device itself.
    """

    path: tuple[str, ...] = ()
    numa_node: int | None = None

    def distance(self, other: "Place") -> tuple[int, bool]:
        """How far it is to another place; less is nearer. The longer the part of the
        bus that both share, the nearer; then, on the same NUMA node is nearer.
        """
        pairs = zip(self.path, other.path, strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return -shared, self.numa_node is None or self.numa_node != other.numa_node


@attrs.frozen
class RdmaDevice:
    """A device."""

    name: str
    ports: tuple[RdmaPort, ...] = ()
    node_type: str = "CA"
    """CA for InfiniBand and RoCE; RNIC is iWARP."""
    driver: str = ""
    firmware: str = ""
    place: Place = Place()
    is_software: bool = False
    """Soft-RoCE (rxe) and soft iWARP (siw): no card behind it."""
    verbs_node: str | None = None
    """The device file for programs, such as /dev/infiniband/uverbs0, if any."""
    may_open: bool = True
    """Whether this process may read and write it. Containers often lack it."""


@attrs.frozen
class RdmaSystem:
    """All of it."""

    devices: tuple[RdmaDevice, ...] = ()
    interfaces: Mapping[str, Interface] = attrs.field(factory=dict)
    """Those of this network namespace."""
    addresses: frozenset[Address] | None = None
    """The addresses of this network namespace; None if they cannot be told."""
    routes: tuple[tuple[str, IPv4Network], ...] = ()
    """Interfaces, and the networks that are reached by them."""

    def reaches(self, interface: str | None, peer: Address | None) -> bool:
        """Whether a route to an address goes by this interface."""
        return peer is not None and any(peer in network for name, network in self.routes if name == interface)


def there_is_rdma(root: Path = ROOT) -> bool:
    """Whether there is an RDMA device at all. Quick, for use before slow imports."""
    return any(True for _ in _entries(root / _DEVICES))


def read_system(root: Path = ROOT) -> RdmaSystem:
    """Read devices, interfaces and addresses of this namespace. Never raises."""
    nodes = {_text(path / "ibdev"): path.name for path in _entries(root / _VERBS) if path.name.startswith("uverbs")}
    devices = [_device(root, folder, nodes.get(folder.name)) for folder in _entries(root / _DEVICES)]
    return RdmaSystem(
        tuple(sorted(devices, key=lambda device: natural(device.name))),
        {folder.name: _interface(folder) for folder in _entries(root / _INTERFACES) if folder.is_dir()},
        _addresses(root),
        tuple(_routes(root)),
    )


def pci_place(address: str, root: Path = ROOT) -> Place | None:
    """Return where a PCI device is, such as 0000:17:00.0; None if there is none."""
    folder = root / _PCI / address
    return _place(root, folder) if folder.exists() else None


def roce_mtu_bytes(interface_mtu_bytes: int) -> int:
    """Return the MTU of RoCE over an interface: 256 to 4096, fitting with headers."""
    fitting = [size for size in (4096, 2048, 1024, 512, 256) if size <= interface_mtu_bytes - _ROCE_HEADERS_BYTES]
    return fitting[0] if fitting else 256


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Sort mlx5_2 before mlx5_10."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def _device(root: Path, folder: Path, verbs_node: str | None) -> RdmaDevice:
    hardware = folder / "device"
    node = root / "dev/infiniband" / verbs_node if verbs_node is not None else None
    return RdmaDevice(
        folder.name,
        tuple(sorted((_port(port) for port in _entries(folder / "ports")), key=lambda port: port.number)),
        node_type=_word(folder / "node_type"),
        driver=_link_target(hardware / "driver"),
        firmware=_text(folder / "fw_ver"),
        place=_place(root, hardware),
        is_software=not hardware.exists(),
        verbs_node=f"/dev/infiniband/{verbs_node}" if verbs_node is not None else None,
        may_open=node is not None and os.access(node, os.R_OK | os.W_OK),
    )


def _place(root: Path, folder: Path) -> Place:
    """Where the device of a folder is: empty for software, which is on no bus."""
    node = _number(folder / "numa_node")
    numa_node = node if node is not None and node >= 0 else None
    try:
        path = folder.resolve(strict=True).relative_to((root / _ALL).resolve()).parts
    except (OSError, ValueError):
        path = ()
    return Place(path if path and path[0].startswith("pci") else (), numa_node)


def _port(folder: Path) -> RdmaPort:
    layer = _text(folder / "link_layer")
    link = next((link for link in Link if link.value == layer), None)
    return RdmaPort(
        int(folder.name) if folder.name.isdecimal() else 0,
        link,
        _word(folder / "state"),
        _word(folder / "phys_state"),
        lid=_number(folder / "lid") or 0,
        rate=_text(folder / "rate"),
        gids=tuple(sorted(_gids(folder, link), key=lambda gid: gid.index)),
    )


def _gids(port: Path, link: Link | None) -> Iterator[Gid]:
    for index, value in _gid_values(port / "gids"):
        if link is Link.INFINIBAND:
            yield Gid(index, value, GidKind.INFINIBAND)
            continue
        kind = _text(port / f"gid_attrs/types/{index}")
        if kind:  # without, the entry has gone since
            interface = _text(port / f"gid_attrs/ndevs/{index}") or None
            version = GidKind.ROCE_V2 if kind == GidKind.ROCE_V2.value else GidKind.ROCE_V1
            yield Gid(index, value, version, interface)


def _gid_values(folder: Path) -> Iterator[tuple[int, IPv6Address]]:
    """The GIDs that are not empty: few of up to 1024, so by plain system calls."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        for name in os.listdir(folder_fd):
            try:
                fd = os.open(name, os.O_RDONLY, dir_fd=folder_fd)
                try:
                    text = os.read(fd, 64)
                finally:
                    os.close(fd)
                if text.strip(b"0:\n") and name.isdecimal():
                    yield int(name), IPv6Address(text.decode("ascii").strip())
            except (OSError, ValueError):
                continue  # gone since, or no GID
    finally:
        os.close(folder_fd)


def _interface(folder: Path) -> Interface:
    is_set_up = bool((_number(folder / "flags") or 0) & _IFF_UP)
    return Interface(
        folder.name,
        # Some drivers say "unknown" of a link that works, and so does lo.
        is_up=is_set_up and _text(folder / "operstate") not in _NOT_RUNNING,
        mtu_bytes=_number(folder / "mtu") or 1500,
        is_vlan="DEVTYPE=vlan" in _text(folder / "uevent").splitlines(),
    )


def _addresses(root: Path) -> frozenset[Address] | None:
    """The local addresses of the network namespace that this process is in."""
    routes = _text(root / "proc/net/fib_trie")
    if not routes:
        return None
    found: set[Address] = {IPv4Address(text) for text in _LOCAL_IPV4.findall(routes) if _is_ipv4(text)}
    inet6 = _text(root / "proc/net/if_inet6")  # no such file: no IPv6
    found.update(IPv6Address(int(digits, 16)) for digits in _LOCAL_IPV6.findall(inet6))
    return frozenset(found)


def _routes(root: Path) -> Iterator[tuple[str, IPv4Network]]:
    """The routes of this network namespace, with numbers as they are in memory."""
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        try:
            name, network, _, flags, _, _, _, mask, *_ = line.split()
            low, mask_bits = (IPv4Address(int(digits, 16).to_bytes(4, sys.byteorder)) for digits in (network, mask))
            if int(flags, 16) & _RTF_UP and not int(flags, 16) & _RTF_REJECT:
                yield name, IPv4Network(f"{low}/{mask_bits}")
        except (ValueError, OverflowError):
            continue  # no line of the kernel


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """The text of a file; empty if the attribute has no value, or is gone."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _word(path: Path) -> str:
    """The word of an attribute such as `4: ACTIVE`."""
    return _text(path).rpartition(":")[2].strip()


def _number(path: Path) -> int | None:
    """A number, decimal or with 0x."""
    try:
        return int(_text(path), 0)
    except ValueError:
        return None


def _link_target(path: Path) -> str:
    try:
        return path.resolve(strict=True).name
    except OSError:
        return ""
