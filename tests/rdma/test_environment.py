"""The virtual machine with Soft-RoCE is what the other tests take it for: two devices,
and a cable between them.
"""

import subprocess
from pathlib import Path

import pytest

from infinistore.core import create_arena
from infinistore.sizes import MIB

from .conftest import DEVICES, IN_GUEST, Cable, Host

pytestmark = pytest.mark.skipif(
    not IN_GUEST, reason="about the virtual machine; TEST_RDMA=guest make test-rdma runs this"
)


def state(host: Host) -> str:
    return (DEVICES / host.device / "ports/1/state").read_text().split()[-1]


def received_packets(interface: str) -> int:
    return int((DEVICES.parent / "net" / interface / "statistics/rx_packets").read_text())


def test_there_are_two_devices_with_active_ports(hosts: tuple[Host, Host]) -> None:
    assert sorted(device.name for device in DEVICES.iterdir()) == ["rxe0", "rxe1"]
    assert [state(host) for host in hosts] == ["ACTIVE", "ACTIVE"]


@pytest.mark.nightly
def test_a_ping_pong_goes_from_one_to_the_other_over_the_cable(hosts: tuple[Host, Host]) -> None:
    before = received_packets("veth1")
    # The second tries again until the first listens, which does not say when: its
    # output goes through a full buffer.
    both = """
        ping="ibv_rc_pingpong --gid-idx=1 --iters=50 --size=4096"
        $ping --ib-dev=$1 & first=$!
        for _ in {1..50}; do $ping --ib-dev=$2 $3 && wait $first && exit; sleep 0.2; done
        kill $first; exit 1
    """
    first, second = hosts
    arguments = ["/bin/bash", "-c", both, "-", first.device, second.device, first.address]
    client = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)

    assert client.stdout.count("50 iters") == 2
    assert received_packets("veth1") - before >= 50


@pytest.mark.nightly
def test_a_cable_that_is_pulled_takes_both_ports_down_until_it_is_put_back(cable: Cable) -> None:
    cable.pull()
    assert [state(host) for host in cable.hosts] == ["DOWN", "DOWN"]
    cable.put_back()
    assert [state(host) for host in cable.hosts] == ["ACTIVE", "ACTIVE"]


def huge_bytes() -> int:
    """How much shared memory is in huge pages, in all."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("ShmemHugePages:"))


def test_an_arena_is_all_in_huge_pages_on_the_distributions_own_kernel_too() -> None:
    before = huge_bytes()
    arena = create_arena(0, 64 * MIB, prefault_threads=1)
    assert huge_bytes() - before == 64 * MIB
    arena.close()
