"""What `infinistore doctor --rdma-loopback` says of devices that are made of memory
copies: what works is measured, and what does not has one line with a remedy.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from infinistore.doctor import Finding, Level
from infinistore.doctor.loopback import (
    Loopback,
    LoopbackTools,
    NoPerftest,
    examine_loopback,
    perftest_bandwidth,
    perftest_command,
)
from infinistore.sizes import GIB, MIB
from infinistore.transports.cuda import DeviceMemory
from infinistore.transports.rdma.choice import ChosenPort, NoRdma
from infinistore.transports.rdma.verbs import DeviceLimits
from tests.transports.fake_rdma import LOCAL_ACCESS, RETRIES, Fabric, FakeQueue, fabric_in_use

TICK_S = 1 / 1024


async def no_perftest() -> float:
    raise NoPerftest("perftest is not installed (apt-get install perftest)")


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with fabric_in_use(DeviceLimits(depth=64, longest_bytes=MIB)) as fabric:
        yield fabric


async def examine(fabric: Fabric, **tools: Any) -> tuple[dict[str, Finding], Loopback | None]:
    """Examine with a clock that goes on by a tick whenever somebody looks at it."""
    ticks = count()
    usual: dict[str, Any] = {
        "open_device": lambda: fabric.open("mlx5_0"),
        "write_bandwidth": no_perftest,
        "gpu_memory": lambda: None,
        "clock": lambda: next(ticks) * TICK_S,
    }
    findings, measured = await examine_loopback(LoopbackTools(**usual | tools), seconds=4 * TICK_S, limit_s=60)
    assert {finding.topic for finding in findings} == {"RDMA loopback"}
    assert all(bool(finding.remedy) is (finding.level is not Level.GOOD) for finding in findings)
    return {finding.subject: finding for finding in findings}, measured


async def test_a_device_that_works_is_measured_and_nothing_of_it_is_left_open(fabric: Fabric) -> None:
    found, measured = await examine(fabric)

    assert list(found) == ["device", "memory", "queue pair", "bytes", "bandwidth", "ib_write_bw"]
    assert {finding.level for finding in found.values()} == {Level.GOOD}
    assert measured is not None
    assert (measured.port, measured.mtu_bytes) == ("mlx5_0 port 1", 1024)
    # The clock is looked at once for each transfer, of as many times 8 MiB as fit.
    assert measured.write_bytes_per_s == pytest.approx(8 * MIB / TICK_S)
    assert measured.read_bytes_per_s == pytest.approx(4 * 8 * MIB / TICK_S)
    assert measured.write_p50_us == pytest.approx(TICK_S * 1e6)
    assert measured.register_s_per_gib == pytest.approx(TICK_S * GIB / (8 * MIB))
    assert measured.ib_write_bw_bytes_per_s is None
    assert found["ib_write_bw"].text == "not compared: perftest is not installed (apt-get install perftest)"
    assert "in packets of 1 KiB" in found["queue pair"].text


@pytest.mark.parametrize(("share", "level"), [(0.5, Level.WARNING), (0.9, Level.GOOD), (2.0, Level.GOOD)])
async def test_the_rate_is_given_by_that_of_ib_write_bw_in_the_same_run(
    fabric: Fabric, share: float, level: Level
) -> None:
    rates = iter([1.0, 8 * MIB / TICK_S / share, 1e15])  # the median counts

    async def write_bandwidth() -> float:
        return next(rates)

    found, measured = await examine(fabric, write_bandwidth=write_bandwidth)
    assert measured is not None
    assert measured.ib_write_bw_bytes_per_s == pytest.approx(8 * MIB / TICK_S / share)
    assert found["ib_write_bw"].level is level
    assert f"reaches {share:.2f} of it" in found["ib_write_bw"].text


def refusing(**settings: Any) -> Callable[[Fabric], None]:
    def refuse(fabric: Fabric) -> None:
        for name, value in settings.items():
            setattr(fabric, name, value)

    return refuse


@pytest.mark.parametrize(
    ("goes_wrong", "subject", "text", "remedy"),
    [
        (refusing(absent="this machine has no RDMA device"), "device", "has no RDMA device", "docs/rdma.md"),
        (refusing(refuses_to_register=True), "memory", "no more memory may be pinned", "LimitMEMLOCK=infinity"),
        (refusing(refuses_queues=True), "queue pair", "has no more queue pairs", "--hint-gid-index"),
        (refusing(refuses_to_connect=True), "queue pair", "refuses these parameters", "--hint-gid-index"),
        (refusing(unplugged=True), "bytes", "the peer does not answer", "look at the cable"),
        (lambda fabric: fabric.statuses.append(LOCAL_ACCESS), "bytes", "local access error", "dmesg"),
        (lambda fabric: fabric.statuses.extend([0] * 200 + [RETRIES]), "bytes", "does not answer", "dmesg"),
        (lambda fabric: fabric.statuses.extend([0] * 400 + [RETRIES]), "bandwidth", "does not answer", "dmesg"),
    ],
)
async def test_what_goes_wrong_is_one_line_with_a_remedy_and_the_last(
    fabric: Fabric, goes_wrong: Callable[[Fabric], None], subject: str, text: str, remedy: str
) -> None:
    goes_wrong(fabric)
    found, measured = await examine(fabric)
    assert measured is None
    assert list(found)[-1] == subject
    assert [name for name, finding in found.items() if finding.level is not Level.GOOD] == [subject]
    assert found[subject].level is Level.BAD
    assert text in found[subject].text
    assert remedy in found[subject].remedy


@pytest.mark.parametrize(("nth", "how"), [(1, "written"), (2, "read back")])
async def test_bytes_that_arrive_changed_are_found(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, nth: int, how: str
) -> None:
    whole_post, posts = FakeQueue.post, count(1)

    def post(self: FakeQueue, operation: Any, pieces: Any, batch: int) -> None:
        if next(posts) == nth:  # the last byte does not go
            pieces = [*pieces[:-1], (*pieces[-1][:4], pieces[-1][4] - 1)]
        whole_post(self, operation, pieces, batch)

    monkeypatch.setattr(FakeQueue, "post", post)
    found, measured = await examine(fabric)
    assert measured is None
    assert (found["bytes"].level, f"that were {how} are not what was sent" in found["bytes"].text) == (Level.BAD, True)
    assert "do not use this device" in found["bytes"].remedy


async def test_a_transfer_that_does_not_end_is_given_up(fabric: Fabric, autojump_clock: Any) -> None:
    fabric.held = True
    found, _ = await examine(fabric)
    assert found["bytes"].text == "RDMA over mlx5_0 port 1: not done after 60 s"


PERFTEST = """
 local address: LID 0000 QPN 0x0014 PSN 0x4d39e0 RKey 0x0005e5 VAddr 0x0055a541388000
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      144              0.00               8.94   \t\t   0.000143
"""


class TestPerftest:
    def test_its_average_is_read_in_bytes_a_second(self) -> None:
        assert perftest_bandwidth(PERFTEST) == 8.94 * MIB
        assert perftest_bandwidth(PERFTEST.replace("8.94", "0.00")) is None  # nothing was done in a second
        assert perftest_bandwidth("Couldn't connect to 127.0.0.1:18515") is None

    def test_it_uses_the_port_and_the_gid_that_were_chosen(self) -> None:
        port = ChosenPort("mlx5_1", 2, "Ethernet", 0, "0" * 32, 3, "")
        listening = perftest_command(port, 4791)
        assert " ".join(listening).startswith("ib_write_bw -d mlx5_1 -i 2 -p 4791 -F -s 65536 ")
        assert listening[-2:] == ["-x", "3"]
        assert "-x" not in perftest_command(ChosenPort("mlx5_1", 2, "InfiniBand", 7, "0" * 32, 0, ""), 4791)

    def test_two_hosts_compare_medians_of_the_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
        report = import_module("rdma_pair").report
        paths = [{"put_bytes_per_s": put * 1e9, "get_bytes_per_s": 8e9} for put in (1.0, 6.0, 7.0)]
        assert report(paths, [10e9, 1e9, 12e9]).endswith("ib_write_bw: 10,000 MB/s; put / it 0.60, get / it 0.80")
        assert "apt-get install perftest" in report(paths, [])


class TestGpu:
    @staticmethod
    def memory(fabric: Fabric) -> tuple[DeviceMemory, Any]:
        pytest.importorskip("torch")
        from tests.transports.fake_gpu import FakeGpu

        gpu = FakeGpu(fabric, 4 * MIB)
        tensor = gpu.tensor(MIB)
        return DeviceMemory(tensor.data_ptr(), MIB, 0, tensor), gpu

    async def test_both_ways_to_its_memory_are_tried(self, fabric: Fabric) -> None:
        memory, gpu = self.memory(fabric)
        found, measured = await examine(fabric, gpu_memory=lambda: (memory, gpu))
        assert measured is not None
        assert found["memory of GPUs"].text == "cuda:0 is reached as a dmabuf and as peer memory"
        assert gpu.open_dmabufs == 0

    async def test_the_way_that_does_not_work_is_named_and_the_other_one_is_enough(self, fabric: Fabric) -> None:
        fabric.refuses_dmabufs = True
        memory, gpu = self.memory(fabric)
        found, _ = await examine(fabric, gpu_memory=lambda: (memory, gpu))
        assert (found["memory of GPUs"].level, found["memory of GPUs"].text) == (
            Level.GOOD, "cuda:0 is reached as peer memory"
        )  # fmt: skip
        assert "as a dmabuf: mlx5_0 does not register a dmabuf" in found["memory of GPUs"].details[0]

    async def test_memory_that_cannot_be_reached_is_a_warning(
        self, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory, gpu = self.memory(fabric)

        opened = fabric.open("mlx5_0")
        register_any = opened.register

        def register(address: int, length: int, **how: Any) -> Any:
            if address == memory.address:
                raise NoRdma("Bad address")
            return register_any(address, length, **how)

        monkeypatch.setattr(opened, "register", register)
        fabric.refuses_dmabufs = True
        found, measured = await examine(fabric, open_device=lambda: opened, gpu_memory=lambda: (memory, gpu))
        assert measured is not None
        assert found["memory of GPUs"].level is Level.WARNING
        assert "nvidia-peermem" in found["memory of GPUs"].remedy
        assert [line.partition(":")[0] for line in found["memory of GPUs"].details] == ["as a dmabuf", "as peer memory"]

    async def test_a_gpu_that_this_python_cannot_use_is_said_so(self, fabric: Fabric) -> None:
        found, measured = await examine(fabric, gpu_memory=lambda: "PyTorch finds no GPU")
        assert measured is not None
        assert found["memory of GPUs"].text == "not tried: PyTorch finds no GPU"
