"""A Llama with random weights, made on the device that computes it.

Its cache of a layer is copied into pages, as engines keep theirs: `Pages`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

__all__ = ["BLOCK_TOKENS", "NAME", "SIZES", "Pages", "Size", "make_llama", "step"]

NAME = "random-llama"
"""What stores know its caches by."""
BLOCK_TOKENS = 16


class Size(NamedTuple):
    """How large a model is; `heads` have 64 numbers each, or 128 if they are 32."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    wide: int
    vocabulary: int


SIZES = {
    "tiny": Size(2, 64, 4, 2, 128, 256),
    "2GiB": Size(16, 2048, 32, 8, 8192, 32_000),
    "15GiB": Size(32, 4096, 32, 8, 14_336, 128_256),
}
"""`2GiB` is like Llama 3.2 1B, `15GiB` like Llama 3.1 8B, in bf16."""


def make_llama(size: Size, device: torch.device, *, seed: int = 0) -> Any:
    """Return a model of bf16, for prompts of up to 64 Ki tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.wide,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=65_536,
        initializer_range=4 / size.hidden**0.5,  # enough that an answer depends on the whole prompt
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


@torch.no_grad()
def step(model: Any, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Compute these tokens behind those of the cache, which they are added to; return
    the logits after the last one.
    """
    # transformers 5.24 has renamed it.
    known = inspect.signature(type(model).forward).parameters
    given = {"cache" if "cache" in known else "past_key_values": cache}
    inputs = torch.tensor([list(tokens)], device=model.device)
    logits: torch.Tensor = model(inputs, use_cache=True, logits_to_keep=1, **given).logits[0, -1]
    return logits


class Pages:
    """The cache of a model by blocks of `BLOCK_TOKENS` tokens, for prompts of up to
    `tokens` tokens: [blocks, key and value, heads, tokens, head size] for each layer.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        config = model.config
        head_size = config.hidden_size // config.num_attention_heads
        shape = (tokens // BLOCK_TOKENS, 2, config.num_key_value_heads, BLOCK_TOKENS, head_size)
        self.layers = [
            torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_hidden_layers)
        ]
        self.block_bytes = self.layers[0][0].nbytes

    @property
    def total_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def blocks(self, prompt: object, layer: int) -> list[tuple[str, int]]:
        """Return keys and offsets of a layer's blocks."""
        return [(f"{prompt}/L{layer}/{block}", block * self.block_bytes) for block in range(len(self.layers[layer]))]

    def fill(self, layer: int, cache: Any) -> None:
        """Copy a layer out of a cache of transformers: whole blocks of a prompt."""
        pages = self.layers[layer]
        for which, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            heads, tokens, size = tensor.shape[1:]
            blocks = tokens // BLOCK_TOKENS
            rows = tensor[0, :, : blocks * BLOCK_TOKENS].view(heads, blocks, BLOCK_TOKENS, size)
            pages[:blocks, which].copy_(rows.transpose(0, 1))

    @contextmanager
    def filled_by(self, model: Any, cache: Any, then: Callable[[int], object] | None = None) -> Iterator[None]:
        """Fill each layer as soon as the model has computed it in a step with this
        cache, and call `then` with its number.
        """

        def hook(number: int) -> Callable[..., None]:
            def after(module: Any, arguments: Any, output: Any) -> None:
                self.fill(number, cache)
                if then is not None:
                    then(number)

            return after

        hooks = [layer.register_forward_hook(hook(number)) for number, layer in enumerate(model.model.layers)]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()
