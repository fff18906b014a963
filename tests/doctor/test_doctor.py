"""What the doctor says of machines that are described: which lines are not good, and
which remedy they name.
"""

import os
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import attrs
import pytest

from infinistore.doctor import Finding, Level, Software, Wanted, examine, this_host, this_software, worst
from infinistore.doctor.findings import UNLIMITED, Host
from infinistore.transports.rdma.choice import NoRdma

from .machines import SOFTWARE, machine, with_memfd_problem

MELLANOX = {
    "sys/class/infiniband/mlx5_0/node_type": "1: CA\n",
    "sys/class/infiniband/mlx5_0/fw_ver": "16.35.2000\n",
    "sys/class/infiniband/mlx5_0/device/numa_node": "1\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
    "sys/class/infiniband/mlx5_0/ports/1/lid": "0x0\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/gids/0": f"{IPv6Address('fe80::a:b').exploded}\n",
    "sys/class/infiniband/mlx5_0/ports/1/gids/3": f"{IPv6Address('::ffff:10.1.0.1').exploded}\n",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/0": "IB/RoCE v1\n",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/3": "RoCE v2\n",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0": "eth9\n",
    "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3": "eth0\n",
    "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
    "dev/infiniband/uverbs0": "",
    "sys/class/net/eth0/flags": "0x1003\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/mtu": "9000\n",
    "sys/devices/system/node/node0/cpulist": "0-15\n",
    "sys/devices/system/node/node1/cpulist": "16-31\n",
    "proc/net/fib_trie": f"Local:\n   |-- {IPv4Address('10.1.0.1')}\n      /32 host LOCAL\n",
}


def diagnose(host: Host, software: Software = SOFTWARE, wanted: Wanted | None = None) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(host, software, wanted or Wanted())}


def complaints(found: dict[str, Finding]) -> set[str]:
    return {subject for subject, finding in found.items() if finding.level is not Level.GOOD}


def test_a_healthy_machine_with_rdma_has_no_complaint(tmp_path: Path) -> None:
    found = diagnose(machine(tmp_path, MELLANOX))

    assert complaints(found) == set()
    assert found["mlx5_0"].text == (
        "driver unknown, firmware 16.35.2000, /dev/infiniband/uverbs0, "
        "NUMA node 1 of 2: start a server there (--numa-node 1)"
    )
    assert found["mlx5_0 port 1"].text == "Ethernet, ACTIVE, 100 Gb/sec (4X EDR)"
    assert found["mlx5_0 port 1"].details == (
        "GID 0: RoCE v1, fe80::a:b on eth9: not usable here: is of eth9, which is in another network namespace",
        "GID 3: RoCE v2, 10.1.0.1 on eth0: a routable IPv4 address",
    )
    assert "GID 3 (RoCE v2, 10.1.0.1 on eth0)" in found["choice"].text


def test_a_machine_without_rdma_is_told_how_to_get_it_and_nothing_else(tmp_path: Path) -> None:
    found = diagnose(machine(tmp_path))
    assert complaints(found) == {"choice"}
    assert found["choice"].level is Level.WARNING
    assert "rdma link add" in found["choice"].remedy


def test_a_device_that_was_asked_for_and_is_not_there_is_bad(tmp_path: Path) -> None:
    choice = diagnose(machine(tmp_path, MELLANOX), wanted=Wanted("mlx5_7"))["choice"]
    assert (choice.level, "mlx5_0" in choice.remedy) == (Level.BAD, True)


GIGABYTE = 1 << 30
CASES: dict[str, tuple[dict[str, str], dict[str, int], str, Level, str]] = {
    "memlock": (MELLANOX, {"memlock": 8 << 20}, "memlock", Level.BAD, "LimitMEMLOCK=infinity"),
    "some memlock": (MELLANOX, {"memlock": 8 * GIGABYTE}, "memlock", Level.WARNING, "ulimit -l unlimited"),
    "small packets": (
        MELLANOX | {"sys/class/net/eth0/mtu": "1500\n"}, {}, "mlx5_0 port 1", Level.WARNING, "ip link set eth0 mtu",
    ),
    "port down": (
        MELLANOX | {"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"},
        {}, "mlx5_0 port 1", Level.WARNING, "ip link show",
    ),
    "iWARP": (
        MELLANOX | {"sys/class/infiniband/mlx5_0/node_type": "4: RNIC\n"}, {}, "mlx5_0", Level.WARNING, "RoCE",
    ),
    "closed driver": (
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550\n"},
        {}, "memory of GPUs", Level.WARNING, "modprobe nvidia-peermem",
    ),
    "open driver, old kernel": (
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570\n",
            "proc/sys/kernel/osrelease": "5.10.0-32\n",
        },
        {}, "memory of GPUs", Level.WARNING, "modprobe nvidia-peermem",
    ),
    "little memory": ({"proc/meminfo": "MemAvailable: 9 kB\n"}, {}, "room for a pool", Level.WARNING, "--prealloc"),
    "control group": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n", "sys/fs/cgroup/memory.current": "1\n"},
        {}, "room for a pool", Level.WARNING, "containers: --memory",
    ),
    "huge pages in use": (
        {"proc/meminfo": "MemAvailable: 120000000 kB\nHugePages_Total: 8\nHugePages_Free: 0\n"},
        {}, "huge pages", Level.WARNING, "vm.nr_hugepages",
    ),
    "file size": ({}, {"fsize": 1 << 20}, "file size", Level.BAD, "ulimit -f unlimited"),
    "address space": ({}, {"as": 64 * GIGABYTE}, "address space", Level.WARNING, "ulimit -v unlimited"),
    "old kernel": ({"proc/sys/kernel/osrelease": "5.10.0-32\n"}, {}, "kernel", Level.WARNING, "newer kernel"),
    "short queue": ({"proc/sys/net/core/somaxconn": "128\n"}, {}, "somaxconn", Level.WARNING, "sysctl net.core"),
    "small buffers": (
        {"proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t65536\n"}, {}, "send buffers", Level.WARNING, "tcp_wmem='4096 ",
    ),
    "slow clock": (
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        {}, "clock", Level.WARNING, "echo tsc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_wrong_is_said_with_its_remedy(
    case: tuple[dict[str, str], dict[str, int], str, Level, str], tmp_path: Path
) -> None:
    files, limits, subject, level, remedy = case
    finding = diagnose(machine(tmp_path, files, **limits))[subject]
    assert finding.level is level, finding
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("hard", "level"), [(UNLIMITED, Level.GOOD), (1 << 20, Level.GOOD), (1024, Level.WARNING), (16, Level.BAD)]
)
def test_descriptors_are_judged_by_the_limit_that_a_server_can_raise_its_own_to(
    hard: int, level: Level, tmp_path: Path
) -> None:
    host = machine(tmp_path)
    finding = diagnose(attrs.evolve(host, limits=dict(host.limits) | {"nofile": (16, hard)}))["file descriptors"]
    assert finding.level is level
    assert ("LimitNOFILE=" in finding.remedy) == (level is not Level.GOOD)


def test_a_graphics_driver_that_exports_memory_is_good(tmp_path: Path) -> None:
    opened = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570\n"}
    finding = diagnose(machine(tmp_path / "opened", opened))["memory of GPUs"]
    assert (finding.level, "as a dmabuf" in finding.text, "peermem" in finding.text) == (Level.GOOD, True, False)
    module = {"sys/module/nvidia_peermem/refcnt": "0\n"}
    finding = diagnose(machine(tmp_path / "loaded", {"proc/driver/nvidia/version": "NVIDIA\n"} | module))[
        "memory of GPUs"
    ]
    assert (finding.level, "dmabuf" in finding.text, "by nvidia-peermem" in finding.text) == (Level.GOOD, False, True)
    both = diagnose(machine(tmp_path / "both", opened | module))["memory of GPUs"].text
    assert "exports, and by nvidia-peermem" in both


def test_who_may_lock_all_memory_needs_no_limit(tmp_path: Path) -> None:
    root = MELLANOX | {"proc/self/status": "CapEff:\t000001ffffffffff\n"}
    assert "CAP_IPC_LOCK" in diagnose(machine(tmp_path, root, memlock=1 << 16))["memlock"].text


def test_a_system_that_refuses_shared_memory_is_bad(tmp_path: Path) -> None:
    refusing = machine(tmp_path, {"proc/sys/vm/memfd_noexec": "2\n"})
    finding = diagnose(with_memfd_problem(refusing, "memfd_create: Permission denied"))["shared memory"]
    assert (finding.level, "vm.memfd_noexec=1" in finding.remedy) == (Level.BAD, True)


def test_a_folder_for_sockets_that_others_may_enter_is_bad(tmp_path: Path) -> None:
    host = machine(tmp_path)
    assert "will be made" in diagnose(host)["socket for shared memory"].text
    host.socket_folder.mkdir(mode=0o700)
    assert complaints(diagnose(host)) == {"choice"}
    host.socket_folder.chmod(0o755)
    finding = diagnose(host)["socket for shared memory"]
    assert (finding.level, "chmod 700" in finding.remedy) == (Level.BAD, True)


def test_packages_that_are_missing_or_old_are_bad(tmp_path: Path) -> None:
    software = attrs.evolve(SOFTWARE, version_of={"trio": "0.9"}.get)
    finding = diagnose(machine(tmp_path), software)["packages"]
    assert finding.text == "missing: attrs; too old: trio 0.9 (needs 0.25)"
    assert finding.level is Level.BAD
    assert finding.remedy == "/opt/venv/bin/python -m pip install 'trio>=0.25' 'attrs>=23.2'"


def test_pyverbs_is_missed_only_where_there_is_a_device(tmp_path: Path) -> None:
    def missing() -> str:
        raise NoRdma("pyverbs cannot be imported", "apt-get install python3-pyverbs")

    software = attrs.evolve(SOFTWARE, pyverbs=missing)
    assert diagnose(machine(tmp_path / "without"), software)["pyverbs"].level is Level.GOOD
    finding = diagnose(machine(tmp_path / "with", MELLANOX), software)["pyverbs"]
    assert (finding.level, finding.remedy) == (Level.WARNING, "apt-get install python3-pyverbs")


def test_jemalloc_that_cannot_be_loaded_names_its_package(tmp_path: Path) -> None:
    problem = "the jemalloc allocator needs libjemalloc.so.2: install the package libjemalloc2"
    finding = diagnose(machine(tmp_path), attrs.evolve(SOFTWARE, try_jemalloc=lambda: problem))["jemalloc"]
    assert (finding.level, finding.remedy) == (Level.WARNING, "install the package libjemalloc2")


def test_an_empty_root_and_tight_limits_are_looked_at_without_an_error(tmp_path: Path) -> None:
    limits = dict.fromkeys(("memlock", "nofile", "fsize", "as"), (0, 0))
    found = diagnose(Host(tmp_path / "nothing", limits, lambda: "refused", tmp_path / "run"))
    assert worst(found.values()) is Level.BAD
    assert all(finding.remedy for finding in found.values() if finding.level is not Level.GOOD)


@pytest.mark.process
def test_this_machine_is_looked_at_without_changing_it(tmp_path: Path) -> None:
    found = diagnose(this_host(tmp_path / "run"), this_software())
    assert found["shared memory"].level is Level.GOOD
    assert found["packages"].level is Level.GOOD
    assert os.listdir(tmp_path) == []
    assert this_host(tmp_path).limits["fsize"][1] == UNLIMITED or found["file size"].level is not Level.GOOD
