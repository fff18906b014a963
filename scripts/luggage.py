"""Pack what a machine with a GPU and without a network lacks.

    python scripts/luggage.py [--into build/luggage]

It downloads wheels for Python 3.12 on x86-64, and writes `run` beside them. The folder
goes there with the checkout, and `build/luggage/run` installs, tests and measures
(docs/gpu.md). That machine has what is heavy: PyTorch for CUDA, transformers, numpy and
cuda-bindings. Everything else that pyproject.toml asks for is packed, even if the
machine may have it, since it may have it too old.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["HEAVY", "LIMIT_BYTES", "for_lmcache", "main", "name_of", "needed"]

PROJECT: Final = Path(__file__).resolve().parents[1]
HEAVY: Final = frozenset({"torch", "transformers", "numpy", "cuda-bindings"})
"""What a machine with a GPU has anyway."""
EXTRAS: Final = ("disk", "torch", "cuda", "transformers")
TESTS: Final = frozenset({"hypothesis", "pytest", "pytest-timeout", "pytest-trio"})
"""Of what the tests need, what those in tests/gpu do."""
LIMIT_BYTES: Final = 54 << 20
"""The checkout, which goes with it, has 10 MiB; together they are to stay below 64."""
_PLATFORMS: Final = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_RUN: Final = """#!/bin/sh
# Install what lies here, and run the tests and benchmarks for a GPU. Takes the options
# of bench/gpu_machine.py; --help lists them.
here=$(cd "$(dirname "$0")" && pwd)
exec python3 "$here/../../bench/gpu_machine.py" --luggage "$here" "$@"
"""


def name_of(requirement: str) -> str:
    """Return the normalised name of the package that a requirement asks for."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def needed(project: Path = PROJECT) -> list[str]:
    """Return the requirements of this project and of its tests on a GPU that are not
    heavy.
    """
    told = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = told["optional-dependencies"]
    found = [*told["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    found += [one for one in extras["test"] if name_of(one) in TESTS]
    return sorted({one for one in found if name_of(one) not in HEAVY and name_of(one) != name_of(told["name"])})


def for_lmcache(project: Path = PROJECT) -> list[str]:
    """Return what LMCache needs for its storage, and is not heavy."""
    lines = (project / "requirements" / "lmcache.txt").read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    skipped = HEAVY | TESTS | {"numba", "safetensors", "trustme", "uvloop"}
    return [one for one in found if name_of(one) not in skipped]


def _download(into: Path, requirements: Iterable[str], *options: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(into)]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [option for name in _PLATFORMS for option in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, *options, *requirements], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=PROJECT / "build" / "luggage", help="folder (build/luggage)")
    parser.add_argument("--without-lmcache", action="store_true", help="leave out LMCache, to compare with")
    given = parser.parse_args(arguments)
    wheels = given.into / "wheels"
    if given.into.exists() and not wheels.is_dir() and any(given.into.iterdir()):
        parser.error(f"--into {given.into}: there is something else, which would be removed; name another folder")
    shutil.rmtree(given.into, ignore_errors=True)
    given.into.mkdir(parents=True)
    _download(wheels, needed())
    (given.into / "requirements.txt").write_text("\n".join(needed()) + "\n")
    if not given.without_lmcache:
        lmcache = (PROJECT / "requirements" / "lmcache.no-deps.txt").read_text().splitlines()
        _download(given.into / "lmcache", for_lmcache())
        _download(given.into / "lmcache", [one for one in lmcache if one and one[0] != "#"], "--no-deps")
    run = given.into / "run"
    run.write_text(_RUN)
    run.chmod(0o755)
    size = sum(file.stat().st_size for file in given.into.rglob("*.whl"))
    print(f"{given.into}: {len(list(given.into.rglob('*.whl')))} wheels, {size / (1 << 20):.1f} MiB")
    if size > LIMIT_BYTES:
        print(f"that is more than {LIMIT_BYTES >> 20} MiB: try --without-lmcache", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
