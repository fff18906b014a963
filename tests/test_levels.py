"""A test that does more than its level allows fails; the rest run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

TESTS = """
import os, socket, subprocess, sys
import pytest

def starts():
    subprocess.run([sys.executable, "-c", ""], check=True)

def forks():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

def binds():
    with socket.create_server(("127.0.0.1", 0)):
        pass

ALL = [starts, forks, binds, socket.socketpair]

@pytest.mark.parametrize("act", ALL)
def test_here(act):
    act()[0].close() if act is socket.socketpair else act()

@pytest.mark.process
@pytest.mark.parametrize("act", [starts, forks, binds])
def test_process(act):
    act()
"""
CONFTEST = """
import sys
from pathlib import Path
sys.path.insert(0, {project!r})
from tests.levels import Levels
def pytest_configure(config):
    config.pluginmanager.register(Levels(Path(__file__).parent), "levels")
"""


@pytest.mark.process
def test_units_do_no_io_and_only_processes_start_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(project=str(Path(__file__).parents[1])))
    for folder in ("core", "clients"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text(TESTS)

    done = warm.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:trio",
         "--import-mode=importlib", str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip

    failed = re.findall(r"^FAILED \w+/test_(\w+)\.py::test_(\w+)\[(\w+)\]", done.stdout, flags=re.MULTILINE)
    assert sorted(failed) == [
        ("clients", "here", "forks"),
        ("clients", "here", "starts"),
        ("core", "here", "binds"),
        ("core", "here", "forks"),
        ("core", "here", "starts"),
    ]
    assert "4 processes were started, 4 forked" in done.stdout
