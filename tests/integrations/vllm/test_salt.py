"""vLLM's `cache_salt`: of requests with different salts, no block has the key of
another, whatever their prompts have in common.
"""

from itertools import combinations
from typing import Any

import pytest

from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.blocks import salt_key

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

TOKENS = list(range(100, 140))
SALTS = ("", "alice", "bob", "alice ", "bob@alice")


def request_with(salt: str, name: str = "one") -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(name, TOKENS, SamplingParams(max_tokens=1), None, cache_salt=salt or None)


def hashes_of(name: str, salt: str) -> list[str]:
    from infinistore.integrations.vllm.connector import extra_keys

    request = request_with(salt, name)
    return PrefixChain(4, extra=lambda first, end: extra_keys(request, first, end)).extend(TOKENS)


def test_requests_with_different_salts_share_no_key() -> None:
    """vLLM gives the salt with the first block only."""
    found = {salt: hashes_of("one", salt) for salt in SALTS}
    for one, other in combinations(SALTS, 2):
        assert set(found[one]).isdisjoint(found[other]), (one, other)
    assert found == {salt: hashes_of("other", salt) for salt in SALTS}


@pytest.mark.parametrize("salt", [*SALTS, "it's", 'a "b"', "\\n", "\n", "\0", "salé", "盐", "\ud800"])
def test_the_key_of_a_salt_without_vllm_is_that_of_the_connector(salt: str) -> None:
    from infinistore.integrations.vllm.connector import extra_keys

    request = request_with(salt)
    assert [salt_key(salt, first) for first in range(0, 40, 4)] == [
        extra_keys(request, first, first + 4) for first in range(0, 40, 4)
    ]
