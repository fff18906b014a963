"""A plugin of pytest for vLLM's own tests: connectors that they stand in for become
this one.

vLLM's tests say how many tokens of a prompt are elsewhere. This plugin puts so many
into a store when vLLM's scheduler asks, and has the connector look them up: it has to
find just these, and everything that follows is the connector's. It only reads, because
these tests have no worker that would write.

It runs in a process of its own, in which `tests` is vLLM's package.
"""

import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from infinistore import blocking
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.connector import InfiniStoreConnector, extra_keys

UTILS: Any = importlib.import_module("tests.v1.kv_connector.unit.utils")
URL = os.environ["INFINISTORE_URL"]

MADE: list["Substitute"] = []
"""The connectors of the test that runs."""
NUMBERS = itertools.count()
"""For namespaces that no other test has stored anything in."""


class Substitute(InfiniStoreConnector):
    """The connector, asked by a test that says how much is in the store."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        self._matched = transfer.kv_connector_extra_config.get("matched_tokens")
        transfer.kv_role = "kv_consumer"
        transfer.kv_connector_extra_config = {"url": URL, "namespace": f"{next(NUMBERS)}"}
        self.asked = 0
        super().__init__(vllm_config, role, kv_cache_config)
        MADE.append(self)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        elsewhere = self._matched
        if elsewhere is None:  # a test of a decoder, whose requests say if they were prefilled
            prefilled = (request.kv_transfer_params or {}).get("do_remote_prefill")
            elsewhere = request.num_tokens - num_computed_tokens if prefilled else 0
        return self.ask(request, num_computed_tokens, elsewhere)

    def ask(self, request: Any, computed: int, elsewhere: int) -> tuple[int | None, bool]:
        """Look a request up, of which so many tokens more are stored."""
        self.asked += 1
        (group,) = self._layout.groups
        chain = PrefixChain(group.block_tokens, extra=lambda first, end: extra_keys(request, first, end))
        hashes = chain.extend(request.all_token_ids)[: (computed + elsewhere) // group.block_tokens]
        keys = self._layout.names.all_keys(hashes)
        with blocking.open_store(URL) as store:
            store.put_many(dict.fromkeys(keys, b"stored"))
        answer: tuple[int | None, bool] = None, False
        while answer[0] is None:  # vLLM's tests do not ask again in a next step
            answer = super().get_num_new_matched_tokens(request, computed)
        whole = elsewhere // group.block_tokens * group.block_tokens
        assert answer == (whole, whole > 0)
        return answer

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the workers' tasks, with a list that vLLM's stand-in has there."""
        metadata: Any = super().build_connector_meta(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        metadata.requests = [*scheduler_output.scheduled_new_reqs]
        metadata.requests += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        return metadata


class _LookUp(Mock):
    """Told by a test what to answer, it has the connector find that."""

    connector: Substitute

    def __call__(self, request: Any, computed: int) -> tuple[int | None, bool]:
        elsewhere, _ = super().__call__(request, computed)
        return self.connector.ask(request, computed, elsewhere)


def _watched() -> Mock:
    """Return the scheduler's connector, with calls that a test counts or answers."""
    watched = Mock(wraps=MADE[-1])
    watched.get_num_new_matched_tokens = _LookUp()
    watched.get_num_new_matched_tokens.connector = MADE[-1]
    return watched


UTILS.create_mock_connector = _watched
for name in ("MockKVConnector", "NixlConnector"):
    KVConnectorFactory._registry[name] = lambda: Substitute


@pytest.fixture(autouse=True)
def _every_test_asks_the_connector() -> Iterator[None]:
    MADE.clear()
    yield
    for connector in MADE:
        connector.shutdown()
    assert any(connector.asked for connector in MADE), "the test did not ask the connector"
