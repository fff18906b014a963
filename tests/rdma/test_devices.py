"""Devices and GIDs as they are read from a kernel that has some, and chosen while
addresses and cables come and go.
"""

import re
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from infinistore.transports.rdma.choice import NoRdma, PortNotActive, choose_port
from infinistore.transports.rdma.devices import read_system, there_is_rdma

from .conftest import IN_GUEST, Cable, Host

only_in_guest = pytest.mark.skipif(not IN_GUEST, reason="changes the network: TEST_RDMA=guest make test-rdma")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def test_what_is_read_is_what_libibverbs_says(hosts: tuple[Host, Host]) -> None:
    assert there_is_rdma()
    devices = {device.name: device for device in read_system().devices}
    for host in set(hosts):
        told = subprocess.run(["ibv_devinfo", "-v", "-d", host.device], stdout=subprocess.PIPE, text=True, check=True)
        port = devices[host.device].ports[0]
        assert port.link is not None
        assert re.findall(r"link_layer:\s*(\S+)", told.stdout)[0] == port.link.value
        assert re.findall(r"state:\s*PORT_(\S+)", told.stdout)[0] == port.state
        assert int(re.findall(r"port_lid:\s*(\d+)", told.stdout)[0]) == port.lid
        gids = {int(index): value for index, value in re.findall(r"GID\[\s*(\d+)\]:\s*([0-9a-f:.]+)", told.stdout)}
        assert {gid.index: gid.value for gid in port.gids} == {
            index: ip_address(value.rstrip(",")) for index, value in gids.items()
        }


def test_a_device_of_this_machine_is_chosen(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        chosen = choose_port(host.device)
        assert chosen.device == host.device
        assert int(chosen.gid, 16)


@only_in_guest
def test_each_end_is_chosen_by_its_address(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        chosen = choose_port(near=ip_address(host.address))
        assert (chosen.device, chosen.gid_index) == (host.device, 1)
        assert f"RoCE v2, {host.address} on veth" in chosen.reason


def test_a_pulled_cable_is_an_error_until_it_is_put_back(cable: Cable) -> None:
    before = [choose_port(host.device) for host in cable.hosts]

    cable.pull()
    for host in cable.hosts:
        with pytest.raises(PortNotActive, match=f"{host.device} is DOWN; look at its network interface"):
            choose_port(host.device)
    cable.put_back()

    # Its IPv6 addresses come back when nobody else turned out to have them, so that the
    # reason may be shorter now.
    assert [(port.device, port.gid_index, port.gid) for port in map(choose_port, ("rxe0", "rxe1"))] == [
        (port.device, port.gid_index, port.gid) for port in before
    ]


@pytest.fixture
def another_address() -> Iterator[str]:
    """A second address of the first end, that is gone afterwards."""
    ip("addr", "add", "10.78.0.1/24", "dev", "veth0")
    yield "10.78.0.1"
    subprocess.run(["ip", "addr", "del", "10.78.0.1/24", "dev", "veth0"], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.nightly
@only_in_guest
def test_an_address_that_comes_can_be_asked_for_and_one_that_went_cannot(another_address: str) -> None:
    near = ip_address(another_address)
    subprocess.run(
        ["/bin/bash", "-c", "until grep -q ffff:0a4e:0001 /sys/class/infiniband/rxe0/ports/1/gids/2; do :; done"],
        check=True,
    )
    assert choose_port("rxe0", near=near).gid_index == 2
    assert choose_port("rxe0", hint_gid_index=2).gid_index == 2

    ip("addr", "del", f"{another_address}/24", "dev", "veth0")
    chosen = choose_port("rxe0", hint_gid_index=2, near=near)
    assert chosen.gid_index == 1
    assert "not GID 2 as --hint-gid-index says" in chosen.reason


def test_a_name_that_no_device_has_lists_those_that_exist(hosts: tuple[Host, Host]) -> None:
    with pytest.raises(NoRdma, match=hosts[0].device):
        choose_port("mlx5_77")
