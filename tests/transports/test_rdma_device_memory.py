"""Where registered memory of GPUs is, what lies in it, and what a peer calls it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.transports.cuda import DeviceMemory, DeviceSpan, RegisteredDeviceMemory
from infinistore.transports.rdma.verbs import NoRdma
from tests.transports.fake_gpu import FakeGpu
from tests.transports.fake_rdma import Fabric

BOUNDS = st.none() | st.integers(-30, 30)


@given(BOUNDS, BOUNDS, st.integers(0, 20))
def test_memory_is_cut_like_bytes(start: int | None, stop: int | None, length: int) -> None:
    whole = range(1000, 1000 + length)
    part = DeviceMemory(1000, length, 3, "owner")[start:stop]
    expected = whole[start:stop]
    assert (len(part), part.ordinal, part.owner) == (len(expected), 3, "owner")
    assert not expected or part.address == expected[0]
    assert DeviceMemory(1000, length, 3, None).holds(part) or not expected


def test_memory_is_not_cut_in_steps() -> None:
    with pytest.raises(ValueError, match="end to end"):
        DeviceMemory(1000, 10, 0, None)[::2]


@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(1, 4)), max_size=5, unique_by=lambda span: span[0]),
    st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 999)), min_size=1, max_size=5),
    st.booleans(),
)
def test_blocks_are_found_in_the_span_that_holds_them_or_not_at_all(
    spans: list[tuple[int, int]], blocks: list[tuple[int, int]], exports: bool
) -> None:
    fabric = Fabric()
    fabric.refuses_dmabufs = not exports
    gpu, device = FakeGpu(fabric), fabric.open("fake")
    base, _ = gpu.library.allocations[0]
    ends = sorted(first for first, _ in spans)
    memory = RegisteredDeviceMemory()
    for first, count in spans:  # none reaches into the next
        last = min([first + count, *(end for end in ends if end > first)])
        memory.add(DeviceSpan(device, DeviceMemory(base + first * 500, (last - first) * 500, 0, None), gpu))
    wanted = [DeviceMemory(base + start, length, 0, None) for start, length in blocks]
    regions = {region.remote_key: region for region in device.regions.values()}

    found = memory.locate(wanted)

    held = [any(region.holds(one.address, len(one)) for region in regions.values()) for one in wanted]
    assert (found is not None) == all(held)
    if found is not None:
        for block, address, key in zip(wanted, found.addresses, found.keys, strict=True):
            region = regions[key]
            assert region.address + (address - region.remote_address) == block.address
            assert region.holds(block.address, len(block))
    device.close()


def test_a_descriptor_is_closed_whether_the_card_takes_it_or_not() -> None:
    fabric = Fabric()
    gpu, device = FakeGpu(fabric), fabric.open("fake")
    memory = DeviceMemory(gpu.library.allocations[0][0] + 700, 5000, 0, None)
    DeviceSpan(device, memory, gpu)
    fabric.refuses_dmabufs = fabric.refuses_to_register = True
    with pytest.raises(NoRdma, match="nvidia-peermem"):
        DeviceSpan(device, memory, gpu)
    assert len(gpu.library.fds) == 2
    assert gpu.open_dmabufs == 0
