"""vLLM's `cache_salt`: of requests with different salts, no block has the key of
another, whatever their prompts have in common.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from infinistore import blocking

from .halves import MadeRequest, make_names, make_scheduler

TOKENS = list(range(100, 140))
SALTS = ("", "alice", "bob", "alice ", "bob@alice")


def keys_of(store: blocking.BlockingStore, request: Any, extra: Callable[[Any, int, int], bytes]) -> set[str]:
    """The keys under which the connector writes the blocks of a request."""
    scheduler = make_scheduler(store, reads=False, extra=extra)
    scheduler.allocated(request, (range(10, 40),), scheduler.loadable_tokens(request, 0))
    step = scheduler.plan({request.request_id: len(TOKENS)}, (), lambda _: (range(10, 40),))
    keys = make_names().all_keys([name for save in step.saves for name in save.blocks.hashes])
    assert len(set(keys)) == len(keys) == 30
    return set(keys)


def check(store: blocking.BlockingStore, key_sets: dict[str, set[str]]) -> None:
    for one, other in combinations(SALTS, 2):
        assert key_sets[one].isdisjoint(key_sets[other]), (one, other)


def test_a_salt_in_the_first_block_changes_the_keys_of_all(store: blocking.BlockingStore) -> None:
    """vLLM gives the salt with the first block only."""

    def extra_of(salt: str) -> Callable[[Any, int, int], bytes]:
        return lambda request, first, end: salt.encode() if first == 0 else b""

    check(store, {salt: keys_of(store, MadeRequest.of(TOKENS), extra_of(salt)) for salt in SALTS})


@pytest.mark.filterwarnings("ignore")  # vLLM has many of its own
def test_requests_of_vllm_with_different_salts_share_no_key(store: blocking.BlockingStore) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: make test-integrations")
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from infinistore.integrations.vllm.connector import extra_keys

    def request_of(name: str, salt: str) -> Any:
        return Request(name, TOKENS, SamplingParams(max_tokens=1), None, cache_salt=salt or None)

    found = {salt: keys_of(store, request_of("one", salt), extra_keys) for salt in SALTS}
    check(store, found)
    assert found == {salt: keys_of(store, request_of("other", salt), extra_keys) for salt in SALTS}
