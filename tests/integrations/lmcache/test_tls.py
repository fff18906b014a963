"""LMCache reaches a server over TLS: by the plugin, whose URL names the files, and by
its own connector, which knows of none and gets them from the environment.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from infinistore import blocking
from tests.bad_days.servers import ServerProcess, running_server_process
from tests.integrations.lmcache.engine import PLUGIN, Worker, engine_config, engine_metadata, keys_of, running_worker
from tests.transports.certificates import Files, issue

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning"),
]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path)


@pytest.fixture
def encrypted(files: Files) -> Iterator[ServerProcess]:
    with running_server_process("--tls-cert", str(files.cert), "--tls-key", str(files.key)) as server:
        yield server


def moves_blocks(worker: Worker, server: ServerProcess, files: Files) -> None:
    keys, blocks = keys_of(3), [worker.make_block(seed) for seed in range(3)]
    worker.put(keys, blocks)
    assert worker.backend.batched_contains(keys) == 3
    for got, stored in zip(worker.get(keys), blocks, strict=True):
        assert got is not None
        assert bytes(got.byte_array) == bytes(stored.byte_array)
    with blocking.open_store(server.url, ca=files.ca) as store:
        assert len(store.keys()) >= 3


def test_the_plugin_moves_blocks_over_tls(encrypted: ServerProcess, files: Files) -> None:
    url = f"infinistores://127.0.0.1:{encrypted.port}?ca={files.ca}"
    config = engine_config("plugin.yaml", extra={PLUGIN + "url": url})
    with running_worker(config, engine_metadata()) as worker:
        moves_blocks(worker, encrypted, files)


def test_lmcaches_own_connector_moves_blocks_over_tls(
    encrypted: ServerProcess, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINISTORE_CA", str(files.ca))
    config = engine_config("builtin.yaml", remote_url=f"infinistore://127.0.0.1:{encrypted.port}?device=mlx5_0")
    with running_worker(config, engine_metadata(), plugin=None) as worker:
        assert worker.backend.connection is not None
        moves_blocks(worker, encrypted, files)
