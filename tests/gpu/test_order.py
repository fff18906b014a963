"""Copies come after the work that the GPU was given before them, and before the work
that follows, while it is busy.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.tensors import LayerLoader, LayerWriter, read_blocks, write_blocks
from tests.gpu.conftest import Calls
from tests.gpu.device import DEVICE, REHEARSAL, busy

BLOCK = 32_768
BLOCKS = 16


def named(name: object, step: int = 1) -> list[tuple[str, int]]:
    return [(f"{name}/{row}", row * BLOCK) for row in range(0, BLOCKS, step)]


def zeros() -> torch.Tensor:
    return torch.zeros(BLOCKS, BLOCK, dtype=torch.uint8, device=DEVICE)


@contextmanager
def stream(which: str) -> Iterator[None]:
    """Compute on the default stream, or on another one."""
    if which == "default" or REHEARSAL:
        yield
        return
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    side.synchronize()


@pytest.fixture(params=["default", "side"])
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_layer_is_stored_as_it_will_be_computed(any_store: BlockingStore, calls: Calls, which: str) -> None:
    layers = [zeros() for _ in range(4)]
    for _ in range(2):  # before the pool is registered, and afterwards
        with stream(which), LayerWriter(any_store) as writer:
            for number, layer in enumerate(layers, 1):
                layer.zero_()
                busy()
                layer.fill_(number)
                writer.write(layer, named(f"L{number}", 2), BLOCK)
        for number in range(1, 5):
            assert any_store.get(f"L{number}/4") == bytes([number] * BLOCK)


def test_a_tensor_may_change_once_its_ticket_is_done(store: BlockingStore, calls: Calls, which: str) -> None:
    layer = zeros()
    with stream(which), LayerWriter(store, linger_s=0) as writer:
        for number in range(1, 9):
            layer.fill_(number)
            writer.write(layer, named(number), BLOCK).wait()
            layer.fill_(99)
            busy()
    for number in range(1, 9):
        assert store.get(f"{number}/3") == bytes([number] * BLOCK)


def test_a_tensor_is_loaded_after_its_last_use_and_before_its_next(
    any_store: BlockingStore, calls: Calls, which: str
) -> None:
    source = torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, device=DEVICE)
    write_blocks(any_store, named("layer"), BLOCK, source)
    target = zeros()
    with stream(which), LayerLoader(any_store) as loader:
        for _ in range(2):
            target.fill_(1)
            busy()
            before = target.sum(dtype=torch.int64)
            loader.load("layer", target, named("layer"), BLOCK)
            loader.wait("layer")
            after = target.clone()
            assert int(before) == BLOCKS * BLOCK
            assert torch.equal(after, source)


def test_writes_and_reads_of_one_thread_are_in_order(any_store: BlockingStore, calls: Calls, which: str) -> None:
    tensor, back = zeros(), zeros()
    with stream(which):
        for number in range(1, 5):
            busy()
            tensor.fill_(number)
            write_blocks(any_store, named("same"), BLOCK, tensor)
            busy()
            back.fill_(0)
            read_blocks(any_store, named("same"), BLOCK, back)
            assert (back == number).all()


@pytest.mark.skipif(REHEARSAL, reason="nothing is busy without a GPU")
def test_write_and_load_do_not_wait_for_the_gpu(store: BlockingStore, calls: Calls) -> None:
    layer = zeros()
    write_blocks(store, named("layer"), BLOCK, layer)
    with LayerWriter(store) as writer, LayerLoader(store) as loader:
        busy(20)
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record()
        writer.write(layer, named("other"), BLOCK)
        loader.load("layer", layer, named("layer"), BLOCK)
        assert not computed.query()  # type: ignore[no-untyped-call]
        loader.wait("layer")
        assert computed.query()  # type: ignore[no-untyped-call]
