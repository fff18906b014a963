"""The levels of tests, and what keeps each test at its own.

- `unit`: no process, no socket of a network. Finds the faults of what does no I/O.
- `world`: servers and clients in the test's own process: in memory, in the simulated
  world, in virtual time, or over loopback. Finds faults of what they say to each other.
- `process`: programs, signals, forks. Finds what only a kernel can show.
- `nightly`: any of these, for long, or many of a kind. Finds what is rare.

TEST_ORDER=7 runs modules, and the tests of each, in another order.

A folder has a level; a test that starts or forks a process is marked `process`. A test
that does more than its level allows fails with the remedy. Only what the test's own
thread does counts: what other tests have left running in threads is not its doing.

`make test` leaves out `nightly`. `-m "unit or process"` is what differs between
Pythons. At the end, a line says how many processes were started, and how many forked
from a warm parent, which is a tenth of the cost.
"""

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["FOLDERS", "Levels"]

_UNIT: Final = "access allocators cluster core disk eviction fuzz mutants protocol scheduling"
_WORLD: Final = (
    "bad_days churn cli clients cluster_client cluster_io disk_io doctor dropin integrations monitor routing server"
    " shards simulation tensors transports"
)
_PROCESS: Final = "bench cluster_network deploy documentation end_to_end gpu packages packaging rdma site stress"
FOLDERS: Final = {
    folder: level
    for level, folders in (("unit", _UNIT), ("world", _WORLD), ("process", _PROCESS))
    for folder in folders.split()
}
"""The level of the tests of a folder. Those at the top are units."""

_START: Final = "subprocess.Popen"  # os.posix_spawn, too, is called by that alone
_FORKS: Final = ("os.fork", "os.forkpty", "tests.warm")
_CONNECTIONS: Final = ("socket.bind", "socket.connect")


class Levels:
    """A plugin of pytest: gives each test its level and sees that it stays there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._level: str | None = None
        self._main = threading.get_ident()
        self.started = 0
        self.forked = 0
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == _START:
            self.started += 1
        elif event in _FORKS:
            self.forked += 1
        elif event not in _CONNECTIONS:
            return
        level = self._level
        if level is None or level == "process" or threading.get_ident() != self._main:
            return
        if event not in _CONNECTIONS:
            self._level = None  # one error for each test
            raise AssertionError(f"a test of level `{level}` starts a process; mark it @pytest.mark.process")
        if level == "unit":
            self._level = None
            raise AssertionError(f"a test of level `unit` does {event}; mark it @pytest.mark.world")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark each test with its level, before `-m` chooses."""
        for item in items:
            if not any(item.get_closest_marker(level) for level in ("unit", "world", "process")):
                inner = item.path.relative_to(self._folder).parts
                item.add_marker(FOLDERS.get(inner[0], "unit") if len(inner) > 1 else "unit")
        if order := os.environ.get("TEST_ORDER"):
            chance = random.Random(order)
            modules = sorted({item.path for item in items})
            place = {path: chance.random() for path in modules}
            items.sort(key=lambda item: (place[item.path], chance.random()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Watch a test, and the fixtures that are made for it."""
        self._level = next(level for level in ("process", "world", "unit") if item.get_closest_marker(level))
        try:
            return (yield)
        finally:
            self._level = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the process that gathers what the workers did."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["processes"] = [self.started, self.forked]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker did."""
        started, forked = getattr(node, "workeroutput", {}).get("processes", [0, 0])
        self.started += started
        self.forked += forked

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the line."""
        terminalreporter.write_line(f"{self.started} processes were started, {self.forked} forked")
