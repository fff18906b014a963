"""A guard around a run: chance comes from the seed, and nothing else is asked for time,
chance or threads.

`guarded` makes Trio's scheduler deterministic, and turns off the garbage collector,
whose moments differ between versions of Python. What is refused raises `RuntimeError`
where it is used.
"""

import _thread
import datetime
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

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_CHANCE = tuple(name for name in random.__all__ if not isinstance(getattr(random, name), type))
"""What draws from the generator that all modules of a process share."""

_REFUSED: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in _CLOCKS),
    *((time, f"{name}_ns") for name in _CLOCKS),
    *((time, name) for name in ("sleep", "localtime", "gmtime", "ctime", "asctime", "strftime")),
    *((random, name) for name in _CHANCE),
    *((random.SystemRandom, name) for name in ("random", "getrandbits", "randbytes")),  # it may be made
    *((secrets, name) for name in ("token_hex", "token_bytes", "token_urlsafe", "randbits", "randbelow", "choice")),
    (os, "urandom"),
    (os, "getrandom"),
    (uuid, "uuid1"),
    (uuid, "uuid4"),
    (_thread, "start_new_thread"),
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


class _LikeItsBase(type):
    """The class of stand-ins: what the class that one stands in for has made is one of
    its instances, too.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _without_now(base: type, *names: str) -> type:
    """Return a stand-in for a class whose own methods cannot be replaced."""
    refused = {name: staticmethod(_refuse(f"{base.__name__}.{name}")) for name in names}
    return _LikeItsBase(base.__name__, (base,), refused)


_STAND_INS: tuple[tuple[Any, str, type], ...] = (
    (random, "Random", _SeededOnly),
    (datetime, "datetime", _without_now(datetime.datetime, "now", "utcnow", "today")),
    (datetime, "date", _without_now(datetime.date, "today")),
)


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
        for owner, name, stand_in in _STAND_INS:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
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
