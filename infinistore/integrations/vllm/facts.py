"""What the values of a block depend on besides its tokens: the model, and settings of
vLLM that change what the model computes.

Whatever is missing here lets an engine read blocks that are wrong for it, and whatever
is here without need keeps engines from sharing.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.transformers_utils.config import get_config

from infinistore.integrations.internal.prefix_keys import fingerprint_of_config
from infinistore.integrations.internal.weights import identity_of_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig

__all__ = ["model_facts", "weights_of"]

LOG = logging.getLogger("vllm.infinistore")

_ROPE_BY_LENGTH: Final = {"longrope", "su", "dynamic"}
"""Rotary embeddings that vLLM makes from `max_model_len`, for all models or some."""
_INPUTS_BY_LENGTH: Final = {
    "Dots3NoteForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
}
"""Models whose images or videos are scaled to fit into `max_model_len`."""
_FROM_FILES: Final = {
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "sharded_state"),
    *("runai_streamer", "runai_streamer_sharded"),
}
"""The load formats with which vLLM reads the files of a model's path."""
_TUNING: Final = "attn_temperature_tuning"
_LENGTH: Final = "--max-model-len"


def model_facts(vllm_config: "VllmConfig", name: str) -> dict[str, object]:
    """Return what must match for two engines to compute the same values. `name` is what
    the model is called.

    Settings of which a model makes no use are not among it.
    """
    model = vllm_config.model_config
    config = _config_as_loaded(model)
    return {
        "model": name,
        "config": fingerprint_of_config(config),
        "classes": [config.get("architectures"), model.model_class_overrides],
        "quantization": [model.quantization, model.quantization_config],
        "dtype": model.dtype,
        **_by_length(model, config),
        **_of_inputs(model),
        **_of_draft(vllm_config, name),
    }


def weights_of(vllm_config: "VllmConfig") -> str:
    """Return what stands for all weights that vLLM has loaded, those of a draft model
    among them; nothing if it cannot be known: they have no files, or are elsewhere, or
    are replaced while vLLM runs.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if vllm_config.weight_transfer_config is not None:
        return ""
    found = [_identity(model, load)]
    for part in _parts(model.hf_config.to_dict()):  # such as Ultravox, of two other models
        others = [part[name] for name in ("audio_model_id", "text_model_id") if part.get(name)]
        found += [identity_of_files(where, cache=load.download_dir) for where in others]
    if (guessing := _guessing(vllm_config)) is not None:
        found.append(_identity(guessing.draft_model_config, guessing.draft_load_config or load))
    return " ".join(found) if all(found) else ""


def _identity(model: "ModelConfig", load: "LoadConfig") -> str:
    if load.load_format not in _FROM_FILES or model.model_weights:
        return ""
    return identity_of_files(model.model, revision=model.revision, cache=load.download_dir)


def _config_as_loaded(model: "ModelConfig") -> dict[str, Any]:
    """Return the model's configuration as vLLM has it before the model is built.

    Some models change it while they are built, which happens in the workers' processes
    and not in the scheduler's. So it is loaded again, as vLLM's `ModelConfig` does it.
    """
    config: dict[str, Any]
    try:
        given = model.hf_overrides
        parts = {} if callable(given) else {name: value for name, value in given.items() if isinstance(value, dict)}
        loaded = get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            model._hf_config_revision or model.revision,
            model.code_revision,
            model.config_format,
            hf_overrides_kw={} if callable(given) else {k: v for k, v in given.items() if k not in parts},
            hf_overrides_fn=given if callable(given) else None,
            token=model.hf_token,
        )
        model._apply_dict_overrides(loaded, parts)
        config = loaded.to_dict()
    except Exception as error:  # noqa: BLE001 - what it reads is vLLM's matter, and the model runs without it
        LOG.warning(
            "InfiniStore: the model's configuration cannot be read again, and is taken as it is: if this model changes"
            " it when it is built, nothing that is stored is found: %s",
            " ".join(str(error).split()) or type(error).__name__,
        )
        config = model.hf_config.to_dict()
    return config


def _by_length(model: "ModelConfig", config: Mapping[str, Any]) -> dict[str, object]:
    """Return the longest length that vLLM allows, if values depend on it."""
    facts: dict[str, object] = {}
    parts = list(_parts(config))
    if any(_TUNING in part for part in parts):
        # Llama 4 computes with it if this says so, else if the length is above a limit.
        told = {**model.try_get_generation_config(), **model.override_generation_config}
        if _TUNING in told:
            facts["attention temperature tuning"] = told[_TUNING]
        else:
            facts[_LENGTH] = model.max_model_len
    rotations = {str(part.get("rope_type") or part.get("type")) for part in parts}
    if rotations & _ROPE_BY_LENGTH or _INPUTS_BY_LENGTH.intersection(config.get("architectures") or ()):
        facts[_LENGTH] = model.max_model_len
    return facts


def _parts(value: object) -> Iterator[Mapping[str, Any]]:
    """Return a configuration and all that are in it."""
    if isinstance(value, Mapping):
        yield value
        for part in value.values():
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)


def _of_inputs(model: "ModelConfig") -> dict[str, object]:
    """Return what images, videos and sounds are processed with. vLLM's hashes of them
    include what a request asks for, and nothing of the engine's own settings.
    """
    settings = model.multimodal_config
    if settings is None:
        return {}
    pruned = settings.video_pruning_rate
    facts = {
        "--mm-processor-kwargs": settings.mm_processor_kwargs,
        "--video-pruning-rate": pruned,
        "--video-pruning-method": settings.video_pruning_method if pruned else None,
        "--mm-encoder-attn-dtype": settings.mm_encoder_attn_dtype,
        "--mm-encoder-fp8-scale-path": settings.mm_encoder_fp8_scale_path,
    }
    return {name: fact for name, fact in facts.items() if fact}


def _guessing(vllm_config: "VllmConfig") -> "SpeculativeConfig | None":
    """Return the settings of a draft model with layers of its own in the cache."""
    guessing = vllm_config.speculative_config
    if guessing is None or not (guessing.uses_draft_kv_cache() or guessing.method == "custom_class"):
        return None
    return guessing


def _of_draft(vllm_config: "VllmConfig", name: str) -> dict[str, object]:
    """Return what the layers of a draft model depend on. They are stored like others,
    so that an engine without them could not read what one with them asks for.
    """
    guessing = _guessing(vllm_config)
    if guessing is None:
        return {}
    draft = guessing.draft_model_config
    facts = {
        "draft method": guessing.method,
        "draft model": name if draft.model == vllm_config.model_config.model else draft.model,
        "draft quantization": draft.quantization,
        "draft dtype": draft.dtype,
        "draft cache dtype": guessing.kv_cache_dtype,
        "draft layers": draft.get_total_num_hidden_layers(),
        "draft states": getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None),
        # Each layer predicts from what the one before it predicted.
        "draft tokens": guessing.num_speculative_tokens if guessing.use_multi_module_mtp() else None,
    }
    return {name: fact for name, fact in facts.items() if fact}
