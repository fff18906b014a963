"""Whatever a model is called, only one with the same weights finds its cache."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from infinistore import blocking
from infinistore.integrations.transformers import load_cache, save_cache
from tests.integrations.small_llama import NAME, VOCABULARY, make_model

TOKENS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(20)]


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=1024) as store:
        yield store


def found(store: blocking.BlockingStore, model: PreTrainedModel) -> int:
    return load_cache(store, model, TOKENS, name=NAME, block_tokens=8)[1]


@torch.no_grad()
def save(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    cache: Any = model(torch.tensor([TOKENS]), use_cache=True).cache
    assert save_cache(store, model, TOKENS, cache, name=NAME, block_tokens=8) == found(store, model) == 16


@pytest.mark.parametrize("name", [name for name, _ in make_model().named_parameters()])
def test_every_weight_counts(store: blocking.BlockingStore, name: str) -> None:
    model = make_model()
    weight = model.get_parameter(name)
    save(store, model)
    weight.data += 1e-6  # of which PyTorch counts no version
    assert found(store, model) == 0
    weight.data = make_model().get_parameter(name).data
    assert found(store, model) == 16


def test_weights_that_are_not_contiguous_and_buffers_count(store: blocking.BlockingStore) -> None:
    model = make_model()
    weight = model.get_parameter("lm_head.weight")
    weight.data = weight.data.T.contiguous().T
    model.register_buffer("scales", scales := torch.ones(3, dtype=torch.int8))
    save(store, model)
    scales[2] = 2
    assert found(store, model) == 0


class Adapted(torch.nn.Module):
    """A layer with adapters, as PEFT puts one in a layer's place."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.change = torch.nn.Parameter(torch.zeros(2))
        self.active_adapters, self.disable_adapters, self.scaling = ["first"], False, {"first": 1.0}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(inputs)
        return result


def switch(layer: Adapted) -> None:
    layer.active_adapters = ["second"]


def turn_off(layer: Adapted) -> None:
    layer.disable_adapters = True


def scale(layer: Adapted) -> None:
    layer.scaling["first"] = 2.0


def train(layer: Adapted) -> None:
    layer.change.data += 1


@pytest.mark.parametrize("change", [switch, turn_off, scale, train])
def test_adapters_count_and_which_of_them_are_in_use(
    store: blocking.BlockingStore, change: Callable[[Adapted], None]
) -> None:
    model: Any = make_model()
    save(store, model)
    layer = model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    assert found(store, model) == 0
    save(store, model)
    change(layer)
    assert found(store, model) == 0


def test_adapters_that_put_tokens_before_a_prompt_are_refused(store: blocking.BlockingStore) -> None:
    model: Any = make_model()
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(ValueError, match="tokens of its own"):
        found(store, model)


def test_weights_that_are_not_in_memory_are_refused(store: blocking.BlockingStore) -> None:
    model: Any = make_model()
    with pytest.raises(ValueError, match="without offloading"):
        found(store, model.to("meta"))
