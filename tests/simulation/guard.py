"""A guard around a run: chance comes from the seed, and nothing else is asked for time,
chance or threads.

`guarded` makes Trio's scheduler deterministic, and turns off the garbage collector,
whose moments differ between versions of Python. What is refused raises `RuntimeError`
where it is used.
"""

import gc
import logging
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import trio
import trio._core._run as trio_run

__all__ = ["guarded"]

_REFUSED: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")),
    (time, "sleep"),
    *((random, name) for name in ("random", "randrange", "randint", "getrandbits", "choice", "shuffle", "uniform")),
    *((secrets, name) for name in ("token_hex", "token_bytes", "randbits", "randbelow", "choice")),
    (os, "urandom"),
    (uuid, "uuid4"),
    (threading.Thread, "start"),
    (trio.to_thread, "run_sync"),
)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{what} was used inside of a simulation")

    return refuse


class _SeededOnly(random.Random):
    def __init__(self, *seed: Any) -> None:
        if not seed or seed[0] is None:
            raise RuntimeError("a generator without a seed was made inside of a simulation")
        super().__init__(*seed)


class _NoTime:
    """The time of log records, which nobody reads."""

    @staticmethod
    def time() -> float:
        return 0.0

    @staticmethod
    def time_ns() -> int:
        return 0


@contextmanager
def guarded(generator: random.Random) -> Iterator[None]:
    """Run the block with Trio's chance from this generator, and nothing that differs
    between two runs.
    """
    with ExitStack() as stack:
        for owner, name in _REFUSED:
            stack.enter_context(mock.patch.object(owner, name, _refuse(f"{owner.__name__}.{name}")))
        stack.enter_context(mock.patch.object(random, "Random", _SeededOnly))
        stack.enter_context(mock.patch.object(logging, "time", _NoTime))
        stack.enter_context(mock.patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        stack.enter_context(mock.patch.object(trio_run, "_r", generator))
        torch = sys.modules.pop("torch", None)  # with it, leases last as long as variables that refer to them
        if torch is not None:
            stack.callback(sys.modules.__setitem__, "torch", torch)
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        yield
