"""The packages as a user installs them, with each installer on each Python that is
here, from the registry that pip is set up for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

PROJECT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
VERSIONS = ["3.11", "3.12", "3.13"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (TOOLS / "pipx").exists(), reason="`make test-packages` runs this"),
]


def find_python(version: str) -> str | None:
    """Where a Python is: on the path, or kept by pyenv."""
    candidates = [shutil.which(f"python{version}") or ""]
    if shutil.which("pyenv"):
        latest = subprocess.run(["pyenv", "latest", version], capture_output=True, text=True, check=False).stdout
        prefix = subprocess.run(["pyenv", "prefix", latest.strip()], capture_output=True, text=True, check=False).stdout
        candidates.append(f"{prefix.strip()}/bin/python")
    check = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
    for python in candidates:
        if python and Path(python).exists() and subprocess.run([python, "-c", check], check=False).returncode == 0:
            return python
    return None


@attrs.frozen
class Packages:
    """What `make dist` builds."""

    wheel: Path
    sdist: Path


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INFINISTORE_"))}
    told = inherited | environment
    done = subprocess.run(command, cwd=cwd, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Both from one build, and the wheel the same when it is built a second time."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for folder in (first, second):
        run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=PROJECT)
    (wheel,), (sdist,), (again,) = first.glob("*.whl"), first.glob("*.tar.gz"), second.glob("*.whl")
    assert wheel.read_bytes() == again.read_bytes()
    return Packages(wheel, sdist)


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    found = find_python(request.param)
    if found is None:
        assert "INFINISTORE_RELEASE" not in os.environ, "a release is tried on every Python"
        pytest.skip(f"there is no Python {request.param} here")
    return found


def works(infinistore: Path, cwd: Path) -> bool:
    """Whether the installed command keeps blocks."""
    checks = json.loads(run(infinistore, "selftest", "--embedded", "--json", cwd=cwd))
    return bool(checks["ok"]) and len(checks["checks"]) > 3


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_pip_installs_it(packages: Packages, python: str, kind: str, tmp_path: Path) -> None:
    run(python, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    pip = tmp_path / "environment" / "bin" / "pip"
    run(pip, "install", "--quiet", getattr(packages, kind), cwd=tmp_path)
    run(pip, "check", cwd=tmp_path)
    assert works(tmp_path / "environment" / "bin" / "infinistore", tmp_path)


def test_uv_installs_it_as_a_tool(packages: Packages, python: str, tmp_path: Path) -> None:
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    run(TOOLS / "uv", "tool", "install", "--quiet", "--python", python, packages.wheel, cwd=tmp_path, **places)
    assert works(tmp_path / "bin" / "infinistore", tmp_path)


def test_pipx_installs_it(packages: Packages, python: str, tmp_path: Path) -> None:
    places = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    run(TOOLS / "pipx", "install", "--python", python, packages.wheel, cwd=tmp_path, **places)
    assert works(tmp_path / "bin" / "infinistore", tmp_path)


def test_the_lock_with_its_hashes_is_all_that_the_wheel_needs(packages: Packages, python: str, tmp_path: Path) -> None:
    run(TOOLS / "uv", "venv", "--quiet", "--python", python, tmp_path / "environment", cwd=tmp_path)
    install: list[str | Path] = [TOOLS / "uv", "pip", "install", "--quiet", "--python", tmp_path / "environment"]
    run(*install, "--require-hashes", "--requirement", PROJECT / "requirements" / "server.lock", cwd=tmp_path)
    run(*install, "--no-deps", "--no-index", packages.wheel, cwd=tmp_path)
    run(TOOLS / "uv", "pip", "check", "--python", tmp_path / "environment", cwd=tmp_path)
    assert works(tmp_path / "environment" / "bin" / "infinistore", tmp_path)


def test_the_sbom_names_everything_that_is_locked(tmp_path: Path) -> None:
    run("make", "dist", f"VENV={tmp_path}", cwd=PROJECT)
    sbom = json.loads((PROJECT / "build" / "sbom" / "infinistore-trio.cdx.json").read_text())
    lock = (PROJECT / "requirements" / "server.lock").read_text()
    locked = {line.split("==")[0] for line in lock.splitlines() if "==" in line and not line.startswith(" ")}
    assert {component["name"] for component in sbom["components"]} == locked
    assert sbom["metadata"]["component"]["name"] == "infinistore-trio"


def test_the_release_workflow_has_no_known_weakness() -> None:
    run(TOOLS / "zizmor", "--offline", "--pedantic", ".github/workflows", cwd=PROJECT)
