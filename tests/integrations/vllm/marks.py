"""The marks of tests that import vLLM."""

from importlib.util import find_spec
from typing import Final

import pytest

__all__ = ["NEEDS_VLLM"]

NEEDS_VLLM: Final = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-integrations"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM imports warns
    pytest.mark.timeout(900),
]
