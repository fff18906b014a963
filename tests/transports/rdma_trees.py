"""Files of the kernel about RDMA, written below a folder: what `read_system` reads,
described or recorded.
"""

from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from infinistore.transports.rdma.devices import GidKind, Interface, Link, Place, RdmaDevice, RdmaPort, RdmaSystem

STATES = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4, "ACTIVE_DEFER": 5}
PHYSICAL_STATES = {"Sleep": 1, "Polling": 2, "Disabled": 3, "LinkUp": 5}
NODE_TYPES = {"CA": 1, "RNIC": 4, "unspecified": 7}

RXE_IN_THE_GUEST = {
    "sys/class/infiniband/rxe0/node_type": "1: CA\n",
    "sys/class/infiniband/rxe0/fw_ver": "\n",
    "sys/class/infiniband/rxe0/parent": "veth0\n",
    "sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/rxe0/ports/1/phys_state": "5: LinkUp\n",
    "sys/class/infiniband/rxe0/ports/1/lid": "0x0\n",
    "sys/class/infiniband/rxe0/ports/1/link_layer": "Ethernet\n",
    "sys/class/infiniband/rxe0/ports/1/rate": "10 Gb/sec (1X FDR10)\n",
    "sys/class/infiniband/rxe0/ports/1/gids/0": "fe80:0000:0000:0000:e00a:2aff:fe59:0aa2\n",
    "sys/class/infiniband/rxe0/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a4d:0001\n",
    "sys/class/infiniband/rxe0/ports/1/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    "sys/class/infiniband/rxe0/ports/1/gid_attrs/types/0": "RoCE v2\n",
    "sys/class/infiniband/rxe0/ports/1/gid_attrs/types/1": "RoCE v2\n",
    "sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/0": "veth0\n",
    "sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/1": "veth0\n",
    "sys/class/infiniband_verbs/abi_version": "6\n",
    "sys/class/infiniband_verbs/uverbs0/ibdev": "rxe0\n",
    "dev/infiniband/uverbs0": "",
    "sys/class/net/veth0/flags": "0x1003\n",
    "sys/class/net/veth0/operstate": "up\n",
    "sys/class/net/veth0/mtu": "9000\n",
    "sys/class/net/veth0/uevent": "INTERFACE=veth0\nIFINDEX=3\n",
    "sys/class/net/bonding_masters": "\n",
    "proc/net/fib_trie": """Main:
  |-- 10.77.0.0
     /24 link UNICAST
Local:
  +-- 0.0.0.0/1 2 0 2
     +-- 10.77.0.0/24 2 0 2
           |-- 10.77.0.1
              /32 host LOCAL
        |-- 10.77.0.255
           /32 link BROADCAST
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
""",
    "proc/net/if_inet6": """fe80000000000000e00a2afffe590aa2 03 40 20 80    veth0
00000000000000000000000000000001 01 80 10 80       lo
""",
}
"""Linux 6.1 with rdma_rxe, as the virtual machine of `make test-rdma` shows it."""


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_pci(root: Path, place: Place) -> None:
    """Write a device of the PCI bus, and the link by which it is found."""
    folder = root.joinpath("sys/devices", *place.path)
    node = -1 if place.numa_node is None else place.numa_node
    write_files(folder, {"numa_node": f"{node}\n"})
    link = root / "sys/bus/pci/devices" / place.path[-1]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


def write_system(root: Path, system: RdmaSystem) -> Path:
    """Write what the kernel would show of `system` below `root`, and return that."""
    for number, device in enumerate(system.devices):
        write_files(root, dict(_device_files(device)))
        if not device.is_software:
            card = root / "sys/class/infiniband" / device.name / "device"
            if device.place.path:
                write_pci(root, device.place)
                card.symlink_to(root.joinpath("sys/devices", *device.place.path))
            numa_node = -1 if device.place.numa_node is None else device.place.numa_node
            write_files(card, {"numa_node": f"{numa_node}\n"})
            if device.driver:
                (root / "sys/bus/pci/drivers" / device.driver).mkdir(parents=True, exist_ok=True)
                (card / "driver").symlink_to(root / "sys/bus/pci/drivers" / device.driver)
        if device.verbs_node is not None:
            node = device.verbs_node.rpartition("/")[2] or f"uverbs{number}"
            write_files(root, {f"sys/class/infiniband_verbs/{node}/ibdev": f"{device.name}\n"})
            if device.may_open:
                write_files(root, {f"dev/infiniband/{node}": ""})
    for interface in system.interfaces.values():
        write_files(root, dict(_interface_files(interface)))
    if system.addresses is not None:
        write_files(root, _address_files(system.addresses))
    return root


def _device_files(device: RdmaDevice) -> Iterator[tuple[str, str]]:
    folder = f"sys/class/infiniband/{device.name}"
    yield f"{folder}/node_type", f"{NODE_TYPES[device.node_type]}: {device.node_type}\n"
    yield f"{folder}/fw_ver", f"{device.firmware}\n"
    for port in device.ports:
        yield from _port_files(f"{folder}/ports/{port.number}", port)


def _port_files(folder: str, port: RdmaPort) -> Iterator[tuple[str, str]]:
    yield f"{folder}/link_layer", f"{port.link.value if port.link else 'Unspecified'}\n"
    yield f"{folder}/state", f"{STATES[port.state]}: {port.state}\n"
    yield f"{folder}/phys_state", f"{PHYSICAL_STATES[port.physical_state]}: {port.physical_state}\n"
    yield f"{folder}/lid", f"{port.lid:#x}\n"
    yield f"{folder}/rate", f"{port.rate}\n"
    for index in range(16):
        yield f"{folder}/gids/{index}", f"{IPv6Address(0).exploded}\n"
    for gid in port.gids:
        yield f"{folder}/gids/{gid.index}", f"{gid.value.exploded}\n"
        kind = "RoCE v2" if gid.kind is GidKind.ROCE_V2 else "IB/RoCE v1"
        yield f"{folder}/gid_attrs/types/{gid.index}", f"{kind}\n"
        if gid.interface is not None and port.link is Link.ETHERNET:
            yield f"{folder}/gid_attrs/ndevs/{gid.index}", f"{gid.interface}\n"


def _interface_files(interface: Interface) -> Iterator[tuple[str, str]]:
    folder = f"sys/class/net/{interface.name}"
    yield f"{folder}/flags", "0x1003\n"
    yield f"{folder}/operstate", "up\n" if interface.is_up else "lowerlayerdown\n"
    yield f"{folder}/mtu", f"{interface.mtu_bytes}\n"
    yield f"{folder}/uevent", ("DEVTYPE=vlan\n" if interface.is_vlan else "") + f"INTERFACE={interface.name}\n"


def _address_files(addresses: frozenset[IPv4Address | IPv6Address]) -> dict[str, str]:
    routes = "Local:\n  +-- 0.0.0.0/0 3 0 5\n"
    inet6 = ""
    for address in sorted(addresses, key=str):
        if isinstance(address, IPv4Address):
            routes += f"     |-- {address}\n        /32 host LOCAL\n"
        else:
            inet6 += f"{address.packed.hex()} 02 40 20 80     eth0\n"
    return {"proc/net/fib_trie": routes, "proc/net/if_inet6": inet6}
