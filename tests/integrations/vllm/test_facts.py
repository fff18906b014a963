"""Settings of vLLM that change what a model computes: engines that differ in them share
nothing, and others do.
"""

import importlib.util
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# What vLLM imports warns.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-integrations"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
LLAMA_4 = {**LLAMA, "model_type": "llama4_text", "num_key_value_heads": 2, "head_dim": 32}
PHI_3 = {
    **LLAMA,
    "model_type": "phi3",
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}
LENGTH = "--max-model-len"


def engine(folder: Path, config: dict[str, Any], *, length: int = 2048, **given: Any) -> Any:
    """vLLM's configuration for a model of this configuration."""
    from vllm.config import ModelConfig

    # Of all architectures vLLM looks at the same, which takes it less than others do.
    (folder / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"], **config}))
    path = str(folder)
    model = ModelConfig(model=path, dtype="float32", seed=0, skip_tokenizer_init=True, max_model_len=length, **given)
    return SimpleNamespace(model_config=model, speculative_config=None)


def facts_of(config: Any) -> dict[str, object]:
    from infinistore.integrations.vllm.facts import model_facts

    return model_facts(config, "made")


def differing(one: Any, other: Any) -> set[str]:
    """What of the facts of two engines differs."""
    first, second = facts_of(one), facts_of(other)
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}


def test_engines_that_rotate_by_their_longest_length_share_only_with_their_like(tmp_path: Path) -> None:
    assert differing(engine(tmp_path, PHI_3, length=512), engine(tmp_path, PHI_3)) == {LENGTH}
    assert differing(engine(tmp_path, PHI_3), engine(tmp_path, PHI_3)) == set()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_so_do_those_of_which_a_part_does(tmp_path: Path, kind: str) -> None:
    rotation = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    if kind == "longrope":
        rotation |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    several = {**LLAMA, "others": [{"rope_parameters": rotation}]}

    assert differing(engine(tmp_path, several, length=512), engine(tmp_path, several)) == {LENGTH}


def test_engines_that_tune_attention_by_their_longest_length_share_only_with_their_like(tmp_path: Path) -> None:
    long = engine(tmp_path, LLAMA_4, length=65536)

    assert differing(long, engine(tmp_path, LLAMA_4)) == {LENGTH}


def test_and_not_if_they_are_told_whether_to_tune(tmp_path: Path) -> None:
    def told(tune: bool, length: int) -> Any:
        return engine(tmp_path, LLAMA_4, length=length, override_generation_config={"attn_temperature_tuning": tune})

    assert differing(told(True, 512), told(True, 65536)) == set()
    assert differing(told(True, 512), told(False, 512)) == {"attention temperature tuning"}


def test_models_that_scale_images_by_the_longest_length_are_told_apart_by_it(tmp_path: Path) -> None:
    one, other = engine(tmp_path, LLAMA, length=512), engine(tmp_path, LLAMA)
    # vLLM has looked at the architecture.
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["NemotronH_Nano_VL_V2"]}))

    assert differing(one, other) == {LENGTH}


def test_other_engines_share_whatever_their_longest_length_is(tmp_path: Path) -> None:
    assert differing(engine(tmp_path, LLAMA, length=512), engine(tmp_path, LLAMA)) == set()


def _with_inputs(folder: Path, **given: Any) -> Any:
    from vllm.config.multimodal import MultiModalConfig

    config = engine(folder, LLAMA)
    config.model_config.multimodal_config = MultiModalConfig(**given)
    return config


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mm_processor_kwargs": {"size": {"shortest_edge": 256}}}, "--mm-processor-kwargs"),
        ({"video_pruning_rate": 0.5}, "--video-pruning-rate"),
        ({"mm_encoder_attn_dtype": "fp8"}, "--mm-encoder-attn-dtype"),
    ],
)
def test_engines_that_process_images_in_other_ways_share_nothing(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    changed = differing(_with_inputs(tmp_path), _with_inputs(tmp_path, **given))

    assert told in changed
    assert changed <= {told, "--video-pruning-method"}
    assert differing(_with_inputs(tmp_path, **given), _with_inputs(tmp_path, **given)) == set()


@pytest.mark.parametrize("given", [{"mm_processor_cache_gb": 1}, {"limit_per_prompt": {"image": 2}}])
def test_what_changes_no_values_keeps_no_engines_apart(tmp_path: Path, given: dict[str, Any]) -> None:
    assert differing(_with_inputs(tmp_path), _with_inputs(tmp_path, **given)) == set()


def test_what_a_model_changes_in_its_configuration_when_it_is_built_does_not_count(tmp_path: Path) -> None:
    """Workers build it, and the scheduler's process does not."""
    scheduler, worker = engine(tmp_path, LLAMA_4), engine(tmp_path, LLAMA_4)
    built = worker.model_config.hf_config
    built.attn_temperature_tuning = not built.attn_temperature_tuning
    built.max_model_len = 2048

    assert differing(scheduler, worker) == set()


@pytest.mark.parametrize("given", [{"rope_theta": 5.0}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}])
def test_what_the_user_overrides_in_it_counts(tmp_path: Path, given: dict[str, Any]) -> None:
    assert differing(engine(tmp_path, LLAMA), engine(tmp_path, LLAMA, hf_overrides=given)) == {"config"}


def test_what_a_function_of_the_user_overrides_in_it_counts(tmp_path: Path) -> None:
    def override(config: Any) -> Any:
        config.update({"rope_theta": 5.0})
        return config

    assert differing(engine(tmp_path, LLAMA), engine(tmp_path, LLAMA, hf_overrides=override)) == {"config"}


def test_a_configuration_that_is_elsewhere_counts(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "config.json").write_text(
        json.dumps({**LLAMA, "architectures": ["OPTForCausalLM"], "rope_theta": 5.0})
    )
    given = engine(tmp_path, LLAMA, hf_config_path=str(elsewhere))

    assert differing(engine(tmp_path, LLAMA), given) == {"config"}


def test_a_configuration_that_is_gone_is_taken_as_it_is_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine(tmp_path, LLAMA)
    known = facts_of(config)
    told: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.infinistore"), "warning", lambda text, *given: told.append(text % given)
    )
    (tmp_path / "config.json").unlink()

    assert facts_of(config) == known
    assert len(told) == 1
    assert told[0].startswith("InfiniStore: the model's configuration cannot be read again")
