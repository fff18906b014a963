"""What the values of a block depend on besides its tokens: the model, and settings of
vLLM that change what the model computes.

Whatever is missing here lets an engine read blocks that are wrong for it, and whatever
is here without need keeps engines from sharing.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from infinistore.integrations.internal.prefix_keys import fingerprint_of_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["model_facts"]

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
_TUNING: Final = "attn_temperature_tuning"
_LENGTH: Final = "--max-model-len"


def model_facts(vllm_config: "VllmConfig", name: str) -> dict[str, object]:
    """Return what must match for two engines to compute the same values. `name` is what
    the model is called.

    Settings of which a model makes no use are not among it.
    """
    model = vllm_config.model_config
    config: dict[str, Any] = model.hf_config.to_dict()
    return {
        "model": name,
        "revision": model.revision,
        "config": fingerprint_of_config(config),
        "quantization": model.quantization,
        "dtype": model.dtype,
        **_by_length(model, config),
        **_of_inputs(model),
    }


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
