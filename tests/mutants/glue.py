"""Bugs of the past, each put back into a copy of the product, and the tests that have
to notice: what holds the parts together has no model and no simulation to compare with.

`glue.toml` lists them. A process that a test starts imports the copy as well, because
PYTHONPATH says so to all of them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import attrs

__all__ = ["Bug", "Verdict", "failed_test", "hunt_all", "known_bugs"]

PROJECT = Path(__file__).parents[2]
LONGEST_S = 600
"""What the tests of one bug may take."""
LONGEST_TEST_S = 60
"""What one test may take: many bugs are that something has no end."""
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".venvs", "build", "dist", ".*_cache", ".hypothesis", "out")
_FAILED = re.compile(r"^(\S+?::.*?) (?:(?:FAILED|ERROR)(?:$| +\[|Traceback)|(?:Current t|T)hread 0x)", re.MULTILINE)


@attrs.frozen
class Bug:
    """A fix taken back: in one file, `new` instead of `old`."""

    name: str
    file: str
    old: str
    """What is there; it is there once."""
    new: str
    wrong: str
    """What goes wrong, in a line."""
    fix: str
    """The subject of the commit that mended it."""
    tests: list[str]
    """Files or folders of tests, one of which fails."""

    def source(self, top: Path = PROJECT) -> str:
        """Return the text of the file with the bug.

        Raises:
            ValueError: the product has changed, and this bug has to change with it.
        """
        source = (top / self.file).read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} places for the bug {self.name!r}, not one")
        return source.replace(self.old, self.new)


@attrs.frozen
class Verdict:
    """What the tests said of a bug."""

    bug: Bug
    by: str
    """The test that fails with it, and passes without it; empty if none does."""
    problem: str
    """Why that is not known; empty if it is."""
    seconds: float


def known_bugs(*, unseen: bool = False) -> list[Bug]:
    """The bugs of `glue.toml`; or those of which it says that no test sees them yet."""
    listed = tomllib.loads(Path(__file__).with_name("glue.toml").read_text())
    return [Bug(**one) for one in listed["unseen" if unseen else "bug"]]


def failed_test(output: str) -> str:
    """Return the first test that pytest says has failed; empty if none has. Not from
    its summary, which is missing where a test without an end was stopped in Trio.
    """
    found = _FAILED.search(output)
    return "" if found is None else found[1]


def hunt_all(bugs: Sequence[Bug], jobs: int, tell: Callable[[str], object]) -> list[Verdict]:
    """Look for each of these bugs, so many at a time; tell each verdict in a line. What
    fails without the bug as well has not found it.
    """
    with tempfile.TemporaryDirectory(prefix="glue-") as folder, ThreadPoolExecutor(jobs) as pool:
        unchanged = Path(folder) / "unchanged"
        shutil.copytree(PROJECT, unchanged, symlinks=True, ignore=_LEFT_OUT)
        verdicts = list(pool.map(partial(_hunt, unchanged=unchanged, tell=tell), bugs))
        by = list(dict.fromkeys(verdict.by for verdict in verdicts if verdict.by))
        code, output = _test(unchanged, by, "--maxfail=1000") if by else (0, "")
    red = set(_FAILED.findall(output))
    if code not in (0, 1):
        return [attrs.evolve(one, problem=one.problem or f"without it: {_ended(code, output)}") for one in verdicts]
    return [
        attrs.evolve(one, by="", problem=f"{one.by} fails without it, too") if one.by in red else one
        for one in verdicts
    ]


def _hunt(bug: Bug, unchanged: Path, tell: Callable[[str], object]) -> Verdict:
    start = time.monotonic()
    top = unchanged.parent / re.sub(r"\W+", "-", bug.name)
    by = problem = ""
    try:
        source = bug.source(unchanged)
        shutil.copytree(unchanged, top, symlinks=True, copy_function=os.link)
        (top / bug.file).unlink()  # a link, like all
        (top / bug.file).write_text(source)
        code, output = _test(top, bug.tests, "--maxfail=1")
        by = failed_test(output)
        if code not in (0, 1):
            problem = _ended(code, output)
    except ValueError as error:
        problem = str(error)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    verdict = Verdict(bug, "" if problem else by, problem, time.monotonic() - start)
    said = problem or (f"found by {by}" if by else "NOT FOUND")
    tell(f"{bug.name}: {said} ({verdict.seconds:.0f} s)")
    return verdict


def _ended(code: int | str, output: str) -> str:
    return f"pytest ended with {code}: {output[-600:]}"


def _test(top: Path, tests: Sequence[str], until: str) -> tuple[int | str, str]:
    """Run tests in a copy; return pytest's exit code and its output."""
    command = [str(Path(sys.executable).with_name("pytest")), until, "-v", "--tb=no", "-m", "not nightly"]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", f"--timeout={LONGEST_TEST_S}", *tests],
        cwd=top,
        env={**os.environ, "PYTHONPATH": str(top)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"no end in {LONGEST_S} s", process.communicate()[0]
    return process.returncode, output
