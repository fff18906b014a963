"""Engines of other weights or adapters share nothing, whatever these are called; nor do
engines that differ in any other input of the values in the cache.
"""

import copy
import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from infinistore.integrations.internal.weights import identity_of_files

from .conftest import Open
from .marks import NEEDS_VLLM

if TYPE_CHECKING:
    from .made_engine import MadeEngine

pytestmark = NEEDS_VLLM

PROMPT = list(range(2, 50))


def hits(opened: Open, **options: Any) -> int:
    """How much of the prompt a new engine finds. It stores what it does not."""
    engine = opened()
    request = engine.submit(PROMPT, **options)
    engine.finish(request)
    engine.settle()
    found = engine.external()[1]
    engine.close()
    return found


def test_other_weights_at_the_path_of_a_model_find_nothing(opened: Open, tmp_path: Path) -> None:
    assert [hits(opened) for _ in range(2)] == [0, 48]
    weights = tmp_path / "pytorch_model.bin"
    weights.write_text("another")

    assert [hits(opened) for _ in range(2)] == [0, 48]

    weights.write_text("weights")
    assert hits(opened) == 48


def test_an_engine_tells_how_its_keys_begin_and_what_its_weights_are(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.infinistore"), "info", lambda text, *given: told.append(text % given))
    opened().close()

    found = [line for line in told if "keys begin with vllm/" in line]
    assert found
    assert all(line.endswith(f"weights are {identity_of_files(str(tmp_path))}") for line in found)


def make_adapter(folder: Path, content: str = "adapter") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def adapter(folder: Path, *, name: str = "sql", number: int = 1, **given: Any) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder), **given)


def test_an_adapter_that_was_trained_again_finds_nothing_of_the_one_before(opened: Open, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "sql")
    assert [hits(opened, adapter=adapter(folder)) for _ in range(2)] == [0, 48]
    assert hits(opened) == 0  # the model without it

    make_adapter(folder, "trained")

    assert [hits(opened, adapter=adapter(folder)) for _ in range(2)] == [0, 48]


def test_an_adapter_is_what_is_in_its_files_whatever_it_is_called(opened: Open, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "sql")
    copied = shutil.copytree(folder, tmp_path / "copy")
    assert hits(opened, adapter=adapter(folder)) == 0
    assert hits(opened, adapter=adapter(copied, name="another", number=7)) == 48
    assert hits(opened, adapter=adapter(folder, is_3d_lora_weight=True)) == 0


@pytest.mark.parametrize("how", ["the files change", "another path has its number", "it is replaced in place", "gone"])
def test_requests_with_an_adapter_that_is_replaced_while_the_engine_runs_are_computed_and_that_is_told_once(
    opened: Open, tmp_path: Path, how: str, told: list[str]
) -> None:
    folder, other = make_adapter(tmp_path / "sql"), make_adapter(tmp_path / "other", "other")
    assert hits(opened, adapter=adapter(folder)) == hits(opened, adapter=adapter(other)) == 0
    engine = opened(caching=False)
    engine.finish(engine.submit(PROMPT, adapter=adapter(folder)))
    assert engine.external()[1] == 48

    later = adapter(folder)
    if how == "the files change":
        shutil.copy(other / "adapter_model.safetensors", folder)
    elif how == "another path has its number":
        later = adapter(other)
    elif how == "it is replaced in place":
        later = adapter(other, load_inplace=True)
    else:
        shutil.rmtree(folder)
    for one in (later, adapter(folder), later):
        engine.finish(engine.submit(PROMPT, adapter=one))
    engine.settle()

    assert engine.external()[1] == 48
    assert len(told) == 1
    assert "sql" in told[0]


def loaded(load_format: str) -> Callable[[Any], None]:
    return lambda config: setattr(config.load_config, "load_format", load_format)


def from_a_bucket(config: Any) -> None:
    config.model_config.model_weights = "s3://bucket/model"


def over_the_network(config: Any) -> None:
    from vllm.config import WeightTransferConfig

    config.weight_transfer_config = WeightTransferConfig()


def without_files(config: Any) -> None:
    (Path(config.model_config.model) / "pytorch_model.bin").unlink()


def test_nothing_is_stored_of_weights_that_are_not_known_unless_the_user_gives_a_namespace(opened: Open) -> None:
    engine = opened()
    assert layout_of(engine, engine.scheduler.vllm_config).groups
    loads = [loaded(name) for name in ("dummy", "tensorizer", "ipc_cache", "modelexpress", "of-a-plugin")]
    for change in (*loads, from_a_bucket, over_the_network, without_files):
        config = copy.deepcopy(engine.scheduler.vllm_config)
        change(config)

        assert not layout_of(engine, config).groups
        assert "namespace" in layout_of(engine, config).obstacle
        assert layout_of(engine, config, namespace="the user's").groups


def layout_of(engine: "MadeEngine", config: Any, **given: Any) -> Any:
    from infinistore.integrations.vllm.layout import Layout
    from infinistore.integrations.vllm.settings import ConnectorSettings

    settings = ConnectorSettings(url="infinistore://nowhere", **{"model": "made", **given})
    return Layout.of(config, engine.scheduler.kv_cache_config, settings)


INPUTS: dict[str, tuple[str, Any]] = {
    "dtype": ("model_config.dtype", "bfloat16"),
    "quantization": ("model_config.quantization", "fp8"),
    "how it is quantized": ("model_config.quantization_config", {"linear": "mxfp8"}),
    "rotation": ("model_config.hf_overrides", {"rope_theta": 5.0}),
    "architecture": ("model_config.hf_overrides", {"architectures": ["Own"]}),
    "the model's code": ("model_config.model_class_overrides", {"OPTForCausalLM": "own:Model"}),
    "cache dtype": ("cache_config.cache_dtype", "fp8"),
    "layers with another cache dtype": ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "attention": ("attention_config.backend", "FLASHINFER"),
    "attention of a kind of layers": ("attention_config.backend_per_kind", {"full_attention": "TRITON_ATTN"}),
    "indexer": ("attention_config.indexer_kv_dtype", "fp8"),
    "tensor parallel size": ("parallel_config.tensor_parallel_size", 2),
}


def test_engines_that_differ_in_one_input_of_the_values_share_nothing(opened: Open) -> None:
    engine = opened()
    found = {layout_of(engine, engine.scheduler.vllm_config).names.prefix: "the same"}
    for name, (path, value) in INPUTS.items():
        config = copy.deepcopy(engine.scheduler.vllm_config)
        assert found[layout_of(engine, config).names.prefix] == "the same"
        part, _, field = path.partition(".")
        object.__setattr__(getattr(config, part), field, value)
        found.setdefault(layout_of(engine, config).names.prefix, name)

    assert [*found.values()] == ["the same", *INPUTS]


def test_so_do_engines_of_other_namespaces_models_block_sizes_and_layouts(opened: Open) -> None:
    engine = opened()
    config = engine.scheduler.vllm_config
    kv = engine.scheduler.kv_cache_config
    found = {layout_of(engine, config, **given).names.prefix for given in ({}, {"namespace": "n"}, {"model": "m"})}
    (group,) = kv.kv_cache_groups
    for change in ({"block_size": 32}, {"kv_cache_layout": "LBHNC"}):
        changed: Any = copy.deepcopy(kv)
        if "block_size" in change:
            changed.kv_cache_groups[0].kv_cache_spec = dataclasses.replace(group.kv_cache_spec, block_size=32)
        else:
            changed.kv_cache_layout = change["kv_cache_layout"]
        other: Any = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=changed))
        found.add(layout_of(other, config).names.prefix)

    assert len(found) == 5
