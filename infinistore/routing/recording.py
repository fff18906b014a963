"""Writes down what a router is asked, as a trace for `infinistore simulate`.

Nothing of a trace tells a prompt. An id stands for all tokens up to the end of a block,
and is a hash with a key that ends with the process: whoever has the file cannot try
whether somebody asked a certain thing.
"""

import fcntl
import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import stat
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs
import trio

from infinistore.errors import ConfigError
from infinistore.routing.http import InThread
from infinistore.scheduling import Request
from infinistore.sizes import describe_size
from infinistore.traces import TRACE_BLOCK_TOKENS, read_trace

_log = logging.getLogger("infinistore.router")
_MOST_WAITING: Final = 1024
"""Lines that wait for the disk; more are lost."""
_ID_BYTES: Final = 6
_TAIL_BYTES: Final = 512
_LONGEST_LINE: Final = 1024 * 1024
_BEGINNING: Final = b'{"timestamp":'
"""That of a line."""
_USAGE: Final = re.compile(rb'"completion_tokens": ?(\d{1,9})')


@attrs.define
class AnswerLength:
    """Counts the tokens of an answer while its pieces are passed on: what its usage
    says, or else its events.
    """

    _events: int = 0
    _tail: bytes = b""

    @property
    def tokens(self) -> int:
        """How many came so far."""
        said = _USAGE.findall(self._tail)
        return int(said[-1]) if said else max(0, self._events - 1)  # the last event is [DONE]

    def counting(self, more: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
        """Return a function that returns the same pieces, and counts."""

        async def counted() -> bytes:
            piece = await more()
            self._events += piece.count(b"data: ")
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            return piece

        return counted


class Recording:
    """Appends a line for each prompt to a file, until that has `most_bytes`. What the
    disk does not take in time is lost, and the prompts are answered all the same.
    """

    def __init__(self, path: Path, most_bytes: int, in_thread: InThread) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._in_thread = in_thread
        self._key = secrets.token_bytes(16)
        self._unknown = 0
        self._lost = 0
        self._size = 0
        self._send, self._receive = trio.open_memory_channel[bytes](_MOST_WAITING)
        self._began: float
        """When the trace began, on Trio's clock."""

    def note(self, request: Request, model: str, arrived: float, output_tokens: int) -> None:
        """Write down a prompt that came at `arrived`, on Trio's clock, and the length
        of its answer.
        """
        line = {
            "timestamp": max(0, round(1e3 * (arrived - self._began))),
            "input_length": request.tokens,
            "output_length": output_tokens,
            "hash_ids": self._ids(request, model),
        }
        try:
            self._send.send_nowait(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except trio.WouldBlock:
            if not self._lost:
                _log.warning("the disk is too slow for the recording, which misses prompts (told once)")
            self._lost += 1
        except trio.BrokenResourceError:  # it is over
            pass

    def _ids(self, request: Request, model: str) -> list[int]:
        """Return an id for each block of a trace. If its end is within one of the
        engine's blocks, that one's end counts.
        """
        hashes: Sequence[object] = request.hashes
        names = []
        for end in range(TRACE_BLOCK_TOKENS, request.tokens + TRACE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS):
            blocks = min(math.ceil(end / request.block_tokens), len(hashes))
            names.append(f"{model} {min(end, request.tokens)} {hashes[blocks - 1] if blocks else self._unknown}")
        self._unknown += 1
        return [self._id(name) for name in names]

    def _id(self, name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), key=self._key, digest_size=_ID_BYTES).digest(), "little")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled, and then what is left.

        Raises:
            ConfigError: the file cannot be used.
        """
        file, last_s = await self._in_thread(self._opened)
        with file, self._receive:
            self._began = trio.current_time() - last_s
            task_status.started()
            try:
                while await self._written(file, await self._receive.receive()):
                    pass
            except trio.Cancelled:
                await self._written(file, b"")
                raise

    def _opened(self) -> tuple[io.FileIO, float]:
        """Open the file, to go on behind its last line. Returns when that came, too, in
        seconds since the trace began.
        """
        try:
            file = io.FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
        except OSError as error:
            raise ConfigError(f"--record {self._path}: {error.strerror}") from None
        with ExitStack() as stack:
            stack.enter_context(file)
            try:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConfigError("it is no plain file")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                before = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
                file.seek(before)
                whole, ended, torn = file.read(_LONGEST_LINE).rpartition(b"\n")
                if torn[: len(_BEGINNING)] != _BEGINNING[: len(torn)]:
                    raise ConfigError("its last line is none of a trace")
                last = read_trace([whole.rpartition(b"\n")[2].decode()])[-1].arrived_s if whole else 0.0
                self._size = file.seek(before + len(whole) + len(ended))
                file.truncate()  # after a power cut, a part of a line is left
            except BlockingIOError:
                raise ConfigError(f"--record {self._path}: another router writes to it; name another file") from None
            except OSError as error:
                raise ConfigError(f"--record {self._path}: {error.strerror}") from None
            except ValueError as error:
                raise ConfigError(f"--record {self._path}: not a trace; name another file ({error})") from None
            stack.pop_all()
        return file, last

    async def _written(self, file: io.FileIO, line: bytes) -> bool:
        """Write a line, and those that wait. False if that was the last time."""
        lines = [line]
        try:
            while True:
                lines.append(self._receive.receive_nowait())
        except trio.WouldBlock:
            pass
        text = b"".join(lines)
        if self._size + len(text) > self._most_bytes:
            size = describe_size(self._most_bytes)
            _log.warning("the recording has its most bytes, and ends", extra={"file": str(self._path), "most": size})
            return False
        try:
            with trio.CancelScope(shield=True):  # these lines are nowhere else
                await self._in_thread(_write_all, file, text)
        except OSError as error:
            _log.warning("the recording ends", extra={"file": str(self._path), "error": error.strerror})
            return False
        self._size += len(text)
        return True


def _write_all(file: io.FileIO, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]
