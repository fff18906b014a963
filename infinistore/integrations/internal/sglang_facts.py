"""What the pages of an SGLang engine depend on besides tokens: SGLang's keys contain
tokens, salts and the numbers of adapters, and the name of the model.
"""

from collections.abc import Iterator
from typing import Any, Final

from sglang.srt.runtime_context import get_server_args

from infinistore.integrations.internal.weights import identity_of_files

__all__ = ["settings_of_engine", "weights_of_engine"]

_FROM_FILES: Final = {
    *("auto", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "gguf", "bitsandbytes"),
    *("layered", "sharded_state", "presharded", "runai_streamer"),
}
"""The load formats with which SGLang reads the files of a model's path."""
_SETTINGS: Final = (
    *("dtype", "quantization", "quantization_param_path", "quantize_and_serve", "modelopt_quant", "rl_quant_profile"),
    *("kv_cache_dtype", "mamba_ssm_dtype", "qsa_indexer_dtype", "json_model_override_args", "context_length"),
    *("mm_process_config", "language_model_only", "model_impl", "speculative_algorithm", "speculative_num_steps"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
)
"""The arguments that change what a model computes, or what is kept of it."""


def settings_of_engine() -> dict[str, object]:
    """Return the arguments of this process's engine that change values; nothing if
    SGLang has not told them.
    """
    engine = _engine()
    return {} if engine is None else {name: getattr(engine, name, None) for name in _SETTINGS}


def weights_of_engine() -> str:
    """Return what stands for the weights of this process's engine: those of the model,
    of a draft model, and of the adapters that it starts with, whose numbers are made of
    their names and paths. Nothing if one of them is not known.
    """
    engine = _engine()
    if engine is None or getattr(engine, "custom_weight_loader", None):
        return ""
    found = [
        identity_of_files(where, revision=revision, cache=engine.download_dir) if load_format in _FROM_FILES else ""
        for where, revision, load_format in _sources(engine)
    ]
    return " ".join(found) if all(found) else ""


def _sources(engine: Any) -> Iterator[tuple[str, str | None, str]]:
    """Yield path, revision and load format of all that is loaded."""
    yield engine.model_path, engine.revision, engine.load_format
    draft = engine.speculative_draft_model_path
    if draft and draft != engine.model_path:
        load_format = engine.speculative_draft_load_format or engine.load_format
        yield draft, engine.speculative_draft_model_revision, load_format
    for adapter in engine.lora_paths or ():
        yield getattr(adapter, "lora_path", adapter), None, "auto"


def _engine() -> Any:
    try:
        return get_server_args()
    except ValueError:  # as of a cache without an engine
        return None
