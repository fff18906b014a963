"""Servers, and monitors as people start them: in pseudo-terminals, in processes of
their own. Without a terminal, the monitor runs in this process, as the servers do.
"""

import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cli.in_process import ServerHere, run_here, server_here

from .emulator import Emulator

INFINISTORE = (sys.executable, "-W", "error", "-m", "infinistore")
# The terminal becomes the one that controls the new session, as a terminal window makes
# it.
_LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
way, what, *arguments = sys.argv[1:]
if not way:
    os.execv(what, [what, *arguments])
exec(what)
"""
_MAIN = "from infinistore.cli import main; main(arguments)"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every process sees: no settings of the person who runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INFINISTORE_", "NO_COLOR"))}
    runtime_folder = tmp_path_factory.mktemp("run")
    return inherited | {
        "XDG_RUNTIME_DIR": str(runtime_folder), "TERM": "xterm", "PYTHONUTF8": "1", "COLUMNS": "", "LINES": "",
    }  # fmt: skip


def running_server(environment: Mapping[str, str], port: int = 0) -> AbstractContextManager[ServerHere]:
    """Run a server at a port of its own, or at this one."""
    flags = ["--service-port", str(port), "--unix-socket", "off", "--prealloc-size", "16MiB"]
    return server_here(environment, *flags)


@pytest.fixture(scope="module")
def url(environment: dict[str, str]) -> Iterator[str]:
    """The address of a server, one for all tests of a module."""
    with running_server(environment) as server:
        yield server.url


class Session:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], size: tuple[int, int]) -> None:
        self._ours, self._theirs = pty.openpty()
        self._set_size(*size)
        self.before = termios.tcgetattr(self._theirs)
        self.screen = Emulator(*size)
        if tuple(arguments[: len(INFINISTORE)]) == INFINISTORE:  # which is imported already
            arguments = ["-c", _MAIN, *arguments[len(INFINISTORE) :]]
        elif arguments[:2] == [sys.executable, "-c"]:
            arguments = arguments[1:]
        else:
            arguments = ["", *arguments]
        self.process = warm.Popen(
            [sys.executable, "-W", "error", "-c", _LAUNCH, *arguments],
            env=environment,
            start_new_session=True,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
        )

    def _set_size(self, width: int, height: int) -> None:
        ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window; the terminal tells the program."""
        self.screen.resize(width, height)
        self._set_size(width, height)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._ours, keys.encode())

    def wait_until(self, condition: Callable[[Emulator], object]) -> None:
        """Read what the program writes until the screen is as wanted. pytest's timeout
        bounds it.
        """
        while not condition(self.screen):
            self.screen.feed(os.read(self._ours, 65536))

    def wait_for(self, text: str) -> None:
        """Read until the screen shows a text."""
        self.wait_until(lambda screen: text in screen.text)

    def end(self) -> int:
        """Read until the program has put the screen back, and return its exit code."""
        code = self.process.wait()
        os.set_blocking(self._ours, False)
        try:
            while True:
                self.screen.feed(os.read(self._ours, 65536))
        except BlockingIOError:
            return code

    @property
    def settings(self) -> list[Any]:
        """The terminal's settings now."""
        return termios.tcgetattr(self._theirs)

    def is_restored(self) -> bool:
        """Whether the terminal is as it was before."""
        return (self.settings, self.screen.alternate, self.screen.cursor_visible) == (self.before, False, True)

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


Start = Callable[..., Session]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """What starts a program in a terminal."""
    sessions: list[Session] = []

    def make(*arguments: str, size: tuple[int, int] = (80, 24), **variables: str) -> Session:
        sessions.append(Session(list(arguments), environment | variables, size))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def monitor(start: Start, url: str) -> Session:
    """A monitor of the server in a terminal of 80 x 24, which has drawn its first
    screen.
    """
    session = start(*INFINISTORE, "monitor", url, "--interval", "0.2")
    session.wait_for("serving")
    session.wait_for("client, by traffic")
    return session


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `infinistore ARGUMENTS` without a terminal, to its end."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        done = run_here(*arguments, environment=environment, cwd=tmp_path)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run
