"""Hypothesis strategies for RDMA systems: anything the kernel may show, most of it of
little use.
"""

from ipaddress import IPv4Address, IPv6Address

from hypothesis import strategies as st

from infinistore.transports.rdma.devices import (
    Address,
    Gid,
    GidKind,
    Interface,
    Link,
    Place,
    RdmaDevice,
    RdmaPort,
    RdmaSystem,
)

INTERFACES = ["eth0", "eth1", "eth0.7"]
DEVICES = ["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"]
ADDRESSES: list[Address] = [
    IPv4Address("10.1.0.1"),
    IPv4Address("192.168.3.4"),
    IPv4Address("169.254.7.7"),
    IPv4Address("127.0.0.1"),
    IPv6Address("2001:db8::5"),
    IPv6Address("fd00::5"),
    IPv6Address("fe80::a:b"),
]


def as_gid(address: Address) -> IPv6Address:
    return address if isinstance(address, IPv6Address) else IPv6Address(f"::ffff:{address}")


@st.composite
def ports(draw: st.DrawFn, number: int) -> RdmaPort:
    link = draw(st.sampled_from([Link.ETHERNET, Link.ETHERNET, Link.INFINIBAND]))
    kinds = [GidKind.INFINIBAND] if link is Link.INFINIBAND else [GidKind.ROCE_V1, GidKind.ROCE_V2]
    gids = [
        Gid(
            index,
            as_gid(draw(st.sampled_from(ADDRESSES))),
            draw(st.sampled_from(kinds)),
            None if link is Link.INFINIBAND else draw(st.sampled_from([*INTERFACES, None])),
        )
        for index in sorted(draw(st.sets(st.integers(0, 15), max_size=6)))
    ]
    return RdmaPort(
        number,
        link,
        draw(st.sampled_from(["ACTIVE", "ACTIVE", "ACTIVE", "DOWN", "INIT"])),
        draw(st.sampled_from(["LinkUp", "Polling", "Disabled"])),
        lid=draw(st.integers(0, 0xBFFF)),
        rate="100 Gb/sec (4X EDR)",
        gids=tuple(gids),
    )


@st.composite
def places(draw: st.DrawFn, number: int) -> Place:
    root, switch = draw(st.sampled_from(["pci0000:00", "pci0000:80"])), draw(st.sampled_from([(), ("0000:01:00.0",)]))
    path = draw(st.sampled_from([(), (root, *switch, f"0000:{number + 16:02x}:00.0")]))
    return Place(path, draw(st.sampled_from([None, 0, 1])))


@st.composite
def devices(draw: st.DrawFn, name: str, number: int) -> RdmaDevice:
    software = name.startswith("rxe")
    node = draw(st.sampled_from([f"/dev/infiniband/uverbs{number}"] * 4 + [None]))
    return RdmaDevice(
        name,
        tuple(draw(ports(port)) for port in range(1, draw(st.integers(1, 2)) + 1)),
        node_type=draw(st.sampled_from(["CA", "CA", "CA", "RNIC"])),
        driver="" if software else "mlx5_core",
        firmware=draw(st.sampled_from(["", "16.35.2000"])),
        place=Place() if software else draw(places(number)),
        is_software=software,
        verbs_node=node,
        may_open=node is not None and draw(st.sampled_from([True, True, True, False])),
    )


@st.composite
def systems(draw: st.DrawFn) -> RdmaSystem:
    names = draw(st.lists(st.sampled_from(DEVICES), unique=True, max_size=3))
    interfaces = [
        Interface(name, draw(st.booleans()), draw(st.sampled_from([1500, 9000])), is_vlan="." in name)
        for name in draw(st.lists(st.sampled_from(INTERFACES), unique=True))
    ]
    return RdmaSystem(
        tuple(draw(devices(name, number)) for number, name in enumerate(sorted(names, key=DEVICES.index))),
        {interface.name: interface for interface in interfaces},
        draw(st.none() | st.frozensets(st.sampled_from(ADDRESSES), min_size=1)),
    )
