"""vLLM on a CPU, as `engine_process` runs it: settings are arguments of `vllm.LLM`, on
top of what suits a small model. Its log says how many tokens are in a block, which
depends on the processor for models with states.

python bench/vllm_engine.py '{"model": FOLDER, "kv_transfer_config": {...}, ...}'
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from engine_process import Answer, Ask, answer_questions

_SAMPLES_A_S = 16_000
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
}


@contextmanager
def running(settings: dict[str, Any]) -> Iterator[Ask]:
    """Run vLLM in this process."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from vllm import LLM
    from vllm.config import KVEventsConfig

    if "kv_events_config" in settings:
        settings = {**settings, "kv_events_config": KVEventsConfig(**settings["kv_events_config"])}
    engine: Any = LLM(**{**_SETTINGS, **settings}).llm_engine
    print(f"blocks of {engine.vllm_config.cache_config.block_size} tokens", file=sys.stderr)
    yield partial(_generate, engine)
    engine.engine_core.shutdown()


def _generate(
    engine: Any, prompts: list[list[int]], max_tokens: int, salt: str, sounds: Sequence[int] = ()
) -> list[Answer]:
    from vllm import SamplingParams, TokensPrompt

    if not prompts:
        engine.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        more: dict[str, Any] = {"cache_salt": salt} if salt else {}
        if sounds:
            more["multi_modal_data"] = {"audio": _sound(sounds[number])}
        tokens = TokensPrompt(prompt_token_ids=prompt, **more)
        engine.add_request(str(number), tokens, sampling)
    first_s: dict[str, float] = {}
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s.setdefault(output.request_id, time.perf_counter() - started)
            if output.finished:
                ended[output.request_id] = output
    outputs = [ended[str(number)] for number in range(len(prompts))]
    return [Answer(list(o.outputs[0].token_ids), first_s[o.request_id], o.num_cached_tokens or 0) for o in outputs]


def _sound(number: int) -> Any:
    """Return two seconds of noise, and how many samples a second has."""
    import numpy as np

    return np.random.default_rng(number).standard_normal(2 * _SAMPLES_A_S).astype(np.float32), _SAMPLES_A_S


if __name__ == "__main__":
    answer_questions(running)
