"""What the tests on RDMA devices share. They skip, with the reason, where there is no
device with an active port.

`make test-rdma` brings a virtual machine with two Soft-RoCE devices, like two hosts
with a cable between them, and sets INFINISTORE_TEST_REQUIRE_RDMA, so that a test that
finds no RDMA fails instead of skipping. On a machine with devices of its own the tests
use the first active one as both ends, and those that pull the cable skip.

Python is 12 to 17 times slower in the virtual machine unless it has KVM.
INFINISTORE_TEST_SLOWDOWN says so; `patience` turns a time meant for a usual machine
into one that will do here, and the time limit of each test grows by it.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, settings

SLOWDOWN = float(os.environ.get("INFINISTORE_TEST_SLOWDOWN", "1"))
IN_GUEST = os.environ.get("INFINISTORE_RDMA_GUEST") == "1"
REQUIRED = os.environ.get("INFINISTORE_TEST_REQUIRE_RDMA") == "1"
DEVICES = Path("/sys/class/infiniband")
TEST_LIMIT_S = 120

if SLOWDOWN > 1:
    settings.register_profile(
        "rdma-guest",
        settings.get_profile("repeatable"),
        max_examples=20,
        stateful_step_count=20,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("rdma-guest")


@attrs.frozen
class Host:
    """One end of the cable."""

    device: str
    address: str
    """IPv4; a server that listens there is reached by the other end over the cable,
    too.
    """


@attrs.frozen
class Cable:
    """The cable between the hosts of the virtual machine. Pulled, both ports are down;
    put back, both are active.
    """

    hosts: tuple[Host, Host]

    def pull(self) -> None:
        """End 1 goes down; end 0 sees that the link is gone."""
        _ip("link", "set", "veth1", "down")

    def put_back(self) -> None:
        """Connect again, and return when both ports are active and have their GIDs."""
        _ip("link", "set", "veth1", "up")
        # The kernel drops an interface's routes when it goes down.
        _ip("route", "replace", "10.77.0.1", "dev", "veth1", "src", "10.77.0.2", "table", "1002")
        for host in self.hosts:
            subprocess.run(["/bin/bash", "-c", _WAIT, "-", host.device], check=True)


# The port is active a moment after the interface is; the shell's wait costs less than
# Python's in the virtual machine.
_WAIT = 'until grep -q ACTIVE "/sys/class/infiniband/$1/ports/1/state"; do sleep 0.05; done'


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _active_devices() -> list[str]:
    ports = sorted(DEVICES.glob("*/ports/*/state"))
    return [port.parts[-4] for port in ports if "ACTIVE" in port.read_text()]


def _missing() -> str | None:
    """Why tests cannot run here; None if they can."""
    if not _active_devices():
        return "no RDMA device with an active port here; `make test-rdma` brings a virtual machine that has two"
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported ({error}); `make pyverbs` says what to do"
    return None


@pytest.fixture(scope="session", autouse=True)
def rdma() -> None:
    """Skip where there is no RDMA, or fail where there must be."""
    reason = _missing()
    if reason is not None:
        if REQUIRED:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S * SLOWDOWN))


@pytest.fixture(scope="session")
def patience() -> Callable[[float], float]:
    """From a time in seconds that would do on a usual machine to one that will
    do here.
    """
    return lambda seconds: seconds * SLOWDOWN


@pytest.fixture(scope="session")
def hosts() -> tuple[Host, Host]:
    """The two ends: rxe0 and rxe1 in the virtual machine, twice the same device
    elsewhere.
    """
    if IN_GUEST:
        return Host("rxe0", "10.77.0.1"), Host("rxe1", "10.77.0.2")
    host = Host(_active_devices()[0], "127.0.0.1")
    return host, host


@pytest.fixture
def cable(hosts: tuple[Host, Host]) -> Iterator[Cable]:
    """The cable, which is put back when the test ends."""
    if not IN_GUEST:
        pytest.skip("there is no cable to pull here; TEST_RDMA=guest make test-rdma runs this")
    cable = Cable(hosts)
    yield cable
    cable.put_back()
