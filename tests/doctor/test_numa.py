"""What the doctor says of a machine with several NUMA nodes: what is on which, and
where running servers are.
"""

from ipaddress import IPv4Address
from pathlib import Path

from infinistore.doctor import Finding, Level, Wanted
from infinistore.doctor.machine import examine_numa
from infinistore.doctor.rdma import examine_rdma
from infinistore.transports.rdma.devices import Gid, GidKind, Interface, Link, Place, RdmaDevice, RdmaPort, RdmaSystem
from tests.transports.rdma_strategies import as_gid
from tests.transports.rdma_trees import write_pci, write_system

from .machines import machine

KIB_OF_64_GIB = 64 * 1024 * 1024
NODES = {
    f"sys/devices/system/node/node{node}/{name}": text
    for node, cores in ((0, "0-7"), (1, "8-15"))
    for name, text in (
        ("cpulist", f"{cores}\n"),
        ("meminfo", f"Node {node} MemTotal:       {KIB_OF_64_GIB} kB\nNode {node} MemFree: {1024 * 1024} kB\n"),
    )
}
DEVICES = {
    "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
    "sys/class/infiniband/rxe0/node_type": "1: CA\n",
    "sys/bus/pci/devices/0000:17:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:17:00.0/vendor": "0x10de\n",
    "sys/bus/pci/devices/0000:17:00.0/numa_node": "0\n",
    "sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",  # of a mainboard: for a screen
    "sys/bus/pci/devices/0000:00:02.0/vendor": "0x1a03\n",
    "sys/bus/pci/devices/0000:00:02.0/numa_node": "0\n",
}


def server(number: int, cores: str, *maps: str) -> dict[str, str]:
    """The files of a process that has a pool."""
    return {
        f"proc/{number}/cmdline": "/opt/venv/bin/python\0-m\0infinistore\0serve\0",
        f"proc/{number}/status": f"Name:\tpython\nCpus_allowed_list:\t{cores}\n",
        f"proc/{number}/numa_maps": "".join(f"{line}\n" for line in ("7f00 default heap anon=9 N0=9", *maps)),
    }


def arena(pages: str, *, kib: int = 4) -> str:
    return rf"7f01 prefer:1 file=/memfd:infinistore-arena-0\040(deleted) dirty=9 {pages} kernelpagesize_kB={kib}"


def examined(root: Path, *files: dict[str, str]) -> dict[str, Finding]:
    together = {name: text for part in files for name, text in part.items()}
    return {finding.subject: finding for finding in examine_numa(machine(root, together))}


def test_each_node_has_a_line_with_what_is_on_it(tmp_path: Path) -> None:
    found = examined(tmp_path, NODES, DEVICES)
    assert {subject: finding.text for subject, finding in found.items()} == {
        "node 0": "cores 0-7, 64 GiB of memory, 1 GiB free, GPU 0000:17:00.0",
        "node 1": "cores 8-15, 64 GiB of memory, 1 GiB free, mlx5_0",
    }


def test_a_server_on_one_node_is_good(tmp_path: Path) -> None:
    found = examined(tmp_path, NODES, server(123, "8-15", arena("N1=256")))["process 123"]
    assert (found.level, found.text) == (Level.GOOD, "threads on node 1; pool: 1 MiB on node 1")


def test_a_server_on_all_nodes_is_told_of_the_setting(tmp_path: Path) -> None:
    found = examined(tmp_path, NODES, server(123, "0-15", arena("N0=128 N1=384"), arena("N1=1", kib=2048)))
    assert found["process 123"].level is Level.WARNING
    assert found["process 123"].text == "threads on node 0, 1; pool: 512 KiB on node 0 and 3.5 MiB on node 1"
    assert "--numa-node N, such as 1," in found["process 123"].remedy


def test_a_pool_that_its_node_had_no_room_for_is_told(tmp_path: Path) -> None:
    found = examined(tmp_path, NODES, server(123, "0-7", arena("N0=128 N1=128")))["process 123"]
    assert (found.level, found.remedy) == (
        Level.WARNING,
        "free memory on node 0, or use a smaller pool, and restart it",
    )


def test_of_several_rdma_devices_the_one_nearest_to_each_gpu_is_named(tmp_path: Path) -> None:
    addresses = [IPv4Address("10.1.0.1"), IPv4Address("10.2.0.1")]
    gids = [Gid(0, as_gid(address), GidKind.ROCE_V2, f"eth{number}") for number, address in enumerate(addresses)]
    devices = [
        RdmaDevice(
            f"mlx5_{number}",
            (RdmaPort(1, Link.ETHERNET, "ACTIVE", "LinkUp", gids=(gid,)),),
            place=Place((f"pci0000:{number}0", f"0000:{number}1:00.0"), number),
            verbs_node=f"/dev/infiniband/uverbs{number}",
        )
        for number, gid in enumerate(gids)
    ]
    interfaces = {f"eth{number}": Interface(f"eth{number}", is_up=True) for number in (0, 1)}
    write_system(tmp_path, RdmaSystem(tuple(devices), interfaces, frozenset(addresses)))
    write_pci(tmp_path, Place(("pci0000:10", "0000:1a:00.0"), 1))
    host = machine(tmp_path, {"sys/bus/pci/devices/0000:1a:00.0/class": "0x030200\n"})

    def nearest(wanted: Wanted) -> list[str]:
        found = examine_rdma(host, wanted, lambda: "44.0")
        return [finding.text for finding in found if finding.subject == "GPU 0000:1a:00.0"]

    assert nearest(Wanted()) == ["mlx5_1 port 1 is nearest"]
    assert nearest(Wanted("mlx5_0")) == []


def test_other_processes_and_those_of_other_users_are_left_out(tmp_path: Path) -> None:
    hidden = {name: text for name, text in server(5, "0-15").items() if "numa_maps" not in name}
    other = server(6, "0-15", arena("N0=1")) | {"proc/6/cmdline": "sleep\0"}
    assert set(examined(tmp_path, NODES, hidden, other, server(7, "0-15"))) == {"node 0", "node 1"}


def test_with_one_node_there_is_nothing_to_choose(tmp_path: Path) -> None:
    one = {name: text for name, text in NODES.items() if "node0" in name}
    assert set(examined(tmp_path, one, server(123, "0-7", arena("N0=1")))) == {"node 0"}


def test_a_kernel_without_nodes_says_so(tmp_path: Path) -> None:
    assert "--numa-node cannot be used" in examined(tmp_path)["nodes"].text


def test_files_with_nonsense_are_left_out(tmp_path: Path) -> None:
    odd = {"sys/devices/system/node/node2/cpulist": "x-\n", "sys/devices/system/node/node3/meminfo": "-\n"}
    bad = server(8, "what", arena("N0=1"))
    assert "node 2" not in examined(tmp_path, NODES, odd, bad)
