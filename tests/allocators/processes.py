"""Which strategies can run in this process, and how to run the rest in another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinistore.allocators import create_allocator
from infinistore.errors import ConfigError

ROOT = Path(__file__).parents[2]

PREPARED = {
    "HYPOTHESIS_PROFILE": "quick",
    **os.environ,
    "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=16384",
}
"""The environment in which a process can load libjemalloc."""


def jemalloc_is_missing_here() -> str:
    """Say why jemalloc cannot run in this process, or nothing if it can."""
    try:
        create_allocator("jemalloc", 64)
    except ConfigError as error:
        return str(error)
    return ""


_REASON = jemalloc_is_missing_here()

needs_jemalloc = pytest.mark.skipif(
    bool(_REASON), reason=f"test_jemalloc.py runs this in a process that can load the library ({_REASON})"
)

STRATEGIES = ["bitmap", "slab", pytest.param("jemalloc", marks=needs_jemalloc)]


def run_python(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run this Python in the project's folder, and return what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
