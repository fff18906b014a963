"""Other Pythons that can run a simulation of this tree: environments that `make test
PYTHON=...` has made here.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ROOT", "other_pythons"]

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENTS = (".venv", ".venvs/python3.*")
_VERSION = "import sys, tests.simulation.simulate; print('%d.%d' % sys.version_info[:2])"


def other_pythons() -> dict[str, Path]:
    """Return an interpreter for each other minor version that has what tests need."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    found: dict[str, Path] = {}
    for python in _interpreters():
        asked = subprocess.run([python, "-c", _VERSION], cwd=ROOT, capture_output=True, text=True, check=False)
        version = asked.stdout.strip()
        if asked.returncode == 0 and version != here:
            found.setdefault(version, python)
    return found


def _interpreters() -> Iterator[Path]:
    for environment in _ENVIRONMENTS:
        for python in sorted(ROOT.glob(f"{environment}/bin/python")):
            if python.parents[1] != Path(sys.prefix):
                yield python
