"""Which of several devices is chosen for a GPU: on a machine with two sockets, each
with two PCI switches, each of these with two GPUs and two cards, as its kernel shows
it.
"""

import itertools
import sys
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from infinistore.transports.cuda import CudaDriver, current_gpu, gpu_place
from infinistore.transports.rdma.choice import ChosenPort, choose_port
from infinistore.transports.rdma.devices import (
    Gid,
    GidKind,
    Interface,
    Link,
    Place,
    RdmaDevice,
    RdmaPort,
    RdmaSystem,
    pci_place,
    read_system,
)

from .fake_gpu import FakeLibrary
from .rdma_strategies import as_gid
from .rdma_trees import write_files, write_pci, write_system

Choose = Callable[..., ChosenPort]
SWITCHES = [(socket, switch) for socket in (0, 1) for switch in (0, 1)]
PEER = IPv4Address("10.9.0.1")


def on_switch(socket: int, switch: int, bus: int) -> Place:
    """The place of something behind a switch: host bridge, root port, the switch's two
    ends, the device."""
    first = 0x10 + socket * 0x80 + switch * 0x20
    bridges = [f"0000:{first + step:02x}:00.0" for step in (0, 1, 2 + bus)]
    return Place((f"pci0000:{first:02x}", *bridges, address_of(socket, switch, bus)), socket)


def address_of(socket: int, switch: int, bus: int) -> str:
    return f"0000:{0x18 + socket * 0x80 + switch * 0x20 + bus:02x}:00.0"


def gpu(socket: int, switch: int, number: int) -> Place:
    return on_switch(socket, switch, number)


def cards(*, own_networks: bool = False) -> list[RdmaDevice]:
    """Two on each switch, mlx5_0 to mlx5_7: all in one network, or each in its own."""
    made = []
    for number, ((socket, switch), bus) in enumerate(itertools.product(SWITCHES, (2, 3))):
        address = IPv4Address(f"10.{number if own_networks else 9}.0.{10 + number}")
        gid = Gid(3, as_gid(address), GidKind.ROCE_V2, f"eth{number}")
        port = RdmaPort(1, Link.ETHERNET, "ACTIVE", "LinkUp", gids=(gid,))
        place = on_switch(socket, switch, bus)
        made.append(RdmaDevice(f"mlx5_{number}", (port,), place=place, verbs_node=f"/dev/infiniband/uverbs{number}"))
    return made


def machine(devices: list[RdmaDevice]) -> RdmaSystem:
    interfaces = {f"eth{number}": Interface(f"eth{number}", is_up=True) for number in range(8)}
    addresses = [gid.address for device in devices for gid in device.ports[0].gids]
    return RdmaSystem(tuple(devices), interfaces, frozenset(addresses))


def route(number: int, network: str, *, flags: int = 1) -> str:
    """A line of /proc/net/route."""
    low, mask = (
        f"{int.from_bytes(address.packed, sys.byteorder):08X}"
        for address in (IPv4Network(network).network_address, IPv4Network(network).netmask)
    )
    return f"eth{number}\t{low}\t00000000\t{flags:04X}\t0\t0\t0\t{mask}\t0\t0\t0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_system(tmp_path, machine(cards()))
    for socket, switch in SWITCHES:
        for number in (0, 1):
            write_pci(tmp_path, gpu(socket, switch, number))
    return tmp_path


@pytest.mark.parametrize(("socket", "switch"), SWITCHES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_gpu_has_the_first_card_of_its_switch(root: Path, socket: int, switch: int, number: int) -> None:
    place = pci_place(address_of(socket, switch, number), root)
    assert place == gpu(socket, switch, number)
    assert choose_port(place=place, root=root).device == f"mlx5_{4 * socket + 2 * switch}"


def test_without_a_card_on_its_switch_one_of_the_same_node_is_nearest(tmp_path: Path) -> None:
    devices = [device for device in cards() if device.name in ("mlx5_0", "mlx5_5")]
    write_system(tmp_path, machine(devices))
    assert choose_port(place=gpu(1, 1, 0), root=tmp_path).device == "mlx5_5"
    assert choose_port(place=gpu(0, 1, 0), root=tmp_path).device == "mlx5_0"


def test_the_bus_comes_before_the_node(tmp_path: Path) -> None:
    """Of some machines, the firmware says no node, or the same one of all."""
    devices = [attrs.evolve(device, place=attrs.evolve(device.place, numa_node=0)) for device in cards()]
    write_system(tmp_path, machine(devices))
    assert choose_port(place=gpu(1, 1, 0), root=tmp_path).device == "mlx5_6"


def test_of_a_machine_that_says_nothing_the_first_is_chosen_as_ever(tmp_path: Path) -> None:
    write_system(tmp_path, machine([attrs.evolve(device, place=Place()) for device in cards()]))
    assert pci_place("0000:17:00.0", tmp_path) is None
    assert choose_port(place=gpu(1, 1, 0), root=tmp_path).device == "mlx5_0"
    assert choose_port(place=Place(), root=tmp_path) == choose_port(root=tmp_path)


def test_a_server_on_a_node_prefers_a_card_there(root: Path) -> None:
    assert choose_port(place=Place(numa_node=1), root=root).device == "mlx5_4"
    assert choose_port(place=Place(numa_node=7), root=root).device == "mlx5_0"


def test_a_name_that_was_given_is_taken_wherever_it_is(root: Path) -> None:
    assert choose_port("mlx5_7", place=gpu(0, 0, 0), root=root).device == "mlx5_7"


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Each card is in a network of its own, and those of mlx5_0 and mlx5_4 lead to the
    peer."""
    write_system(tmp_path, machine(cards(own_networks=True)))
    routes = [route(number, f"10.{number}.0.0/16") for number in range(8)]
    routes += [route(number, "10.9.0.0/16", flags=3) for number in (0, 4)]
    routes += [route(6, "10.9.0.0/16", flags=0x201), "a line of another kind\n", route(6, "10.9.0.0/16", flags=0)]
    write_files(tmp_path, {"proc/net/route": "Iface\tDestination\tGateway\n" + "".join(routes)})
    return tmp_path


@pytest.mark.parametrize(("socket", "device"), [(0, "mlx5_0"), (1, "mlx5_4")])
def test_only_cards_that_reach_the_peer_are_compared(apart: Path, socket: int, device: str) -> None:
    place = gpu(socket, 1, 0)
    assert choose_port(peer=PEER, place=place, root=apart).device == device
    assert choose_port(place=place, root=apart).device == f"mlx5_{4 * socket + 2}"


def test_the_address_that_the_peer_knows_reaches_it_too(apart: Path) -> None:
    near = IPv4Address("10.5.0.15")  # of mlx5_5
    assert choose_port(near=near, place=gpu(1, 0, 0), root=apart).device == "mlx5_5"
    assert choose_port(near=near, place=gpu(0, 0, 0), root=apart).device == "mlx5_5"
    assert choose_port(near=near, peer=PEER, place=gpu(0, 0, 0), root=apart).device == "mlx5_0"


def test_without_a_gpu_the_address_decides_as_ever(apart: Path) -> None:
    near = IPv4Address("10.5.0.15")
    assert choose_port(near=near, peer=PEER, root=apart).device == "mlx5_5"
    assert choose_port(peer=PEER, root=apart).device == "mlx5_0"


def test_a_machine_without_routes_or_with_other_text_has_none(tmp_path: Path) -> None:
    assert read_system(tmp_path).routes == ()
    write_files(tmp_path, {"proc/net/route": "Iface\nx y z\neth0 G 0 1 0 0 0 H 0\neth0 1 0 1 0 0 0 123456789 0\n"})
    assert read_system(tmp_path).routes == ()


# The GPU of this process.


def test_the_driver_says_where_a_gpu_is(tmp_path: Path) -> None:
    library = FakeLibrary()
    write_pci(tmp_path, Place(("pci0000:10", "0000:1a:00.0"), 1))
    assert gpu_place(CudaDriver(library), 0, tmp_path) == Place(("pci0000:10", "0000:1a:00.0"), 1)
    assert gpu_place(CudaDriver(library), 3, tmp_path) is None
    library.pci_address = b"0000:99:00.0"  # not in this container
    assert gpu_place(CudaDriver(library), 0, tmp_path) is None
    library.pci_address = b""
    assert gpu_place(CudaDriver(library), 0, tmp_path) is None
    assert gpu_place(CudaDriver(None), 0, tmp_path) is None


@pytest.mark.parametrize(("initialized", "ordinal"), [(True, 2), (False, None)])
def test_a_process_that_does_not_use_cuda_yet_does_not_begin(
    initialized: bool, ordinal: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current_device() -> int:
        assert initialized
        return 2

    cuda: Any = SimpleNamespace(is_initialized=lambda: initialized, current_device=current_device)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert current_gpu() == ordinal


def test_without_pytorch_there_is_no_gpu_and_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert current_gpu() is None
    assert "torch" not in sys.modules
