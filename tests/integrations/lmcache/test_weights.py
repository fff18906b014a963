"""LMCache's keys contain the name of a model; the prefix has what is in its files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from infinistore.integrations.lmcache_l2 import InfiniStoreL2Adapter
from tests.bad_days.servers import ServerProcess
from tests.integrations.lmcache.engine import PLUGIN, Worker, engine_config, engine_metadata, keys_of, running_worker
from tests.integrations.lmcache.test_l2_adapter import look_up, object_keys, store
from tests.integrations.test_weights import make_snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_text("weights")
    return tmp_path


@contextmanager
def worker_of(server: ServerProcess, model: str, **extra: Any) -> Iterator[Worker]:
    given = {PLUGIN + "url": server.url, PLUGIN + "key_prefix": "lmcache/", **extra}
    with running_worker(engine_config("plugin.yaml", extra=given), engine_metadata(model)) as worker:
        yield worker


def found_by(server: ServerProcess, model: str, **extra: Any) -> int:
    """How much of a prompt a new engine finds. It stores what it does not."""
    with worker_of(server, model, **extra) as worker:
        assert worker.backend.connection is not None
        keys = keys_of(2, model)
        found = worker.connector.batched_contains(keys)
        worker.put(keys, [worker.make_block(seed) for seed in range(2)])
        return found


def test_other_weights_at_the_path_of_a_model_find_nothing(server: ServerProcess, model: Path) -> None:
    assert [found_by(server, str(model)) for _ in range(2)] == [0, 2]
    (model / "model.safetensors").write_text("another")
    assert [found_by(server, str(model)) for _ in range(2)] == [0, 2]
    (model / "model.safetensors").write_text("weights")
    assert found_by(server, str(model)) == 2


def test_a_model_without_files_needs_a_prefix_of_its_own(server: ServerProcess, tmp_path: Path) -> None:
    with worker_of(server, str(tmp_path)) as worker:
        assert worker.backend.connection is None
    assert [found_by(server, str(tmp_path), **{PLUGIN + "key_prefix": "mine/"}) for _ in range(2)] == [0, 2]


@contextmanager
def adapter_of(server: ServerProcess, **given: Any) -> Iterator[tuple[InfiniStoreL2Adapter, Worker]]:
    adapter = InfiniStoreL2Adapter({"url": server.url, **given})
    try:
        with running_worker(engine_config("plugin.yaml"), engine_metadata()) as memory:
            yield adapter, memory
    finally:
        adapter.close()


def test_the_second_level_of_a_server_of_lmcache_has_the_weights_in_its_keys(
    server: ServerProcess, model: Path
) -> None:
    keys = object_keys(2, model=str(model))
    with adapter_of(server) as (adapter, memory):
        assert store(adapter, keys, [memory.make_block(seed) for seed in range(2)]).is_successful()
        assert look_up(adapter, keys) == [0, 1]
        (model / "model.safetensors").write_text("another")
        # LMCache has blocks of both in its own memory, under the same keys.
        assert not store(adapter, keys, [memory.make_block(seed) for seed in range(2)]).is_successful()
        assert look_up(adapter, keys) == []
    with adapter_of(server) as (adapter, _):
        assert look_up(adapter, keys) == []


@pytest.mark.parametrize(("given", "found"), [({}, []), ({"key_prefix": "mine/"}, [0])])
def test_another_revision_that_was_downloaded_matters_once_engines_load_it_by_default(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: list[int]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    make_snapshot(tmp_path, "a", "1", is_main=True)
    keys = object_keys(1, model="some/model")
    with adapter_of(server, **given) as (adapter, memory):
        assert store(adapter, keys, [memory.make_block(0)]).is_successful()
        monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # which takes long
        make_snapshot(tmp_path, "b", "2", is_main=False)
        assert look_up(adapter, keys) == [0]
        make_snapshot(tmp_path, "c", "3", is_main=True)
        assert look_up(adapter, keys) == found


def test_nor_does_it_store_what_has_no_files_without_a_prefix_of_its_own(server: ServerProcess) -> None:
    for prefix, found in ({}, []), ({"key_prefix": "mine/"}, [0, 1]):
        with adapter_of(server, **prefix) as (adapter, memory):
            result = store(adapter, object_keys(2), [memory.make_block(seed) for seed in range(2)])
            assert result.is_successful() == bool(found)
            assert look_up(adapter, object_keys(2)) == found
