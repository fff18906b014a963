"""InfiniStore as people install it: editable, from a wheel, and from a wheel that was
built from an sdist.

Everything is built from this checkout and installed into fresh virtual environments
without the network: the dependencies come from the environment that runs the tests,
through a path file, and the build backend runs unisolated.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest

PROJECT = Path(__file__).resolve().parents[2]
KINDS = ["editable", "wheel"]
"""Of installations that are made at night, besides the one that has been through all:
an sdist, and the wheel of it.
"""


@attrs.frozen
class Installation:
    """A virtual environment with InfiniStore in it, and a working directory far from
    the checkout.
    """

    kind: str
    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.root / "lib" / version / "site-packages"

    @property
    def package(self) -> Path:
        """The folder that `import infinistore` must find."""
        return (PROJECT if self.kind == "editable" else self.site_packages) / "infinistore"

    def run(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run a program of this environment outside the checkout."""
        return run(arguments, cwd=self.root)

    def execute(self, source: str, *arguments: str) -> str:
        """Run Python source here and return what it printed. A failure shows the
        traceback.
        """
        done = self.run(self.python, "-c", source, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@attrs.frozen
class Distributions:
    """What this checkout builds into."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


def run(command: Sequence[str | Path], *, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def run_or_fail(command: Sequence[str | Path], *, cwd: Path) -> None:
    done = run(command, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def build(source: Path, target: str, into: Path) -> Path:
    """Build the sdist or wheel of the tree at `source`; return the file."""
    run_or_fail([sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into], cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    place = tmp_path_factory.mktemp("distributions")
    sdist = build(PROJECT, "sdist", place / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(place / "unpacked", filter="data")
    (unpacked,) = (place / "unpacked").iterdir()
    return Distributions(
        sdist=sdist,
        wheel=build(PROJECT, "wheel", place / "wheel"),
        wheel_of_sdist=build(unpacked, "wheel", place / "wheel_of_sdist"),
    )


@pytest.fixture(
    scope="session", params=[*(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS), "wheel of the sdist"]
)
def installation(
    request: pytest.FixtureRequest, distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    made = Installation(kind=request.param, root=tmp_path_factory.mktemp("environment").resolve())
    venv.create(made.root, with_pip=False, symlinks=True)
    # Folders named in a path file are searched, but their own path files are not read:
    # an editable InfiniStore in the environment of the tests does not shine through.
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (made.site_packages / "dependencies_of_the_tests.pth").write_text("\n".join(sorted(dependencies)) + "\n")
    what: dict[str, list[str | Path]] = {
        "editable": ["--editable", PROJECT],
        "wheel": [distributions.wheel],
        "wheel of the sdist": [distributions.wheel_of_sdist],
    }
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet", "--no-index"]
    # --ignore-installed: pip must neither count nor touch the InfiniStore of the
    # environment that runs the tests.
    options = ["--ignore-installed", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    run_or_fail([*pip, *options, *what[made.kind]], cwd=made.root)
    return made
