"""`infinistore doctor --rdma-loopback`: moves bytes with a card, from this machine to
itself.

What the kernel says of a card does not tell whether it works: so this opens the chosen
port, registers memory, connects a queue pair to another one of the same port, writes
and reads, and compares every byte. It measures what the port moves, and the same with
`ib_write_bw` of the package perftest, in turns. If there is a GPU, it registers some of
its memory in both ways and moves bytes there and back.

Bytes that a port sends to itself cross the bus to the card twice and never leave it: so
this says nothing of cables and switches.
"""

import mmap
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import attrs
import trio

from infinistore.doctor.findings import Finding, Host, bad, good, warning
from infinistore.errors import TransferFailed
from infinistore.sizes import GIB, KIB, MIB, in_units
from infinistore.transports import cuda
from infinistore.transports.rdma import ibverbs
from infinistore.transports.rdma.choice import ChosenPort, NoRdma, Wanted, choose_port
from infinistore.transports.rdma.memory import address_of
from infinistore.transports.rdma.plan import Placement, plan_transfer
from infinistore.transports.rdma.requester import Requester
from infinistore.transports.rdma.verbs import Device, Operation, Region

_TOPIC: Final = "RDMA loopback"
_SPAN_BYTES: Final = 8 * MIB
_MESSAGE_BYTES: Final = 64 * KIB
_GPU_BYTES: Final = MIB
_MOST_TIMES: Final = 16
"""One transfer moves the memory so often, if that takes no longer than a figure may."""
_SMALL_BYTES: Final = 8
_SMALL_CALLS: Final = 101
_ROUNDS: Final = 3
_DEAD_AFTER_S: Final = 1.0
_AS_WELL: Final = 0.8
"""Of what ib_write_bw moves; less is worth a warning."""
_ODD = (4097, 63)
"""A length and an offset that fit no page, packet or cache line."""


@attrs.frozen
class Loopback:
    """What was measured. Rates are bytes a second, with messages of 64 KiB."""

    port: str
    mtu_bytes: int
    register_s_per_gib: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    write_p50_us: float
    """Of one write of 8 bytes, from posting it to its completion."""
    ib_write_bw_bytes_per_s: float | None
    """None without perftest."""


class NoPerftest(Exception):
    """`ib_write_bw` is not installed, or does not work; the text says which."""


GpuMemory = tuple[cuda.DeviceMemory, cuda.CudaDriver]


@attrs.frozen
class LoopbackTools:
    """This machine's, or those of a test."""

    open_device: Callable[[], Device]
    """Raises NoRdma."""
    write_bandwidth: Callable[[], Awaitable[float]]
    """Bytes a second by `ib_write_bw`, over the same port. Raises NoPerftest."""
    gpu_memory: Callable[[], GpuMemory | str | None]
    """Some memory of a GPU; why there is none; or None, without a GPU."""
    clock: Callable[[], float] = time.perf_counter


def tools_of(host: Host, wanted: Wanted) -> LoopbackTools:
    """Return those of this machine."""
    port = (wanted.dev_name, wanted.ib_port, wanted.link_type, wanted.hint_gid_index)
    return LoopbackTools(
        lambda: ibverbs.open_device(*port),
        lambda: _write_bandwidth(*port),
        lambda: _gpu_memory() if host.text("proc/driver/nvidia/version") else None,
    )


class _Failed(Exception):
    """A step failed, and none can follow."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


async def examine_loopback(
    tools: LoopbackTools, *, seconds: float, limit_s: float
) -> tuple[list[Finding], Loopback | None]:
    """Return the findings, and what was measured if everything worked.

    Each figure takes `seconds`, and each transfer at most `limit_s`.
    """
    findings: list[Finding] = []
    try:
        device = tools.open_device()
    except NoRdma as error:
        remedy = error.remedy or "see docs/rdma.md, and the lines on RDMA above"
        return [bad(_TOPIC, "device", error.problem, remedy)], None
    measured = None
    try:
        findings.append(good(_TOPIC, "device", f"{device.place} can be opened: {device.reason}"))
        measured = await _examine(device, tools, findings, seconds, limit_s)
    except _Failed as failed:
        findings.append(failed.finding)
    finally:
        device.close()
    return findings, measured


async def _examine(
    device: Device, tools: LoopbackTools, findings: list[Finding], seconds: float, limit_s: float
) -> Loopback:
    source, target = (_Span(device, tools.clock) for _ in range(2))
    register_s = (source.register_s + target.register_s) / (2 * _SPAN_BYTES) * GIB
    findings.append(good(_TOPIC, "memory", f"can be registered, {register_s:.2f} s a GiB"))
    ends = _Ends(device, limit_s)
    mtu_bytes = ends.mtu_bytes
    findings.append(good(_TOPIC, "queue pair", f"connected to itself, in packets of {in_units(mtu_bytes)}"))
    for length, offset in (_ODD, (_SPAN_BYTES, 0)):
        await ends.compare(source, target, length, offset)
    findings.append(good(_TOPIC, "bytes", f"written and read back, up to {in_units(_SPAN_BYTES)}, and compared"))
    write_bw, theirs, without = [], [], ""
    for _ in range(_ROUNDS):
        write_bw.append(await ends.rate(Operation.WRITE, source, target, seconds / _ROUNDS, tools.clock))
        if not without:
            try:
                theirs.append(await tools.write_bandwidth())
            except NoPerftest as error:
                without = str(error)
    read_bw = await ends.rate(Operation.READ, source, target, seconds, tools.clock)
    small_s = await ends.small_write_s(source, target, tools.clock)
    measured = Loopback(
        device.place, mtu_bytes, register_s, statistics.median(write_bw), read_bw, small_s * 1e6,
        statistics.median(theirs) if theirs else None,
    )  # fmt: skip
    text = f"{_gb(measured.write_bytes_per_s)} written, {_gb(read_bw)} read, in messages of {in_units(_MESSAGE_BYTES)}"
    findings.append(good(_TOPIC, "bandwidth", f"{text}; a write of 8 bytes takes {measured.write_p50_us:.1f} us"))
    findings.append(_beside(measured, without))
    if (gpu := await _examine_gpu(device, tools, source, limit_s)) is not None:
        findings.append(gpu)
    return measured


def _beside(measured: Loopback, without: str) -> Finding:
    theirs = measured.ib_write_bw_bytes_per_s
    if theirs is None:
        return good(_TOPIC, "ib_write_bw", f"not compared: {without}")
    ratio = measured.write_bytes_per_s / theirs
    text = f"{_gb(theirs)}; the store's way of writing reaches {ratio:.2f} of it"
    if ratio >= _AS_WELL:
        return good(_TOPIC, "ib_write_bw", text)
    remedy = "look for a processor that is busy or throttled, and run this on the card's NUMA node"
    return warning(_TOPIC, "ib_write_bw", text, remedy)


class _Span:
    """Memory of this process that a device has registered, in `register_s` seconds."""

    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        memory = mmap.mmap(-1, _SPAN_BYTES)
        memory.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(memory)
        self.view[:] = random.Random(1).randbytes(_SPAN_BYTES)
        self.address = address_of(self.view)
        started = clock()
        try:
            region = device.register(self.address, _SPAN_BYTES, remote=True)
        except NoRdma as error:
            raise _Failed(bad(_TOPIC, "memory", error.problem, error.remedy or _MORE_MEMORY)) from error
        self.register_s = clock() - started
        self.local_key = region.local_key
        self.region = region


_MORE_MEMORY: Final = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; containers: --ulimit memlock=-1"


class _Ends:
    """Both ends of a connection of a port with itself: one posts work, the other has
    registered memory.
    """

    def __init__(self, device: Device, limit_s: float) -> None:
        self._device = device
        self._limit_s = limit_s
        try:
            queue, other = (device.create_queue(serves=serves) for serves in (True, False))
            queue.connect(other.endpoint, dead_after_s=_DEAD_AFTER_S)
            other.connect(queue.endpoint, dead_after_s=_DEAD_AFTER_S)
        except (NoRdma, TransferFailed) as error:
            remedy = "choose another GID or port (--hint-gid-index, --ib-port); the lines on RDMA above list them"
            raise _Failed(bad(_TOPIC, "queue pair", str(error), remedy)) from error
        self._requester = Requester(queue, device.limits.depth, device.place)
        self.mtu_bytes = queue.endpoint.mtu

    async def move(
        self, operation: Operation, here: _Span, there: Region, length: int, *, offset: int = 0, times: int = 1
    ) -> None:
        """Move bytes between the same offsets of a span and of registered memory, so
        many times without a pause.

        Raises:
            TransferFailed: it failed, or was not done in time.
        """
        local = Placement([here.address + offset], [here.local_key])
        remote = Placement([there.remote_address + offset], [there.remote_key])
        longest_bytes = min(_MESSAGE_BYTES, self._device.limits.longest_bytes)
        pieces = plan_transfer(local, remote, [length], longest_bytes=longest_bytes)
        with trio.move_on_after(self._limit_s):
            await self._requester.move(operation, pieces * times)
            return
        raise TransferFailed(f"RDMA over {self._device.place}: not done after {self._limit_s:g} s")

    async def compare(self, source: _Span, target: _Span, length: int, offset: int) -> None:
        """Write some bytes and read them back, and compare all of both spans."""
        sent, part = bytes(source.view), slice(offset, offset + length)
        target.view[:] = bytes(_SPAN_BYTES)
        try:
            await self.move(Operation.WRITE, source, target.region, length, offset=offset)
            arrived = target.view[part] == source.view[part] and not any(target.view[part.stop : part.stop + 64])
            source.view[part] = bytes(length)
            await self.move(Operation.READ, source, target.region, length, offset=offset)
        except TransferFailed as error:
            raise _Failed(bad(_TOPIC, "bytes", str(error), _NO_LOOPBACK)) from error
        if not arrived or source.view != sent:
            how = "read back" if arrived else "written"
            text = f"{in_units(length)} that were {how} are not what was sent"
            remedy = "do not use this device for a store; update its driver and its firmware"
            raise _Failed(bad(_TOPIC, "bytes", text, remedy))

    async def rate(
        self, operation: Operation, here: _Span, there: _Span, seconds: float, clock: Callable[[], float]
    ) -> float:
        """Return how many bytes a second are moved. Long transfers, so that their ends
        do not count.
        """
        started = clock()
        try:
            await self.move(operation, here, there.region, _SPAN_BYTES)
            times = max(1, min(_MOST_TIMES, int(seconds / (clock() - started))))
            started, moved = clock(), 0
            while True:
                await self.move(operation, here, there.region, _SPAN_BYTES, times=times)
                moved += times * _SPAN_BYTES
                if (taken := clock() - started) >= seconds:
                    return moved / taken
        except TransferFailed as error:
            raise _Failed(bad(_TOPIC, "bandwidth", str(error), _NO_LOOPBACK)) from error

    async def small_write_s(self, here: _Span, there: _Span, clock: Callable[[], float]) -> float:
        """Return the median time of a small write."""
        times = []
        for _ in range(_SMALL_CALLS):
            started = clock()
            try:
                await self.move(Operation.WRITE, here, there.region, _SMALL_BYTES)
            except TransferFailed as error:
                raise _Failed(bad(_TOPIC, "bandwidth", str(error), _NO_LOOPBACK)) from error
            times.append(clock() - started)
        return statistics.median(times)


_NO_LOOPBACK: Final = (
    "look at the cable and at dmesg, and try another GID (--hint-gid-index); if two hosts reach each other"
    " (scripts/rdma_pair.py), this port only has no way to itself"
)


async def _examine_gpu(device: Device, tools: LoopbackTools, source: _Span, limit_s: float) -> Finding | None:
    """Register memory of a GPU in both ways, and move bytes by each."""
    found = tools.gpu_memory()
    if found is None:
        return None
    subject = "memory of GPUs"
    if isinstance(found, str):
        return warning(_TOPIC, subject, f"not tried: {found}", "run this with the Python that uses the GPU")
    memory, driver = found
    works, lines = [], []
    for way, register in (("as a dmabuf", _as_dmabuf), ("as peer memory", _as_peer_memory)):
        try:
            with register(device, memory, driver) as region:
                await _there_and_back(_Ends(device, limit_s), source, region)
        except (NoRdma, TransferFailed) as error:
            lines.append(f"{way}: {error}")
        else:
            works.append(way)
            lines.append(f"{way}: {in_units(_GPU_BYTES)} written, read back and compared")
    if works:
        return good(_TOPIC, subject, f"{memory.place} is reached {' and '.join(works)}", details=lines)
    return warning(_TOPIC, subject, f"{memory.place} cannot be reached by this device", _NO_GPU, details=lines)


_NO_GPU: Final = (
    "as root: modprobe nvidia-peermem; or install NVIDIA's open kernel modules, on Linux 5.12 or newer. Until then,"
    " RDMA goes by way of the host's memory"
)


async def _there_and_back(ends: _Ends, source: _Span, region: Region) -> None:
    """Raises TransferFailed if what comes back is not what was sent."""
    sent = random.Random(2).randbytes(_GPU_BYTES)
    source.view[:_GPU_BYTES] = sent
    await ends.move(Operation.WRITE, source, region, _GPU_BYTES)
    source.view[:_GPU_BYTES] = bytes(_GPU_BYTES)
    await ends.move(Operation.READ, source, region, _GPU_BYTES)
    if source.view[:_GPU_BYTES] != sent:
        raise TransferFailed("what was read back is not what was written")


@contextmanager
def _as_dmabuf(device: Device, memory: cuda.DeviceMemory, driver: cuda.CudaDriver) -> Iterator[Region]:
    fd, offset = driver.export(memory)
    try:
        region = device.register_dmabuf(fd, offset, len(memory))
    finally:
        os.close(fd)
    try:
        yield region
    finally:
        region.close()


@contextmanager
def _as_peer_memory(device: Device, memory: cuda.DeviceMemory, driver: cuda.CudaDriver) -> Iterator[Region]:
    region = device.register(memory.address, len(memory), remote=True)
    try:
        yield region
    finally:
        region.close()


def _gpu_memory() -> GpuMemory | str:
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed, and it gives the memory"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    tensor = torch.empty(_GPU_BYTES, dtype=torch.uint8, device="cuda")
    return cuda.DeviceMemory(tensor.data_ptr(), _GPU_BYTES, tensor.device.index or 0, tensor), cuda.load_cuda()


_PERFTEST_S: Final = 1
_PERFTEST_LIMIT_S: Final = 20.0


def perftest_command(port: ChosenPort, tcp_port: int) -> list[str]:
    """Return the command of one end of `ib_write_bw` over a port and its GID: the one
    that listens at a TCP port; the other end names its host behind it.
    """
    command = ["ib_write_bw", "-d", port.device, "-i", str(port.number), "-p", str(tcp_port), "-F"]
    command += ["-s", str(_MESSAGE_BYTES), "-t", "64", "-D", str(_PERFTEST_S), "-f", "0"]
    return command + (["-x", str(port.gid_index)] if port.link == "Ethernet" else [])


def perftest_bandwidth(output: str) -> float | None:
    """Return the average of its output, in bytes a second; None if there is none, or if
    nothing was done in its time.
    """
    found = re.search(rf"^\s*{_MESSAGE_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)", output, re.MULTILINE)
    return (found is not None and float(found[1]) * MIB) or None


async def _write_bandwidth(dev_name: str | None, ib_port: int, link_type: str | None, hint_gid_index: int) -> float:
    """Run ib_write_bw(1) against itself over the same port and GID."""
    if shutil.which("ib_write_bw") is None:
        raise NoPerftest("perftest is not installed (apt-get install perftest)")
    command = perftest_command(choose_port(dev_name, ib_port, link_type, hint_gid_index), _free_port())
    with trio.move_on_after(_PERFTEST_LIMIT_S):
        async with trio.open_nursery() as nursery:
            listening = await nursery.start(_run_quietly, command)
            while listening.returncode is None:  # it does not say when it listens
                done = await trio.run_process(
                    [*command, "127.0.0.1"], capture_stdout=True, stderr=subprocess.DEVNULL, check=False
                )
                if (found := perftest_bandwidth(done.stdout.decode(errors="replace"))) is not None:
                    nursery.cancel_scope.cancel()
                    return found
                await trio.sleep(0.05)
    raise NoPerftest("it does not work over this port; run it by hand: " + " ".join(command))


async def _run_quietly(command: list[str], *, task_status: "trio.TaskStatus[trio.Process]") -> None:
    await trio.run_process(
        command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, task_status=task_status
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
