"""`LayerLoader`: layers come in order, `wait` says what is wrong with them, and nothing
is written after it is left.
"""

import threading

import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.tensors import BlockSizeMismatch, BlocksMissing, LayerLoader, write_blocks
from tests.tensors.conftest import GatedStore, threads_named
from tests.tensors.contents import random_bytes

BLOCK = 10_000


def blocks(layer: int, count: int = 4) -> list[tuple[str, int]]:
    return [(f"L{layer}/{i}", i * BLOCK) for i in range(count)]


def stored(store: BlockingStore, layers: int = 6) -> list[torch.Tensor]:
    """Store layers of four blocks; return what was stored."""
    made = [random_bytes(4 * BLOCK, seed=layer) for layer in range(layers)]
    for layer, tensor in enumerate(made):
        write_blocks(store, blocks(layer), BLOCK, tensor)
    return made


def test_each_layer_is_there_after_its_wait(any_store: BlockingStore) -> None:
    expected = stored(any_store)
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8) for _ in expected]
    with LayerLoader(any_store) as loader:
        for layer, target in enumerate(targets):
            loader.load(layer, target, blocks(layer), BLOCK)
        for layer, target in enumerate(targets):
            loader.wait(layer)
            assert torch.equal(target, expected[layer])


def test_a_layer_may_have_several_tensors_of_any_stride(store: BlockingStore) -> None:
    keys, values = torch.randn(8, 6), torch.randn(6, 8)
    write_blocks(store, [("k", 0)], keys.nbytes, keys)
    write_blocks(store, [("v", 0)], values.nbytes, values)
    k, v = torch.zeros(6, 8), torch.zeros(6, 8)
    with LayerLoader(store) as loader:
        loader.load("layer", k.T, [("k", 0)], keys.nbytes)
        loader.load("layer", v, [("v", 0)], values.nbytes)
        loader.wait("layer")
        assert torch.equal(k.T, keys) and torch.equal(v, values)
        with pytest.raises(KeyError):
            loader.wait("layer")


def test_load_returns_before_anything_is_read(gated: GatedStore) -> None:
    expected = stored(gated.inner, 1)
    target = torch.zeros(4 * BLOCK, dtype=torch.uint8)
    with LayerLoader(gated) as loader:
        loader.load(0, target, blocks(0), BLOCK)
        with pytest.raises(DeadlineExceeded, match="not done within"):
            loader.wait(0, 0.001)  # real time: the gate is closed
        gated.gate.set()
        loader.wait(layer=0)
        assert torch.equal(target, expected[0])


def test_missing_blocks_are_named_by_the_wait_of_their_layer_only(any_store: BlockingStore) -> None:
    expected = stored(any_store, 3)
    any_store.delete(["L1/2"])
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8) for _ in expected]
    with LayerLoader(any_store) as loader:
        for layer, target in enumerate(targets):
            loader.load(layer, target, blocks(layer), BLOCK)
        loader.wait(layer=0)
        with pytest.raises(BlocksMissing) as caught:
            loader.wait(layer=1)
        assert caught.value.keys == ["L1/2"]
        loader.wait(layer=2)
    assert torch.equal(targets[2], expected[2])


def test_a_layer_that_cannot_be_read_does_not_fail_those_beside_it(gated: GatedStore) -> None:
    expected = stored(gated.inner, 3)
    gated.inner.put("L1/2", bytes(BLOCK + 1))
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8) for _ in expected]
    with LayerLoader(gated) as loader:
        loader.load("busy", targets[0], blocks(0), BLOCK)
        gated.entered.acquire()
        for layer, target in enumerate(targets):
            loader.load(layer, target, blocks(layer), BLOCK)
        gated.gate.set()
        loader.wait(layer=0)
        with pytest.raises(BlockSizeMismatch):
            loader.wait(layer=1)
        loader.wait(layer=2)
    assert torch.equal(targets[2], expected[2])


def test_small_layers_that_wait_are_read_in_one_get(gated: GatedStore) -> None:
    expected = stored(gated.inner)
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8) for _ in expected]
    with LayerLoader(gated) as loader:
        loader.load("busy", torch.zeros(4 * BLOCK, dtype=torch.uint8), blocks(0), BLOCK)
        gated.entered.acquire()
        for layer, target in enumerate(targets):
            loader.load(layer, target, blocks(layer), BLOCK)
        gated.gate.set()
        for layer in range(6):
            loader.wait(layer)
        assert gated.begun == 2


def test_a_store_that_is_gone_comes_out_at_each_wait(failing: GatedStore) -> None:
    with LayerLoader(failing) as loader:
        for layer in range(3):
            loader.load(layer, torch.zeros(4 * BLOCK, dtype=torch.uint8), blocks(layer), BLOCK)
        for layer in range(3):
            with pytest.raises(StoreUnavailable, match="gone"):
                loader.wait(layer)


def test_leaving_gives_up_what_was_not_begun_and_ends_the_thread(gated: GatedStore) -> None:
    stored(gated.inner, 2)
    targets = [torch.zeros(4 * BLOCK, dtype=torch.uint8) for _ in range(2)]
    with LayerLoader(gated) as loader:
        loader.load(0, targets[0], blocks(0), BLOCK)
        gated.entered.acquire()
        loader.load(1, targets[1], blocks(1), BLOCK)
        threading.Timer(0, gated.gate.set).start()
    loader.close()
    loader.wait(layer=0)
    after = targets[1].clone()
    if not after.any():  # else the gate was open before the block was left
        with pytest.raises(StoreUnavailable, match="left before"):
            loader.wait(layer=1)
    assert threads_named("LayerLoader") == 0


def test_wrong_arguments_are_refused_at_once(store: BlockingStore) -> None:
    with LayerLoader(store) as loader:
        with pytest.raises(ValueError, match="overlap"):
            loader.load(0, torch.zeros(8), [("a", 0), ("b", 2)], 4)
        with pytest.raises(KeyError):
            loader.wait(layer=0)
    with pytest.raises(TypeError, match=r"blocking\.open_store"):
        LayerLoader("tcp://127.0.0.1")  # type: ignore[arg-type]
