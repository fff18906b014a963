"""Copies between tensors and memory: the bytes, their order among other work, and how
few calls they take.

The GPU's part runs here over a CUDA that is faked (`fake_cuda`): what is decided is
tested, the driver is not.
"""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinistore.core.arena import Arena, Mapping, create_arena
from infinistore.tensors.copies import (
    CudaCopies,
    MappedArena,
    addresses_of,
    merge,
)
from infinistore.tensors.cuda_runtime import Pieces, TorchCuda
from infinistore.tensors.tensor_blocks import TensorBlocks, blocks_to_read, blocks_to_write
from tests.tensors.contents import as_bytes, random_bytes
from tests.tensors.fake_cuda import FakeCuda, FakeStream, PyTorchCopies

CPU = torch.device("cpu")


def engines() -> list[CudaCopies]:
    cuda: list[TorchCuda] = [FakeCuda(batches=True), FakeCuda(batches=False), PyTorchCopies()]
    return list(map(CudaCopies, cuda))


def named(offsets: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"block {number}", offset) for number, offset in enumerate(offsets)]


def views_in(memory: bytearray, places: Sequence[int], size: int) -> list[memoryview]:
    return [memoryview(memory)[place * size : (place + 1) * size] for place in places]


def cuda_with(*, batches: bool) -> tuple[CudaCopies, FakeCuda]:
    fake = FakeCuda(batches=batches)
    return CudaCopies(fake), fake


# Bytes


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_blocks_get_to_memory_and_back_whatever_lies_where(data: st.DataObject, shape: list[int]) -> None:
    tensor = random_bytes(*shape).permute(data.draw(st.permutations(range(len(shape)))))
    expected = as_bytes(tensor)
    size = data.draw(st.sampled_from([n for n in range(1, len(expected) + 1) if len(expected) % n == 0]))
    offsets = data.draw(st.permutations(range(0, len(expected), size)))
    places = data.draw(st.permutations(range(len(offsets))))
    for engine in engines():
        memory = bytearray(len(expected))
        blocks = blocks_to_write(tensor, named(offsets), size)
        engine.to_host(blocks, views_in(memory, places, size), engine.mark(tensor))
        for place, offset in zip(places, offsets, strict=True):
            assert memory[place * size : (place + 1) * size] == expected[offset : offset + size]
        back = torch.zeros_like(tensor)
        target = blocks_to_read(back, named(offsets), size)
        engine.to_device(views_in(memory, places, size), target, engine.mark(back))
        assert torch.equal(back, tensor)


@given(places=st.lists(st.integers(0, 8), max_size=12, unique=True), there=st.permutations(range(12)))
def test_merged_pieces_are_the_same_bytes(places: list[int], there: list[int]) -> None:
    here = np.array(places, np.int64) * 4
    targets = np.array(there[: len(places)], np.int64) * 4
    pieces = merge(here, targets, 4, boundaries=[16, 24])
    assert sum(pieces.sizes) == 4 * len(places)
    apart = [(h + step, t + step) for h, t, size in zip(*pieces, strict=True) for step in range(0, size, 4)]
    assert apart == list(zip(here.tolist(), targets.tolist(), strict=True))
    for start, size in zip(pieces.there, pieces.sizes, strict=True):
        assert not any(start < boundary < start + size for boundary in (16, 24))


def test_neighbours_are_one_piece() -> None:
    at = np.arange(0, 640, 10)
    assert merge(at, at + 5000, 10) == ([0], [5000], [640])
    assert merge(at, at[::-1].copy(), 10).sizes == [10] * 64
    assert merge(at[:0], at[:0], 10) == ([], [], [])


# How many calls


def scattered(count: int = 64) -> tuple[TensorBlocks, list[memoryview], torch.Tensor]:
    """Every other block of a tensor, and places for them that are no neighbours."""
    tensor = random_bytes(2 * count, 32)
    blocks = blocks_to_write(tensor, named(range(0, tensor.nbytes, 64)), 32)
    return blocks, views_in(bytearray(2 * tensor.nbytes), range(1, 4 * count, 4), 32), tensor


def joined(views: Sequence[memoryview]) -> bytes:
    return b"".join(map(bytes, views))


@pytest.mark.parametrize("batches", [True, False])
def test_contiguous_blocks_are_one_copy(batches: bool) -> None:
    engine, fake = cuda_with(batches=batches)
    tensor = random_bytes(64, 32)
    blocks = blocks_to_write(tensor, named(range(0, tensor.nbytes, 32)), 32)
    memory = bytearray(tensor.nbytes)
    views = views_in(memory, range(64), 32)
    engine.to_host(blocks, views, engine.mark(tensor))
    assert bytes(memory) == as_bytes(tensor)
    tensor.zero_()
    engine.to_device(views, blocks, engine.mark(tensor))
    assert bytes(memory) == as_bytes(tensor)
    assert (fake.pieces(), fake.count("pinned")) == ([1, 1], 0)


@pytest.mark.parametrize(("batches", "pieces", "pinned"), [(True, 64, 0), (False, 1, 2)])
def test_scattered_blocks_are_one_batch_where_the_driver_takes_batches_else_one_copy(
    batches: bool, pieces: int, pinned: int
) -> None:
    engine, fake = cuda_with(batches=batches)
    blocks, views, tensor = scattered()
    engine.to_host(blocks, views, engine.mark(tensor))
    assert joined(views) == as_bytes(tensor[::2])
    tensor.zero_()
    engine.to_device(views, blocks, engine.mark(tensor))
    assert joined(views) == as_bytes(tensor[::2])
    assert (fake.pieces(), fake.count("pinned")) == ([pieces, pieces], pinned)


def test_blocks_that_are_scattered_in_the_tensor_only_need_no_memory_beside() -> None:
    engine, fake = cuda_with(batches=False)
    blocks, _, tensor = scattered()
    views = views_in(bytearray(2048), range(64), 32)
    engine.to_host(blocks, views, engine.mark(tensor))
    assert joined(views) == as_bytes(tensor[::2])
    engine.to_device(views, blocks, engine.mark(tensor))
    assert (fake.pieces(), fake.count("pinned")) == ([1, 1], 0)


# Order


@pytest.mark.parametrize("batches", [True, False])
def test_a_copy_sees_what_was_computed_before_its_mark_and_nothing_later(batches: bool) -> None:
    engine, fake = cuda_with(batches=batches)
    blocks, views, tensor = scattered()
    fake.compute.told.append(lambda: tensor.fill_(7))
    after = engine.mark(tensor)
    fake.compute.told.append(lambda: tensor.fill_(9))
    engine.to_host(blocks, views, after)
    assert joined(views) == bytes([7] * 2048)
    assert fake.compute.done == 1


@pytest.mark.parametrize("batches", [True, False])
def test_a_tensor_is_written_after_what_was_computed_with_it_before(batches: bool) -> None:
    engine, fake = cuda_with(batches=batches)
    blocks, views, tensor = scattered()
    for view in views:
        view[:] = bytes([5] * 32)
    seen: list[int] = []
    tensor.fill_(1)
    fake.compute.told.append(lambda: seen.append(int(tensor.sum())))
    engine.to_device(views, blocks, engine.mark(tensor))
    assert seen == [128 * 32]
    assert (tensor[::2] == 5).all() and (tensor[1::2] == 1).all()


def test_there_is_one_stream_for_each_device_and_direction() -> None:
    engine, fake = cuda_with(batches=True)
    blocks, views, tensor = scattered()
    for _ in range(3):
        engine.to_host(blocks, views, engine.mark(tensor))
        engine.to_device(views, blocks, engine.mark(tensor))
    assert fake.count("new_stream") == 2


def test_after_an_error_nothing_is_under_way() -> None:
    engine, fake = cuda_with(batches=True)
    blocks, views, tensor = scattered()
    fake.copy_error = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        engine.to_host(blocks, views, engine.mark(tensor))
    assert fake.calls[-1] == ("finish",)


# The pool


class MappedPoolOfTest:
    """Arenas, each mapped once for reading and once for writing, as a client of a
    server has them.
    """

    def __init__(self, count: int, *, writable: bool = True) -> None:
        self.arenas: list[Arena] = [create_arena(index, 8192) for index in range(count)]
        reading = [Mapping(arena.fd, 8192, writable=False).memory for arena in self.arenas]
        writing = [Mapping(arena.fd, 8192, writable=True).memory if writable else None for arena in self.arenas]
        self.mapped = [MappedArena(r, w) for r, w in zip(reading, writing, strict=True)]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


def address(view: memoryview | None) -> int:
    assert view is not None
    return int(addresses_of([view])[0])


def test_the_pool_is_registered_once_and_given_back() -> None:
    engine, fake = cuda_with(batches=True)
    pool = MappedPoolOfTest(2)
    engine.use_pool(pool.mapped[:1], CPU)
    engine.use_pool(pool.mapped[:1], CPU)
    engine.use_pool(pool.mapped, CPU)
    addresses = [address(arena.writing) for arena in pool.mapped]
    assert fake.registered == dict.fromkeys(addresses, 8192)
    assert [call[1] for call in fake.calls] == addresses
    engine.use_pool(pool.mapped[1:], CPU)  # as after a restart of the server: other arenas
    assert list(fake.registered) == addresses[1:]
    engine.close()
    assert fake.registered == {}
    pool.close()


def test_a_pool_that_may_not_be_written_is_registered_for_reading() -> None:
    engine, fake = cuda_with(batches=True)
    pool = MappedPoolOfTest(1, writable=False)
    engine.use_pool(pool.mapped, CPU)
    assert fake.calls == [("register", address(pool.mapped[0].reading), 8192, True)]
    pool.close()


def test_what_was_not_registered_by_us_is_not_unregistered_by_us() -> None:
    engine, fake = cuda_with(batches=True)
    fake.refuse_registration = True
    pool = MappedPoolOfTest(1)
    engine.use_pool(pool.mapped, CPU)
    engine.close()
    assert fake.count("unregister") == 0
    pool.close()


@pytest.mark.process
def test_a_forked_child_unregisters_nothing() -> None:
    """CUDA refuses every call of a forked child."""
    engine, fake = cuda_with(batches=True)
    pool = MappedPoolOfTest(1)
    engine.use_pool(pool.mapped, CPU)
    child = os.fork()
    if not child:
        engine.close()
        os._exit(fake.count("unregister"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.close()
    assert fake.count("unregister") == 1
    pool.close()


def test_nothing_is_unregistered_under_a_copy() -> None:
    engine, fake = cuda_with(batches=True)
    pool = MappedPoolOfTest(1)
    engine.use_pool(pool.mapped, CPU)
    tensor = random_bytes(4096)
    blocks = blocks_to_write(tensor, [("key", 0)], 4096)
    fake.compute.told.append(engine.close)  # while the copy waits for the computation
    assert pool.mapped[0].writing is not None
    engine.to_host(blocks, [pool.mapped[0].writing[:4096]], engine.mark(tensor))
    assert [call[0] for call in fake.calls[-2:]] == ["finish", "unregister"]
    assert bytes(pool.arenas[0].memory[:4096]) == as_bytes(tensor)
    pool.close()


def test_what_is_read_from_the_pool_is_copied_from_where_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fake = cuda_with(batches=True)
    pool = MappedPoolOfTest(2)
    engine.use_pool(pool.mapped, CPU)
    source = random_bytes(4096)
    pool.arenas[1].memory[4096:] = as_bytes(source)
    seen: list[list[int]] = []
    copy = fake.copy

    def noted(stream: FakeStream, memory: torch.Tensor, pieces: Pieces, *, to_host: bool) -> None:
        seen.append(pieces.there)
        copy(stream, memory, pieces, to_host=to_host)

    monkeypatch.setattr(fake, "copy", noted)
    tensor = torch.zeros(4096, dtype=torch.uint8)
    blocks = blocks_to_read(tensor, [("key", 0)], 4096)
    engine.to_device([pool.mapped[1].reading[4096:]], blocks, engine.mark(tensor))
    assert torch.equal(tensor, source)
    assert seen == [[address(pool.mapped[1].writing) + 4096]]
    outside = memoryview(bytearray(4096))
    engine.to_device([outside], blocks, engine.mark(tensor))
    assert seen[1] == [address(outside)]
    pool.close()


def test_a_piece_does_not_reach_from_one_arena_into_another() -> None:
    engine, fake = cuda_with(batches=True)
    whole = create_arena(0, 8192)
    halves = [MappedArena(whole.memory[half], whole.memory[half]) for half in (slice(0, 4096), slice(4096, 8192))]
    engine.use_pool(halves, CPU)
    tensor = random_bytes(8192)
    blocks = blocks_to_write(tensor, named(range(0, 8192, 1024)), 1024)
    engine.to_host(blocks, [whole.memory[at : at + 1024] for at in range(0, 8192, 1024)], engine.mark(tensor))
    assert fake.pieces() == [2]
    assert bytes(whole.memory) == as_bytes(tensor)
    whole.close()
