"""Python, required and optional packages, and jemalloc."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import attrs

from infinistore.doctor.findings import Finding, bad, good, warning
from infinistore.transports.rdma.ibverbs import load_pyverbs

_TOPIC = "software"
_OPTIONAL = ("numpy", "torch", "uvloop", "vllm", "lmcache", "sglang")
_TRY_JEMALLOC = """
from infinistore.allocators import create_allocator, prepare_process
from infinistore.errors import ConfigError
try:
    prepare_process("jemalloc")
    create_allocator("jemalloc", 65536)
except ConfigError as error:
    print(error)
"""


@attrs.frozen
class Software:
    """The installed software, or a description of it."""

    python: str
    executable: str
    requirements: Sequence[str]
    """From the package's metadata: `trio>=0.25`, `torch>=2.2; extra == "torch"`."""
    version_of: Callable[[str], str | None]
    """The version of a package; None if it is not installed."""
    pyverbs: Callable[[], str]
    """Returns its version, or raises NoRdma with a remedy."""
    try_jemalloc: Callable[[], str]
    """Why jemalloc cannot be used, even by a prepared process; empty if it can."""


def this_software() -> Software:
    """Return the software of this process."""
    return Software(
        f"{sys.implementation.name} {sys.version.split()[0]}",
        sys.executable,
        _requirements(),
        _version_of,
        _pyverbs,
        _try_jemalloc,
    )


def examine_software(software: Software) -> Iterator[Finding]:
    """Yield the findings about the software."""
    yield good(_TOPIC, "Python", f"{software.python}, {software.executable}")
    yield _packages(software)
    found = [f"{name} {version}" for name in _OPTIONAL if (version := software.version_of(name))]
    yield good(_TOPIC, "optional packages", ", ".join(found) or "none")
    yield _jemalloc(software)


def _packages(software: Software) -> Finding:
    found, missing, old, wanted = [], [], [], []
    for requirement in software.requirements:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        version, least = software.version_of(name), re.search(r">=\s*([\d.]+)", requirement)
        if version is None:
            missing.append(name)
            wanted.append(requirement)
        elif least is not None and _numbers(version) < _numbers(least[1]):
            old.append(f"{name} {version} (needs {least[1]})")
            wanted.append(requirement)
        else:
            found.append(f"{name} {version}")
    if missing or old:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"too old: {', '.join(old)}"] * bool(old)
        remedy = f"{software.executable} -m pip install {shlex.join(wanted)}"
        return bad(_TOPIC, "packages", "; ".join(parts), remedy)
    return good(_TOPIC, "packages", ", ".join(found))


def _jemalloc(software: Software) -> Finding:
    problem = software.try_jemalloc()
    if problem:
        what, _, remedy = problem.partition(": ")
        return warning(_TOPIC, "jemalloc", what, remedy or "install libjemalloc2, or choose --allocator bitmap")
    return good(
        _TOPIC,
        "jemalloc",
        "can be loaded. A server with --allocator jemalloc starts itself again for it; a program that embeds a store "
        "calls infinistore.allocators.prepare_process('jemalloc') first",
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _requirements() -> Sequence[str]:
    try:
        return metadata.requires("infinistore-trio") or ()
    except metadata.PackageNotFoundError:  # it was not installed: the path alone leads to it
        return ()


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pyverbs() -> str:
    load_pyverbs()
    version = _version_of("pyverbs")
    if version is None:  # the distribution's has no metadata; it is made together with the library, which has its name
        libraries = [*Path("/usr/lib").glob("*/libibverbs.so.1.*"), *Path("/usr/lib64").glob("libibverbs.so.1.*")]
        version = next((path.name.partition(".so.1.")[2].partition(".")[2] for path in libraries), "of unknown version")
    return version


def _try_jemalloc() -> str:
    """Check in a separate process, because loading changes a process permanently."""
    command = [sys.executable, "-P", "-c", _TRY_JEMALLOC]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired:
        return "a process that loads it did not end within 30 s"
    if done.returncode:
        return f"a process that loads it ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    return done.stdout.strip()
