"""A model of transformers with its cache in a store, as `engine_process` runs it:
settings are `model` and `url`.

python bench/transformers_engine.py '{"model": FOLDER, "url":
"infinistore://127.0.0.1:22345"}'
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine_process import Answer, Ask, answer_questions
from infinistore import blocking
from infinistore.integrations.transformers import load_cache, save_cache


@contextmanager
def running(settings: dict[str, Any]) -> Iterator[Ask]:
    """Load the model, and open the store."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(settings["model"])
    with blocking.open_store(settings["url"]) as store:
        yield lambda prompts, max_tokens, salt: [_complete(model, store, p, max_tokens, salt) for p in prompts]


def _complete(model: Any, store: blocking.BlockingStore, prompt: list[int], max_tokens: int, salt: str) -> Answer:
    import torch

    with torch.no_grad():
        started = time.perf_counter()
        cache, matched = load_cache(store, model, prompt, name="small-llama", salt=salt)
        inputs, made, first_s = prompt[matched:], list[int](), 0.0
        for number in range(max_tokens):
            output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            inputs = [int(output.logits[0, -1].argmax())]
            made += inputs
            if not number:
                first_s = time.perf_counter() - started
        save_cache(store, model, prompt, cache, name="small-llama", salt=salt)
    return Answer(made, first_s, matched)


if __name__ == "__main__":
    answer_questions(running)
