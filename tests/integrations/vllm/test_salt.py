"""vLLM's `cache_salt`: of requests with different salts, no block has the key of
another, whatever their prompts have in common.
"""

from itertools import combinations
from typing import Any

from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.blocks import salt_key

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

TOKENS = list(range(100, 140))
SALTS = ("", "alice", "bob", "alice ", "bob@alice")


def hashes_of(name: str, salt: str) -> list[str]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from infinistore.integrations.vllm.connector import extra_keys

    request: Any = Request(name, TOKENS, SamplingParams(max_tokens=1), None, cache_salt=salt or None)
    return PrefixChain(4, extra=lambda first, end: extra_keys(request, first, end)).extend(TOKENS)


def test_requests_with_different_salts_share_no_key() -> None:
    """vLLM gives the salt with the first block only."""
    found = {salt: hashes_of("one", salt) for salt in SALTS}
    for one, other in combinations(SALTS, 2):
        assert set(found[one]).isdisjoint(found[other]), (one, other)
    assert found == {salt: hashes_of("other", salt) for salt in SALTS}


def test_a_router_knows_the_hashes_of_requests_with_a_salt() -> None:
    for salt in SALTS:
        assert PrefixChain(4, extra=lambda first, end: salt_key(salt, first)).extend(TOKENS) == hashes_of("one", salt)  # noqa: B023
