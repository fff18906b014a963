"""Programs that a benchmark starts and stops: each in a session of its own with a log
file, with a limit for everything that is waited for.

A signal at the terminal reaches the benchmark alone, which then ends them all.
"""

import os
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trio

__all__ = ["Program", "ProgramError", "free_port", "running"]

_STOP_S = 30.0
_STOP_HURRIED_S = 3.0
_TIDY_UP_S = 10.0


class ProgramError(Exception):
    """A program ended, or did not do in time what it is for."""


class Program:
    """A process that runs; `running` starts it. `name` is for people."""

    def __init__(self, name: str, process: trio.Process, log: Path, see: Callable[[str], None]) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._see = see
        self._ended = trio.Event()
        self._waiting: list[tuple[re.Pattern[str], trio.Event]] = []

    async def read(self) -> None:
        """Write what it prints to the log, until it ends."""
        stream = self._process.stdout
        assert stream is not None
        rest = ""
        with self.log.open("ab", buffering=0) as log:
            async for part in stream:
                log.write(part)
                *lines, rest = re.split(r"[\r\n]", rest + part.decode(errors="replace"))
                for line in lines:
                    self._see(line)
                    for pattern, event in self._waiting:
                        if pattern.search(line):
                            event.set()
        self._ended.set()
        for _, event in self._waiting:
            event.set()

    async def wait_until_it_says(self, pattern: str, *, limit_s: float) -> None:
        """Wait for a line; ProgramError if it ends before, or does not come in time."""
        said = trio.Event()
        self._waiting.append((re.compile(pattern), said))
        with trio.move_on_after(limit_s):
            await said.wait()
        if self._ended.is_set() or not said.is_set():
            raise self._error("ended too early" if self._ended.is_set() else f"was not ready after {limit_s:.0f} s")

    async def wait_until_it_ends(self, *, limit_s: float) -> None:
        """Wait for its end; ProgramError if that is not in time, or a failure."""
        with trio.move_on_after(limit_s) as limit:
            await self._process.wait()
            await self._ended.wait()
        if limit.cancelled_caught:
            raise self._error(f"had not ended after {limit_s:.0f} s")
        if self._process.returncode:
            raise self._error(f"ended with status {self._process.returncode}")

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill it and what it has started, at once."""
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self, *, within_s: float) -> None:
        """Ask it to end, and kill what is left after this time.

        What it has started may go on for a while: Python has a process that removes the
        shared memory of those that were killed.
        """
        if self._process.returncode is None:
            self._process.terminate()
            with trio.move_on_after(within_s):
                await self._process.wait()
        if self._process.returncode is not None:
            with trio.move_on_after(_TIDY_UP_S):
                while self._has_left_something():  # noqa: ASYNC110 - the kernel tells of a group's end to nobody
                    await trio.sleep(0.05)
        await self.kill()

    def _has_left_something(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _error(self, what: str) -> ProgramError:
        with self.log.open(errors="replace") as log:
            last = "".join(deque(log, maxlen=20))
        return ProgramError(f"{self.name} {what}. The end of its log, {self.log}:\n{last}")


@asynccontextmanager
async def running(
    nursery: trio.Nursery,
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    see: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Program]:
    """Run a program until the block is left; `see` gets each line that it prints."""
    process = await trio.lowlevel.open_process(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    program = Program(name, process, log, see)
    nursery.start_soon(program.read)
    try:
        yield program
    finally:
        hurried = trio.current_effective_deadline() == float("-inf")
        with trio.CancelScope(shield=True):
            await program.stop(within_s=_STOP_HURRIED_S if hurried else _STOP_S)


def free_port() -> int:
    """Return a port of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
