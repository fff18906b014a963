"""SGLang's keys contain the name of a model; the prefix has what is in its files."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-integrations")

from infinistore.errors import ConfigError
from infinistore.integrations.sglang import settings_of_engine
from tests.bad_days.servers import ServerProcess
from tests.integrations.sglang.test_hicache import hashes, host_pool, indices, running_backend, storage_config

MODEL = "infinistore.integrations.sglang.get_server_args"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments of an engine with a model, a draft model and an adapter."""
    from sglang.srt.server_args import ServerArgs

    arguments = SimpleNamespace(**dict.fromkeys(ServerArgs.__annotations__))
    arguments.load_format, arguments.dtype = "auto", "bfloat16"
    for name in ("model", "draft", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    arguments.model_path, arguments.speculative_draft_model_path = str(tmp_path / "model"), str(tmp_path / "draft")
    arguments.lora_paths = [SimpleNamespace(lora_path=str(tmp_path / "adapter"))]
    monkeypatch.setattr(MODEL, lambda: arguments)
    return arguments


def found_by(server: ServerProcess, **extra: Any) -> int:
    """How many pages a new engine finds. It stores what it does not."""
    config = storage_config(server.url, extra={"key_prefix": "sglang/", **extra})
    with running_backend(config, host_pool()) as backend:
        found: int = backend.batch_exists(hashes(2))
        backend.batch_set_v1(hashes(2), indices([0, 1]))
        return found


@pytest.mark.parametrize("name", ["model", "draft", "adapter"])
def test_other_weights_at_a_path_find_nothing(server: ServerProcess, engine: Any, tmp_path: Path, name: str) -> None:
    assert [found_by(server) for _ in range(2)] == [0, 2]
    (tmp_path / name / "model.safetensors").write_text("another")
    assert [found_by(server) for _ in range(2)] == [0, 2]
    (tmp_path / name / "model.safetensors").write_text(name)
    assert found_by(server) == 2


def test_engines_with_another_argument_that_changes_values_find_nothing(server: ServerProcess, engine: Any) -> None:
    assert found_by(server) == 0
    for name in settings_of_engine():
        before = getattr(engine, name)  # which SGLang has
        setattr(engine, name, "another")
        assert found_by(server) == 0, name
        setattr(engine, name, before)
    assert found_by(server) == 2


def dummy(engine: Any) -> None:
    engine.load_format = "dummy"


def elsewhere(engine: Any) -> None:
    engine.model_path = "s3://bucket/model"


def own_loader(engine: Any) -> None:
    engine.custom_weight_loader = ["package.load"]


@pytest.mark.parametrize("change", [dummy, elsewhere, own_loader])
def test_weights_that_are_not_known_need_a_prefix_of_their_own(
    server: ServerProcess, engine: Any, change: Callable[[Any], None]
) -> None:
    change(engine)
    with pytest.raises(ConfigError, match="set key_prefix"):
        found_by(server)
    assert [found_by(server, key_prefix="mine/") for _ in range(2)] == [0, 2]
