"""A Llama of a few thousand random weights, the same in every process; and what a
process does that goes on with a cache that another one stored."""

import sys
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from infinistore import blocking
from infinistore.integrations.transformers import load_cache, save_cache

__all__ = ["NAME", "VOCABULARY", "complete", "make_model"]

NAME = "a-small-llama"
VOCABULARY = 100
STEPS = 6

torch.set_num_threads(1)  # several wait for each other longer than so few weights take


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **{**sizes, **heads, **settings}))
    made: PreTrainedModel = model.to(dtype).eval()
    return made


@torch.no_grad()
def complete(model: PreTrainedModel, cache: DynamicCache, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Go on after `tokens`, of which the cache has some; return the logits after them,
    and the next tokens.
    """
    inputs = tokens[cache.get_seq_length() :]
    first: torch.Tensor | None = None
    made: list[int] = []
    for _ in range(STEPS):
        logits: torch.Tensor = model(torch.tensor([inputs]), cache=cache, use_cache=True).logits[0, -1]
        first = logits if first is None else first
        inputs = [int(logits.argmax())]
        made += inputs
    assert first is not None
    return first, made


def main() -> None:
    """Load, go on, store, and tell: the arguments are the address of a store and the
    tokens.
    """
    url, *texts = sys.argv[1:]
    tokens = list(map(int, texts))
    model = make_model()
    with blocking.open_store(url) as store:
        cache, matched = load_cache(store, model, tokens, name=NAME, block_tokens=8)
        _, made = complete(model, cache, tokens)
        save_cache(store, model, tokens, cache, name=NAME, block_tokens=8)
    sys.stdout.write(f"{matched} {' '.join(map(str, made))}")


if __name__ == "__main__":
    main()
