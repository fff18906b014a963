"""Engines in processes of their own, for the tests of vLLM itself."""

import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bad_days.servers import ServerProcess

BENCH = Path(__file__).parents[3] / "bench"
sys.path.append(str(BENCH))  # where what runs vLLM in a process stands
from engine_process import Answer, EngineProcess  # noqa: E402
from served import Bench  # noqa: E402
from small_llama import VOCABULARY  # noqa: E402

__all__ = [
    "BENCH",
    "VOCABULARY",
    "Bench",
    "EngineProcess",
    "Engines",
    "cached",
    "made_prompts",
    "tokens_of",
    "transfer_config",
    "url_of",
]

PROMPT = 300


class Engines:
    """Starts engines with the connector; all end with the test's module. `log` is what
    one wrote.
    """

    def __init__(self, model: Path, logs: Path, stack: ExitStack) -> None:
        self._model = model
        self._logs = logs
        self._stack = stack

    def start(self, name: str, role: str = "kv_both", extra: Any = None, **settings: Any) -> EngineProcess:
        if extra is not None:
            settings["kv_transfer_config"] = transfer_config(role, extra)
        with (self._logs / name).open("w") as log:
            settings = {"model": str(self._model), "max_model_len": 512, **settings}
            engine = EngineProcess("vllm_engine.py", settings, log=log)
        return self._stack.enter_context(engine)

    def log(self, name: str) -> str:
        return (self._logs / name).read_text()


def transfer_config(role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "InfiniStoreConnector",
        "kv_connector_module_path": "infinistore.integrations.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def made_prompts(seed: int, count: int = 3, length: int = PROMPT) -> list[list[int]]:
    """Prompts that begin alike by a third, and then differ."""
    generator = random.Random(seed)

    def words(number: int) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(number)]

    head = words(length // 3)
    return [head + words(length - length // 3) for _ in range(count)]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def url_of(server: ServerProcess) -> str:
    return server.url.replace("tcp://", "infinistore://")
