"""The environment is the one that the requirements describe."""

from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("aibrix_kvcache", reason="needs AIBrix's KV cache: make test-integrations")

REQUIREMENTS = Path(__file__).parents[3] / "requirements" / "aibrix.no-deps.txt"


def test_aibrix_has_the_version_that_is_documented() -> None:
    assert f"aibrix-kvcache=={version('aibrix-kvcache')}" in REQUIREMENTS.read_text().splitlines()
