"""Settings of vLLM that change what a model computes: engines that differ in them share
nothing, and others do.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

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
    from infinistore.integrations.vllm.layout import model_facts

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


def test_a_configuration_that_is_gone_is_taken_as_it_is_and_that_is_told(tmp_path: Path, told: list[str]) -> None:
    config = engine(tmp_path, LLAMA)
    known = facts_of(config)
    (tmp_path / "config.json").unlink()

    assert facts_of(config) == known
    assert len(told) == 1
    assert told[0].startswith("InfiniStore: the model's configuration cannot be read again")


def _with_draft(folder: Path, method: str | None, *, draft: Path | None = None, tokens: int = 2, **config: Any) -> Any:
    """An engine that guesses tokens with a draft model, the engine's own or another."""
    from vllm.config import SpeculativeConfig

    result = engine(folder, LLAMA)
    if method is not None:
        # To be made by itself, it would ask for a model with such layers.
        result.speculative_config = guessing = SpeculativeConfig.__new__(SpeculativeConfig)
        guessing.method = method
        guessing.num_speculative_tokens = tokens
        guessing.draft_model_config = engine(draft or folder, {**LLAMA, **config}).model_config
    return result


def test_engines_with_and_without_a_draft_model_share_nothing(tmp_path: Path) -> None:
    """What one stores has no blocks of the draft's layers, which the other asks for."""
    without, with_one = _with_draft(tmp_path, None), _with_draft(tmp_path, "mtp")

    assert differing(without, with_one) == {"draft method", "draft model", "draft layers", "draft dtype"}
    assert facts_of(with_one)["draft model"] == "made"
    assert differing(with_one, _with_draft(tmp_path, "mtp", tokens=3)) == set()


def test_engines_with_other_draft_models_share_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    one = _with_draft(tmp_path, "eagle", draft=first)

    assert differing(one, _with_draft(tmp_path, "eagle", draft=second)) == {"draft model"}
    assert differing(one, _with_draft(tmp_path, "eagle3", draft=first)) == {"draft method"}
    assert differing(one, _with_draft(tmp_path, "eagle", draft=first, num_hidden_layers=2)) == {"draft layers"}
    assert differing(one, _with_draft(tmp_path, "eagle", draft=first)) == set()


def test_layers_that_predict_one_token_each_differ_with_their_number(tmp_path: Path) -> None:
    def several(tokens: int) -> Any:
        return _with_draft(tmp_path, "mtp", tokens=tokens, num_nextn_predict_layers=3)

    assert differing(several(2), several(3)) == {"draft tokens"}
    assert differing(several(3), several(4)) == {"draft tokens"}


@pytest.mark.parametrize("method", ["ngram", "suffix", "medusa"])
def test_guesses_that_keep_nothing_in_the_cache_keep_no_engines_apart(tmp_path: Path, method: str) -> None:
    assert differing(_with_draft(tmp_path, None), _with_draft(tmp_path, method)) == set()


def test_which_hidden_states_are_kept_in_the_cache_counts(tmp_path: Path) -> None:
    def keeping(*layers: int) -> Any:
        config = _with_draft(tmp_path, "extract_hidden_states")
        config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = list(layers)
        return config

    assert differing(keeping(1, 2), keeping(1, 3)) == {"draft states"}
