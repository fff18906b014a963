"""The environment is the one that the requirements describe."""

from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

REQUIREMENTS = Path(__file__).parents[3] / "requirements" / "lmcache.no-deps.txt"


def test_lmcache_has_the_version_that_is_documented() -> None:
    assert f"lmcache=={version('lmcache')}" in REQUIREMENTS.read_text().splitlines()
