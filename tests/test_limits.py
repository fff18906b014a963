"""A test that is stuck fails, whatever it makes of the error, and the rest run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.process
TESTS = """
import signal, subprocess, sys, time
import pytest
from tests import limits

def ring():  # as the clock does, which is slower than any test here
    assert all(0 < seconds <= 3600 for seconds in signal.getitimer(signal.ITIMER_REAL))
    signal.raise_signal(signal.SIGALRM)

def test_stuck():
    ring()
    time.sleep(3600)

def test_answers_for_every_error():
    while True:
        try:
            ring()
            time.sleep(3600)
        except BaseException:
            pass

@pytest.fixture
def endless():
    yield
    ring()
    time.sleep(3600)

def test_fails_before_its_fixture_is_stuck(endless):
    assert False

def test_is_at_work_until_it_has_had_its_share(monkeypatch):
    began = limits.used_s()
    for used_s in (100, 200, 3500):
        monkeypatch.setattr(limits, "used_s", lambda: began + used_s)
        ring()
    monkeypatch.setattr(limits, "used_s", lambda: began + 3700)
    with pytest.raises(pytest.fail.Exception):
        ring()

def test_what_it_started_is_at_work():
    before = limits.used_s()
    works = "while True: print(sum(range(100_000)), flush=True)"
    with subprocess.Popen([sys.executable, "-c", works], stdout=subprocess.PIPE) as child:
        while limits.used_s() - before < 0.1:
            child.stdout.readline()
        child.kill()
    assert limits.used_s() - before >= 0.1

def test_is_at_work_for_ever(monkeypatch):
    began = limits.used_s()
    for used_s in range(100, 1000, 100):
        monkeypatch.setattr(limits, "used_s", lambda: began + used_s)
        ring()
    monkeypatch.setattr(limits, "used_s", lambda: began + 1000)
    with pytest.raises(pytest.fail.Exception):
        ring()

def test_passes():
    pass
"""
AT_THE_END = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()
"""
CONFTEST = """
import sys
sys.path.insert(0, {project!r})
from tests.limits import Limits
def pytest_configure(config):
    config.pluginmanager.register(Limits(grace_s={grace_s}), "limits")
"""


def run(folder: Path, tests: str, *options: str, grace_s: float) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(project=str(Path(__file__).parents[1]), grace_s=grace_s))
    (folder / "test_these.py").write_text(tests)
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist"]
    done = warm.run(
        [sys.executable, "-P", "-m", "pytest", "-q", *plugins, "--timeout", "3600", *options, str(folder)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_is_stuck_is_named_and_the_rest_run(tmp_path: Path) -> None:
    code, shown = run(tmp_path, TESTS, "-n", "1", grace_s=3600)

    assert code == 1
    assert "crashed while running 'test_these.py::test_answers_for_every_error'" in shown
    for failed in ("FAILED .*test_stuck", "(FAILED|ERROR) .*test_fails_before_its_fixture_is_stuck"):
        assert re.search(failed, shown)
    assert "3 failed, 4 passed, 1 error" in shown


def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    code, shown = run(tmp_path, AT_THE_END, grace_s=0.2)

    assert code == 1
    assert "1 passed" in shown
    assert "Timeout (0:00:00" in shown
