"""AIBrix's cache manager on its own InfiniStore connector, which imports this
package.
"""

from typing import Any

import pytest

pytest.importorskip("aibrix_kvcache", reason="needs AIBrix's KV cache: make test-integrations")

import torch
from aibrix_kvcache import TokenListView

from infinistore.dropin.registered_server import RegisteredServer
from tests.integrations.aibrix.conftest import NewManager

BLOCK_TOKENS = 16
PROMPT = list(range(4 * BLOCK_TOKENS))


def put(manager: Any, tokens: list[int]) -> Any:
    """Store a prompt; block number n is filled with n + 1. Returns the status."""
    handle = manager.allocate_for(None, TokenListView(tokens)).get()
    for number, tensor in enumerate(handle.to_tensors()):
        tensor.copy_(torch.full_like(tensor, number + 1.0))
    return manager.put(None, TokenListView(tokens), handle)


def acquire(manager: Any, tokens: list[int]) -> list[float]:
    """What each block that was found is filled with."""
    status = manager.acquire(None, TokenListView(tokens))
    if status.is_not_found():
        return []
    count, handle = status.get()
    values = [tensor.unique().tolist() for tensor in handle.to_tensors()]
    assert count == len(values) * BLOCK_TOKENS
    assert all(len(found) == 1 for found in values)
    handle.release()
    return [found[0] for found in values]


def test_what_one_engine_puts_another_acquires(new_manager: NewManager) -> None:
    writer, reader = new_manager(), new_manager()

    assert put(writer, PROMPT).get() == len(PROMPT)

    assert reader.exists(None, TokenListView(PROMPT)).get() == len(PROMPT)
    assert acquire(reader, PROMPT) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("ttl_s", "found"), [("3600", [1.0, 2.0, 3.0, 4.0]), ("0.000001", [])])
def test_blocks_end_after_the_time_that_the_environment_sets(
    ttl_s: str, found: list[float], new_manager: NewManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISTORE_TTL_S", ttl_s)
    manager = new_manager()
    assert put(manager, PROMPT).get() == len(PROMPT)
    assert acquire(manager, PROMPT) == found


def test_the_longest_common_beginning_is_acquired(new_manager: NewManager) -> None:
    manager = new_manager()
    put(manager, PROMPT)
    other = PROMPT[: 2 * BLOCK_TOKENS] + [1000 + token for token in PROMPT[2 * BLOCK_TOKENS :]]

    assert acquire(manager, other) == [1.0, 2.0]
    assert acquire(manager, other[::-1]) == []
    assert manager.exists(None, TokenListView(other[::-1])).is_not_found()


def test_what_was_deleted_is_not_found(new_manager: NewManager) -> None:
    manager = new_manager()
    put(manager, PROMPT)

    assert manager.delete(None, TokenListView(PROMPT)).is_ok()

    assert acquire(manager, PROMPT) == []


def test_blocks_of_another_model_are_not_taken_for_its_own(new_manager: NewManager) -> None:
    put(new_manager(heads=2), PROMPT)

    assert acquire(new_manager(heads=4), PROMPT) == []


def test_a_server_that_is_lost_is_a_miss_and_no_exception(new_manager: NewManager, server: RegisteredServer) -> None:
    manager = new_manager()
    put(manager, PROMPT)

    server.stop()

    assert not manager.exists(None, TokenListView(PROMPT)).is_ok()
    assert not manager.acquire(None, TokenListView(PROMPT)).is_ok()
    put(manager, PROMPT[:BLOCK_TOKENS])  # whatever its status, it comes back


def test_a_server_that_is_down_at_the_start_is_one_error(new_manager: NewManager, server: RegisteredServer) -> None:
    server.stop()

    with pytest.raises(Exception, match="is the server running there"):
        new_manager()


def test_a_connector_can_be_closed_more_than_once(new_manager: NewManager) -> None:
    connector = new_manager()._l2_cache._backend

    assert connector.close().is_ok()
    assert connector.close().is_ok()
