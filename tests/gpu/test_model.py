"""A model of transformers in bf16: its layers are stored while it computes, loaded
while it decodes, and its cache comes back from a store.
"""

import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from infinistore.blocking import BlockingStore, open_store
from infinistore.integrations.transformers import load_cache, save_cache
from infinistore.tensors import LayerLoader, LayerWriter
from tests.gpu.conftest import Calls
from tests.gpu.device import DEVICE, REHEARSAL

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from gpu_model import NAME, SIZES, Pages, Size, make_llama, step

TOKENS = 192 if REHEARSAL else 2048
SIZE = SIZES["tiny"] if REHEARSAL else Size(8, 1024, 16, 4, 2816, 32_000)
PROMPT = [(7 * i * i + 3 * i) % SIZE.vocabulary for i in range(TOKENS)]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_llama(SIZE, DEVICE)


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with open_store(pool_bytes=256 << 20, minimal_allocate_bytes=4096) as opened:
        yield opened


def decoded(model: Any, cache: Any, first: int, count: int) -> list[int]:
    """Go on behind a cache, token by token."""
    made = [first]
    for _ in range(count):
        made.append(int(step(model, made[-1:], cache).argmax()))
    return made


def test_layers_are_stored_behind_the_forward_pass(model: Any, store: BlockingStore, calls: Calls) -> None:
    """Twice, because a pool is registered when it is written for the second time."""
    pages = Pages(model, TOKENS)
    for prompt in (PROMPT, PROMPT[::-1]):
        cache = DynamicCache(config=model.config)
        with LayerWriter(store) as writer:

            def write(layer: int, prompt: int = prompt[0], writer: LayerWriter = writer) -> None:
                writer.write(pages.layers[layer], pages.blocks(prompt, layer), pages.block_bytes)

            with pages.filled_by(model, cache, write):
                step(model, prompt, cache)
        back = Pages(model, TOKENS)
        with LayerLoader(store) as loader:
            for number, layer in enumerate(back.layers):
                loader.load(number, layer, back.blocks(prompt[0], number), back.block_bytes)
            for number, layer in enumerate(back.layers):
                loader.wait(number)
                assert torch.equal(layer, pages.layers[number])
        expected = Pages(model, TOKENS)
        for number, layer in enumerate(expected.layers):
            expected.fill(number, cache)
            assert torch.equal(layer, back.layers[number]) and layer.any()


def test_loads_beside_decoding_disturb_neither(model: Any, store: BlockingStore, calls: Calls) -> None:
    pages, back = Pages(model, TOKENS), Pages(model, TOKENS)
    cache = DynamicCache(config=model.config)
    with pages.filled_by(model, cache):
        first = int(step(model, PROMPT, cache).argmax())
    alone = decoded(model, deepcopy(cache), first, 16)
    with LayerWriter(store) as writer:
        for number, layer in enumerate(pages.layers):
            writer.write(layer, pages.blocks("p", number), pages.block_bytes)
    with LayerLoader(store) as loader:
        for number, layer in enumerate(back.layers):
            loader.load(number, layer, back.blocks("p", number), back.block_bytes)
        beside = decoded(model, cache, first, 16)
        for number in range(len(back.layers)):
            loader.wait(number)
    assert beside == alone
    assert all(torch.equal(one, other) for one, other in zip(pages.layers, back.layers, strict=True))


def test_a_cache_of_transformers_comes_back_bit_by_bit(model: Any, store: BlockingStore) -> None:
    """Cold, nothing is there; warm, all but the last token's block is."""
    cold: Any
    warm: Any
    cold, matched = load_cache(store, model, PROMPT, name=NAME)
    assert matched == 0
    step(model, PROMPT[:-64], cold)
    answer = step(model, PROMPT[-64:], cold)
    assert save_cache(store, model, PROMPT, cold, name=NAME) == TOKENS
    warm, matched = load_cache(store, model, PROMPT, name=NAME)
    assert matched == TOKENS - 64
    for one, other in zip(cold.layers, warm.layers, strict=True):
        assert (other.keys.device, other.keys.dtype) == (DEVICE, torch.bfloat16)
        assert torch.equal(one.keys[:, :, :matched], other.keys)
        assert torch.equal(one.values[:, :, :matched], other.values)
    assert torch.equal(step(model, PROMPT[matched:], warm), answer)
