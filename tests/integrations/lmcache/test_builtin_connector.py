"""LMCache's own `infinistore://` connector, unchanged, over the drop-in API."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import uvloop

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from tests.bad_days.servers import ServerProcess
from tests.integrations.lmcache.engine import Worker, engine_config, engine_metadata, keys_of, running_worker

pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")


def builtin_config(server: ServerProcess, **overrides: Any) -> Any:
    url = server.url.replace("tcp://", "infinistore://") + "?device=mlx5_0"
    return engine_config("builtin.yaml", remote_url=url, **overrides)


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def worker(request: pytest.FixtureRequest, shared_server: ServerProcess) -> Iterator[Worker]:
    """A worker for all tests: the connector takes 1.25 GiB for its buffers, and seconds
    to clear them.
    """
    make = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    with running_worker(builtin_config(shared_server), engine_metadata(), plugin=None, make=make) as running:
        assert running.backend.connection is not None
        yield running


@pytest.mark.usefixtures("server")
def test_blocks_come_back_as_they_were_stored(worker: Worker) -> None:
    keys, blocks = keys_of(5), [worker.make_block(seed) for seed in range(5)]
    assert worker.backend.batched_contains(keys) == 0
    worker.put(keys, blocks)
    assert worker.backend.batched_contains(keys) == 5
    for got, stored in zip(worker.get(keys), blocks, strict=True):
        assert got is not None
        assert torch.equal(got.tensor.view(torch.uint8), stored.tensor.view(torch.uint8))
        assert got.get_shape() == stored.get_shape()


@pytest.mark.usefixtures("server")
def test_what_is_missing_is_a_miss(worker: Worker) -> None:
    worker.put(keys_of(1), [worker.make_block(0)])
    assert not worker.backend.contains(keys_of(2)[1])
    assert worker.backend.get_blocking(keys_of(2)[1]) is None
    assert worker.backend.get_blocking(keys_of(1, model="qwen")[0]) is None
    assert [block is not None for block in worker.get(keys_of(2))] == [True, False]


def test_the_engine_goes_on_when_the_store_is_killed(mortal_server: ServerProcess) -> None:
    with running_worker(builtin_config(mortal_server), engine_metadata(), plugin=None) as worker:
        worker.put(keys_of(1), [worker.make_block(0)])
        mortal_server.kill()
        assert worker.get(keys_of(1)) == [None]
        assert not worker.backend.contains(keys_of(1)[0])
        worker.put(keys_of(1), [worker.make_block(0)])


def test_a_store_that_is_down_at_start_leaves_the_engine_without_it(mortal_server: ServerProcess) -> None:
    mortal_server.kill()
    with running_worker(builtin_config(mortal_server), engine_metadata(), plugin=None) as worker:
        assert worker.backend.connection is None
        assert worker.get(keys_of(1)) == [None]
