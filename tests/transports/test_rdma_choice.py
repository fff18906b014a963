"""Which RDMA port and GID are chosen, on systems as people have them and on any that
can be described.
"""

import random
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.transports.rdma.choice import (
    ChosenPort,
    NoDevice,
    NoGid,
    NoRdma,
    PortNotActive,
    UnknownDevice,
    UnusableDevice,
    Wanted,
    WrongLink,
    choose,
    choose_port,
    judge_gids,
    near_address,
)
from infinistore.transports.rdma.devices import Address, Gid, GidKind, Interface, Link, RdmaDevice, RdmaPort, RdmaSystem

from . import rdma_trees
from .rdma_strategies import ADDRESSES, DEVICES, as_gid, systems

V1, V2 = GidKind.ROCE_V1, GidKind.ROCE_V2
LINK_LOCAL, IPV4, IPV6 = IPv6Address("fe80::a:b"), IPv4Address("10.1.0.1"), IPv6Address("2001:db8::5")


def gids(*entries: tuple[Address, GidKind, str | None]) -> tuple[Gid, ...]:
    return tuple(Gid(index, as_gid(address), kind, name) for index, (address, kind, name) in enumerate(entries))


ROCE_TABLE = gids((LINK_LOCAL, V1, "eth0"), (LINK_LOCAL, V2, "eth0"), (IPV4, V1, "eth0"), (IPV4, V2, "eth0"))
"""As a ConnectX shows it: each address in both versions, the link-local one of the card
first.
"""


def roce(table: tuple[Gid, ...] = ROCE_TABLE, name: str = "mlx5_0", state: str = "ACTIVE") -> RdmaDevice:
    port = RdmaPort(1, Link.ETHERNET, state, "LinkUp" if state == "ACTIVE" else "Disabled", gids=table)
    return RdmaDevice(name, (port,), driver="mlx5_core", verbs_node="/dev/infiniband/uverbs0")


def infiniband(name: str = "mlx5_0", state: str = "ACTIVE", physical_state: str = "LinkUp") -> RdmaDevice:
    table = gids((IPv6Address("fe80::506b:4b03:f1:2ab0"), GidKind.INFINIBAND, None))
    port = RdmaPort(1, Link.INFINIBAND, state, physical_state, lid=0x2A, gids=table)
    return RdmaDevice(name, (port,), driver="mlx5_core", verbs_node="/dev/infiniband/uverbs0")


def host(*devices: RdmaDevice, interfaces: str = "eth0", addresses: tuple[Address, ...] = (IPV4, IPV6)) -> RdmaSystem:
    made = {name: Interface(name, is_up=True, is_vlan="." in name) for name in interfaces.split()}
    return RdmaSystem(devices, made, frozenset(addresses))


# Systems as people have them.


def test_soft_roce_as_recorded(tmp_path: Path) -> None:
    chosen = choose_port(root=rdma_trees.write_files(tmp_path, rdma_trees.RXE_IN_THE_GUEST))

    assert attrs.astuple(chosen)[:-1] == ("rxe0", 1, "Ethernet", 0, "00000000000000000000ffff0a4d0001", 1)
    assert chosen.describe() == "rxe0 port 1 (Ethernet, GID index 1)"
    assert chosen.reason == (
        "GID 1 (RoCE v2, 10.77.0.1 on veth0): a routable IPv4 address; the best of 2 that can be used here"
    )


def test_infiniband_is_addressed_by_its_lid_and_first_gid() -> None:
    chosen = choose(host(infiniband()), Wanted())
    assert (chosen.link, chosen.lid, chosen.gid_index) == ("InfiniBand", 0x2A, 0)


def test_roce_v2_with_ipv4_wins_over_all_else() -> None:
    assert choose(host(roce()), Wanted()).gid_index == 3


def test_an_address_of_ipv6_wins_over_link_local() -> None:
    table = gids((LINK_LOCAL, V2, "eth0"), (IPV6, V1, "eth0"), (IPV6, V2, "eth0"))
    assert choose(host(roce(table)), Wanted()).gid_index == 2


def test_roce_v1_is_taken_if_there_is_nothing_else_and_said() -> None:
    chosen = choose(host(roce(gids((IPV4, V1, "eth0")))), Wanted())
    assert "RoCE v1: both ends must" in chosen.reason


def test_an_interface_that_is_down_is_passed_over() -> None:
    table = gids((IPV4, V2, "eth0"), (IPV6, V2, "eth1"))
    system = host(roce(table), interfaces="eth0 eth1")
    system = attrs.evolve(system, interfaces={**system.interfaces, "eth0": Interface("eth0", is_up=False)})
    assert choose(system, Wanted()).gid_index == 1


def test_a_vlan_is_named() -> None:
    table = gids((LINK_LOCAL, V2, "eth0"), (IPV4, V2, "eth0.7"))
    assert (
        "on eth0.7): a routable IPv4 address in a VLAN"
        in choose(host(roce(table), interfaces="eth0 eth0.7"), Wanted()).reason
    )


def test_a_container_without_the_interface_cannot_use_its_gids() -> None:
    with pytest.raises(NoGid, match=r"eth0, which is in another network namespace.*--network=host"):
        choose(host(roce(), interfaces="veth9"), Wanted())


def test_a_container_whose_own_interface_has_the_same_name_cannot_either() -> None:
    system = host(roce(ROCE_TABLE[2:]), addresses=(IPv4Address("172.17.0.2"),))
    with pytest.raises(NoGid, match=r"is for 10\.1\.0\.1, which is in another network namespace"):
        choose(system, Wanted())


def test_a_container_with_an_address_of_its_own_uses_that() -> None:
    own = IPv4Address("172.17.0.2")
    table = gids((IPV4, V2, "eth0"), (own, V2, "eth0"))
    assert choose(host(roce(table), addresses=(own,)), Wanted()).gid_index == 1


def test_the_address_that_the_peer_knows_wins_among_devices() -> None:
    near = IPv4Address("192.168.3.4")
    system = host(
        roce(name="mlx5_0"), roce(gids((near, V2, "eth1")), "mlx5_1"), interfaces="eth0 eth1", addresses=(IPV4, near)
    )
    assert choose(system, Wanted()).device == "mlx5_0"
    assert choose(system, Wanted(near=near)).device == "mlx5_1"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", IPv4Address("10.0.0.7")),
        ("::ffff:10.0.0.7", IPv4Address("10.0.0.7")),
        ("fd00::7", IPv6Address("fd00::7")),
        ("fe80::7%eth0", IPv6Address("fe80::7")),
    ],
)
def test_the_address_of_a_socket_is_one_to_be_near(host: str, address: object) -> None:
    assert near_address(host) == address


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "127.0.0.1", "::1", "storage-7", "/run/store.sock"])
def test_what_says_nothing_of_where_a_peer_is_is_no_address_to_be_near(host: str) -> None:
    assert near_address(host) is None


def test_software_near_the_peer_does_not_win_over_a_card() -> None:
    near = IPv4Address("192.168.3.4")
    software = attrs.evolve(roce(gids((near, V2, "eth1")), "a_rxe0"), is_software=True, driver="")
    system = host(software, roce(name="mlx5_0"), interfaces="eth0 eth1", addresses=(IPV4, near))
    assert choose(system, Wanted(near=near)).device == "mlx5_0"


def test_a_card_wins_over_software() -> None:
    software = attrs.evolve(roce(name="a_rxe0"), is_software=True, driver="")
    assert choose(host(software, infiniband()), Wanted()).device == "mlx5_0"


def test_a_device_that_is_down_does_not_hide_one_that_works() -> None:
    system = host(infiniband("mlx5_0", "DOWN", "Polling"), roce(name="mlx5_1"))
    assert choose(system, Wanted()).device == "mlx5_1"


# The hint.


def test_a_hint_that_can_be_used_is_honoured() -> None:
    chosen = choose(host(roce()), Wanted(hint_gid_index=0))
    assert chosen.gid_index == 0
    assert "as --hint-gid-index says" in chosen.reason


@pytest.mark.parametrize(
    ("hint", "why"),
    [(9, "not GID 9 as --hint-gid-index says, since that is empty"), (1, "since that is of eth9, which")],
)
def test_a_hint_that_cannot_be_used_is_passed_over_and_the_reason_says_why(hint: int, why: str) -> None:
    chosen = choose(host(roce(gids((IPV4, V2, "eth0"), (IPV4, V2, "eth9")))), Wanted(hint_gid_index=hint))
    assert chosen.gid_index == 0
    assert why in chosen.reason


# Errors name the remedy.

CASES = {
    "no device": (host(), Wanted(), NoDevice, "rdma link add"),
    "a name, and no device": (host(), Wanted("mlx5_0"), NoDevice, "is the driver loaded"),
    "a name nearly right": (host(roce()), Wanted("mlx5-0"), UnknownDevice, r"mean 'mlx5_0'\? these are there: mlx5_0"),
    "a name far off": (host(roce()), Wanted("qedr"), UnknownDevice, "'qedr'; these are there: mlx5_0"),
    "an interface": (host(roce()), Wanted("eth0"), UnknownDevice, "is a network interface; .* --dev-name mlx5_0"),
    "a name with its port": (host(roce()), Wanted("mlx5_0:1"), UnknownDevice, "say --dev-name mlx5_0 --ib-port 1"),
    "no such port": (host(roce()), Wanted(ib_port=2), UnknownDevice, "no port 2 of mlx5_0; --ib-port can be 1"),
    "the other link": (host(roce()), Wanted(link_type="IB"), WrongLink, "is Ethernet, and --link-type says IB"),
    "the cable": (host(infiniband("ib", "DOWN", "Polling")), Wanted(), PortNotActive, "DOWN; look at the cable"),
    "disabled": (host(infiniband("ib", "DOWN", "Disabled")), Wanted(), PortNotActive, "ibportstate"),
    "no subnet manager": (host(infiniband(state="INIT")), Wanted(), PortNotActive, "start opensm"),
    "an interface down": (host(roce(state="DOWN")), Wanted(), PortNotActive, "ip link show eth0"),
    "no address": (host(roce(())), Wanted(), NoGid, "give its network interface an address"),
    "iWARP": (host(attrs.evolve(roce(), node_type="RNIC")), Wanted(), UnusableDevice, "iWARP"),
    "no verbs": (host(attrs.evolve(roce(), verbs_node=None)), Wanted(), UnusableDevice, "modprobe ib_uverbs"),
    "no access": (host(attrs.evolve(roce(), may_open=False)), Wanted(), UnusableDevice, "--device=/dev/infiniband"),
    "two troubles": (host(infiniband(state="INIT"), roce(())), Wanted(), NoRdma, "opensm on one host; port 1 .* GID"),
}  # fmt: skip


@pytest.mark.parametrize(("system", "wanted", "error", "text"), CASES.values(), ids=CASES)
def test_an_error_says_what_would_help(system: RdmaSystem, wanted: Wanted, error: type[NoRdma], text: str) -> None:
    with pytest.raises(error, match=text):
        choose(system, wanted)


# Any system.

WISHES = st.builds(
    Wanted,
    dev_name=st.none() | st.sampled_from([*DEVICES, "eth0", "mlx5"]),
    ib_port=st.integers(1, 3),
    link_type=st.sampled_from([None, None, "IB", "Ethernet"]),
    hint_gid_index=st.integers(-1, 16),
    near=st.none() | st.sampled_from(ADDRESSES),
)


def outcome(system: RdmaSystem, wanted: Wanted) -> ChosenPort | str:
    try:
        return choose(system, wanted)
    except NoRdma as error:
        text = str(error)
        assert text and "\n" not in text
        return text


def port_of(system: RdmaSystem, chosen: ChosenPort) -> RdmaPort:
    (device,) = (device for device in system.devices if device.name == chosen.device)
    (port,) = (port for port in device.ports if port.number == chosen.number)
    return port


@given(systems(), WISHES)
def test_what_is_chosen_can_be_used_and_was_asked_for_and_is_the_hint_or_the_best(
    system: RdmaSystem, wanted: Wanted
) -> None:
    chosen = outcome(system, wanted)
    if isinstance(chosen, str):
        return
    assert wanted.dev_name in {None, chosen.device}
    assert chosen.number == wanted.ib_port
    assert wanted.link_type in {None, "IB" if chosen.link == "InfiniBand" else "Ethernet"}
    port = port_of(system, chosen)
    (gid,) = (gid for gid in port.gids if gid.index == chosen.gid_index)
    assert (port.state, chosen.gid) == ("ACTIVE", gid.digits)
    if gid.kind is not GidKind.INFINIBAND:
        assert gid.interface is not None
        assert system.interfaces[gid.interface].is_up
        assert system.addresses is None or gid.address.is_link_local or gid.address in system.addresses
    usable = [one.gid for one in judge_gids(system, port, wanted) if one.usable]
    if wanted.hint_gid_index in [one.index for one in usable]:
        assert chosen.gid_index == wanted.hint_gid_index
        return
    assert gid.kind is V2 or V2 not in {one.kind for one in usable}
    same_kind = [one.address for one in usable if one.kind is gid.kind]
    if gid.kind is V2 and wanted.near not in same_kind:
        assert not gid.address.is_link_local or all(one.is_link_local or one.is_loopback for one in same_kind)


@given(systems(), WISHES, st.randoms(use_true_random=False))
def test_the_order_of_devices_does_not_matter(system: RdmaSystem, wanted: Wanted, order: random.Random) -> None:
    devices = list(system.devices)
    order.shuffle(devices)
    shuffled = outcome(attrs.evolve(system, devices=tuple(devices)), wanted)
    expected = outcome(system, wanted)
    assert shuffled == expected or (isinstance(shuffled, str) and isinstance(expected, str))


@given(systems(), WISHES)
def test_a_name_gets_what_would_be_chosen_if_the_device_were_alone(system: RdmaSystem, wanted: Wanted) -> None:
    for device in system.devices:
        named = outcome(system, attrs.evolve(wanted, dev_name=device.name))
        alone = outcome(attrs.evolve(system, devices=(device,)), attrs.evolve(wanted, dev_name=None))
        assert named == alone
