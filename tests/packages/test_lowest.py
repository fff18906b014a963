"""The lowest versions that pyproject.toml declares are enough: what reaches them is
tested with them, on the lowest Python.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
TESTS = [
    "tests/protocol",
    "tests/disk",
    "tests/cli/test_command_line.py",
    "tests/clients/test_stores.py",
    "tests/clients/test_disks.py",
    "tests/server/test_details.py",
    "tests/server/test_http.py",
    "tests/server/test_metrics.py",
]
RUNNERS = ["greenlet", "hypothesis", "pytest", "pytest-timeout", "pytest-trio", "pytest-xdist", "trustme"]


def lowest() -> list[str]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return [one.replace(">=", "==") for one in (*project["dependencies"], *project["optional-dependencies"]["disk"])]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (TOOLS / "pipx").exists(), reason="`make test-packages` runs this")
def test_the_lowest_declared_versions_are_enough(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INFINISTORE_"))}
    subprocess.run(["python3.11", "-m", "venv", tmp_path], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *lowest(), *RUNNERS], check=True)
    subprocess.run(
        # Old packages warn about the new ones that they stand on.
        [python, "-m", "pytest", "-q", "-m", "not nightly", "-W", "ignore::DeprecationWarning", *TESTS],
        cwd=PROJECT,
        env=inherited | {"PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
    )
