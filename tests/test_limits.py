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
import threading, time
import pytest

def test_stuck():
    time.sleep(3600)

def test_answers_for_every_error():
    while True:
        try:
            time.sleep(3600)
        except BaseException:
            pass

@pytest.fixture
def endless():
    yield
    time.sleep(3600)

def test_fails_before_its_fixture_is_stuck(endless):
    assert False

@pytest.mark.timeout(0)
def test_passes():
    pass
"""
AT_THE_END = """
import threading
import pytest

@pytest.mark.timeout(0)
def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()
"""
CONFTEST = """
import sys
sys.path.insert(0, {project!r})
from tests.limits import Limits
def pytest_configure(config):
    config.pluginmanager.register(Limits(grace_s=0.2), "limits")
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(project=str(Path(__file__).parents[1])))
    (folder / "test_these.py").write_text(tests)
    plugins = ["-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "xdist"]
    done = warm.run(
        [sys.executable, "-P", "-m", "pytest", "-q", *plugins, "--timeout", "0.2", *options, str(folder)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_is_stuck_is_named_and_the_rest_run(tmp_path: Path) -> None:
    code, shown = run(tmp_path, TESTS, "-n", "1")

    assert code == 1
    assert "crashed while running 'test_these.py::test_answers_for_every_error'" in shown
    for stuck in ("test_stuck", "test_fails_before_its_fixture_is_stuck"):  # fails, and ends if it still takes long
        assert re.search(f"(FAILED|ERROR|crashed while running) .*{stuck}", shown)
    assert "1 passed" in shown


def test_a_process_that_does_not_end_is_ended(tmp_path: Path) -> None:
    code, shown = run(tmp_path, AT_THE_END)

    assert code == 1
    assert "1 passed" in shown
    assert "Timeout (0:00:00" in shown
