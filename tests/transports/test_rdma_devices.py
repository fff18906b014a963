"""RDMA devices as they are read from the kernel's files."""

import tempfile
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.transports.rdma.devices import (
    Gid,
    GidKind,
    Interface,
    Link,
    RdmaDevice,
    RdmaPort,
    RdmaSystem,
    natural,
    read_system,
    roce_mtu_bytes,
    there_is_rdma,
)

from . import rdma_trees
from .rdma_strategies import systems


def test_a_machine_without_rdma_is_an_empty_system(tmp_path: Path) -> None:
    assert read_system(tmp_path) == RdmaSystem()
    assert not there_is_rdma(tmp_path)


def test_soft_roce_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    rdma_trees.write_files(tmp_path, rdma_trees.RXE_IN_THE_GUEST)

    system = read_system(tmp_path)

    own = Gid(0, IPv6Address("fe80::e00a:2aff:fe59:aa2"), GidKind.ROCE_V2, "veth0")
    ipv4 = Gid(1, IPv6Address("::ffff:10.77.0.1"), GidKind.ROCE_V2, "veth0")
    port = RdmaPort(1, Link.ETHERNET, "ACTIVE", "LinkUp", rate="10 Gb/sec (1X FDR10)", gids=(own, ipv4))
    assert system.devices == (
        RdmaDevice("rxe0", (port,), is_software=True, verbs_node="/dev/infiniband/uverbs0", may_open=True),
    )
    assert system.interfaces == {"veth0": Interface("veth0", is_up=True, mtu_bytes=9000)}
    addresses = ("10.77.0.1", "127.0.0.1", "::1", "fe80::e00a:2aff:fe59:aa2")
    assert system.addresses == frozenset(map(ip_address, addresses))
    assert ipv4.address == IPv4Address("10.77.0.1")
    assert ipv4.digits == "00000000000000000000ffff0a4d0001"
    assert there_is_rdma(tmp_path)


@settings(max_examples=25)  # each writes some hundred files
@given(systems())
def test_what_the_kernel_shows_is_what_is_read(system: RdmaSystem) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert read_system(rdma_trees.write_system(Path(folder), system)) == system


def test_an_entry_that_goes_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    rdma_trees.write_files(tmp_path, rdma_trees.RXE_IN_THE_GUEST)
    (tmp_path / "sys/class/infiniband/rxe0/ports/1/gid_attrs/types/0").unlink()

    (device,) = read_system(tmp_path).devices

    assert [gid.index for gid in device.ports[0].gids] == [1]


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(sorted(rdma_trees.RXE_IN_THE_GUEST)), st.text("0123456789abcx:. |-/\n", max_size=60)
    )
)
def test_files_with_anything_in_them_are_read_without_an_error(changed: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        read_system(rdma_trees.write_files(Path(folder), rdma_trees.RXE_IN_THE_GUEST | changed))


@pytest.mark.parametrize(
    ("interface", "expected"), [(1500, 1024), (4096, 2048), (4192, 4096), (9000, 4096), (100, 256)]
)
def test_the_mtu_of_roce_is_what_fits_beside_its_headers(interface: int, expected: int) -> None:
    assert roce_mtu_bytes(interface) == expected


def test_names_are_sorted_by_their_numbers() -> None:
    assert sorted(["mlx5_10", "rxe0", "mlx5_2"], key=natural) == ["mlx5_2", "mlx5_10", "rxe0"]
