"""An engine in a process of its own that is asked line by line; what runs in it is a
program beside this file.

The program's argument is its settings, as JSON. It prints a line of JSON when it is
ready, and then answers each line of JSON on its standard input, {"prompts": [[token,
...], ...], "max_tokens": 8, "salt": ""}, with one that tells for each prompt its
tokens, after how many seconds the first one came, and how many tokens of the prompt
were not computed; without prompts, it forgets its own prefix cache. With "sounds":
[number, ...], each prompt has a sound, which is made from its number. What it has to say
goes to standard error. At the end of its input it ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

__all__ = ["Answer", "Ask", "EngineProcess", "answer_questions"]

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)), "PYTHONHASHSEED": "0"}


class Answer(NamedTuple):
    """What became of one prompt."""

    tokens: list[int]
    first_token_s: float
    cached_tokens: int


Ask = Callable[..., list[Answer]]
"""What an engine does: `prompts`, how many tokens to make of each (`max_tokens`), a
cache `salt`, and `sounds` if it is given some."""


class EngineProcess:
    """A program in another process, which runs an engine; `log` is where its standard
    error goes.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        log: IO[Any] | int | None = None,
    ) -> None:
        command = [sys.executable, str(Path(__file__).with_name(program)), json.dumps(settings)]
        environ = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environ)

    def wait_until_ready(self) -> None:
        """Wait until it can be asked; RuntimeError if it ends before."""
        self._answer()

    def ask(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8, salt: str = "", **more: Any
    ) -> list[Answer]:
        """Give it prompts, all at once, and wait for what it answers."""
        assert self.process.stdin is not None
        question = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "salt": salt, **more}
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return [Answer(*answer) for answer in self._answer()]

    def reset(self) -> None:
        """Have it forget its own prefix cache, where it has one."""
        self.ask([])

    def close(self) -> None:
        """End it: it writes to its store what it still has to."""
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.process.kill()
        self.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self.process.wait()}; its log says why")
        return json.loads(line)


def answer_questions(running: Callable[[dict[str, Any]], AbstractContextManager[Ask]]) -> None:
    """In the process: run an engine with the settings in the argument, and answer until
    the input ends.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whoever prints to standard output from here on does not disturb the answers
    with running(json.loads(sys.argv[1])) as ask:
        answers.write("[]\n")
        for line in sys.stdin:
            answers.write(json.dumps(ask(**json.loads(line))) + "\n")
    os._exit(0)  # LMCache leaves threads behind that never end
