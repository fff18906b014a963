"""vLLM on a CPU, in a process of its own that is asked line by line.

    python bench/vllm_engine.py '{"model": FOLDER, "kv_transfer_config": {...}, ...}'

The argument holds what `vllm.LLM` takes. It prints a line of JSON when it is ready, and then answers each line of JSON
on its standard input, {"prompts": [[token, ...], ...], "max_tokens": 8, "salt": ""}, with one that tells for each
prompt its tokens, after how many seconds the first one came, and how many tokens of the prompt were not computed. What
vLLM has to say goes to standard error. At the end of its input it ends.

`VllmEngine` runs it, and is what the other programs here use.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

__all__ = ["Answer", "VllmEngine"]

_CPU_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
}


class Answer(NamedTuple):
    """What became of one prompt."""

    tokens: list[int]
    first_token_s: float
    cached_tokens: int


class VllmEngine:
    """vLLM in another process. `settings` are arguments of `vllm.LLM` on top of what suits a small model on a CPU."""

    def __init__(
        self,
        model: Path,
        settings: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        log: IO[Any] | int | None = None,
    ) -> None:
        given = {**_ENGINE, "model": str(model), **(settings or {})}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, json.dumps(given)],
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            text=True,
            env={**os.environ, **_CPU_ENVIRONMENT, **(environment or {})},
        )

    def wait_until_ready(self) -> None:
        """Wait until it can be asked; RuntimeError if it ends before."""
        self._answer()

    def ask(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, salt: str = "") -> list[Answer]:
        """Give it prompts, all at once, and wait for what it answers."""
        assert self.process.stdin is not None
        question = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "salt": salt}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return [Answer(*answer) for answer in self._answer()]

    def close(self) -> None:
        """End it: it writes to its store what it still has to."""
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self.process.kill()
            self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self.process.wait()}; its log says why")
        return json.loads(line)


def _generate(engine: Any, prompts: list[list[int]], max_tokens: int, salt: str) -> list[Answer]:
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    for number, prompt in enumerate(prompts):
        tokens = TokensPrompt(prompt_token_ids=prompt, **({"cache_salt": salt} if salt else {}))
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


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whoever prints to standard output from here on does not disturb the answers
    settings = json.loads(sys.argv[1])

    from vllm import LLM

    engine = LLM(**settings).llm_engine
    answers.write("[]\n")
    for line in sys.stdin:
        answers.write(json.dumps(_generate(engine, **json.loads(line))) + "\n")
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
