"""Nothing of a run is left for the tests of other folders."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collect() -> Iterator[None]:
    """Free what runs have left in cycles: memory that servers shared is among it."""
    yield
    gc.collect()
