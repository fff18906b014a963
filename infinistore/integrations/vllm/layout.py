"""What of vLLM's KV cache is stored, under which names, and what the values of a block
depend on besides its tokens: the model, settings of vLLM that change what the model
computes, and inputs.

Whatever is missing here lets an engine read blocks that are wrong for it, and whatever
is here without need keeps engines from sharing.

Two kinds of input have names that say too little. A LoRA adapter is known by a number,
a name and a path, and what is there may be trained again: so its identity is the
content of its files. vLLM reads these when a request with that number comes, or a while
before, and again if it had no room to keep them. So if files change later, nobody knows
which ones vLLM computes with, and requests with that adapter are computed as without a
store.

Images, videos and sounds get a number instead of a hash if neither vLLM's prefix cache
nor its cache of processed inputs is on, for which it would need the hash. Each process
counts from the same number on, so that the same name is another image in another
engine, and after a restart. Requests with them are computed as without a store, too.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from infinistore.errors import ConfigError
from infinistore.integrations.internal.prefix_keys import fingerprint_of_config
from infinistore.integrations.internal.weights import WeightFiles, identity_of_files, weight_files
from infinistore.integrations.vllm.announcements import AnnouncedBlocks, AnnouncedEngine
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup, LayerGroups, block_names, layer_labels
from infinistore.integrations.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


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


@attrs.frozen
class _Adapter:
    path: str
    files: WeightFiles


class Adapters:
    """The adapters of an engine, and of its requests."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        settings = vllm_config.lora_config
        self._dtype = "" if settings is None else str(settings.lora_dtype)
        self._seen: dict[int, _Adapter | None] = {}  # by vLLM's numbers; None: it is not known what vLLM has
        self._identities: dict[str, str] = {}  # by request

    def are_unknown(self, request: Any) -> bool:
        """Return whether a request has an adapter of which nobody knows what it is. The
        answer is the same until the request is forgotten.
        """
        if request.lora_request is None:
            return False
        if request.request_id not in self._identities:
            self._identities[request.request_id] = self._identify(request.lora_request)
        return not self._identities[request.request_id]

    def identity(self, request: Any) -> str:
        """Return what stands for the adapter of a request; nothing without one."""
        return self._identities.get(request.request_id, "")

    def forget(self, request: Any) -> None:
        """Forget a request. Its adapter is remembered."""
        self._identities.pop(request.request_id, None)

    def _identify(self, lora: "LoRARequest") -> str:
        files = weight_files(lora.lora_path)
        now = None if files is None or lora.load_inplace else _Adapter(lora.lora_path, files)
        number = lora.lora_int_id
        is_first = number not in self._seen
        known = self._seen.setdefault(number, now)
        if now is not None and known == now and (identity := now.files.identity()):
            return f"{identity} {self._dtype} {lora.is_3d_lora_weight}"
        self._seen[number] = None
        if is_first or known is not None:
            LOG.warning(
                "InfiniStore: requests with the adapter %s are computed, and nothing of them is stored: %s",
                lora.lora_name,
                "it is replaced in place; load another version from a path of its own, under a name of its own"
                if lora.load_inplace
                else "it has no files that can be read"
                if files is None
                else "it was replaced since vLLM loaded it; load another version under a name of its own",
            )
        return ""


_NUMBERED: Final = re.compile(r"(^|:)renderer\d+-mm-\d+-")
"""A name with a number. One that vLLM has for an adapter begins with that and a
colon."""


class UnhashedInputs:
    """Knows which requests have such inputs, and warns of the first."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        inputs = vllm_config.model_config.multimodal_config
        without = inputs is not None and inputs.mm_processor_cache_gb == 0
        self._all = without and not vllm_config.cache_config.enable_prefix_caching
        self._told = False

    def are_in(self, request: Any) -> bool:
        """Whether a request has inputs without a hash, which keys cannot tell apart."""
        inputs = request.mm_features
        # A name may also come from a process whose settings are not known here.
        if not inputs or not (self._all or any(_NUMBERED.search(one.identifier) for one in inputs)):
            return False
        if not self._told:
            self._told = True
            LOG.warning(
                "InfiniStore: requests with images, videos or sounds are computed, and nothing of them is stored: vLLM"
                " does not hash them; start it with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
            )
        return True


_UNKNOWN_WEIGHTS = (
    "it is not known what its weights are: they have no files at hand, or are replaced while vLLM runs; set namespace"
    " in kv_connector_extra_config, to another one for other weights"
)


@attrs.frozen
class Layout:
    """What of a model is stored. Without `groups`, `obstacle` says why nothing is."""

    groups: tuple[LayerGroup, ...]
    names: BlockNames
    labels: dict[str, str]
    """The label of each layer, by its name."""
    ranks: int
    """How many ranks have a part of each layer of their own."""
    obstacle: str = ""

    @classmethod
    def of(
        cls,
        vllm_config: "VllmConfig",
        kv_cache_config: KVCacheConfig,
        settings: ConnectorSettings,
        *,
        clustered: bool = False,
    ) -> "Layout":
        """Return the layout of an engine's KV cache.

        Raises:
            ConfigError: the blocks are spread over workers, or a layer cannot be stored
                as so many shards.
        """
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ConfigError(
                "InfiniStoreConnector cannot store blocks that context parallelism spreads over workers: start vLLM"
                " without --decode-context-parallel-size and --prefill-context-parallel-size, or without the connector"
            )
        stored = [(index, kv_cache_config.kv_cache_groups[index]) for index in kv_cache_config.transfer_group_ids]
        labels = layer_labels([name for _, group in stored for name in group.layer_names])
        groups: list[LayerGroup] = []
        weights = weights_of(vllm_config)
        obstacle = "" if stored else "it has no KV cache"
        if not weights and not settings.namespace and not obstacle:
            obstacle = _UNKNOWN_WEIGHTS
        for index, spec in stored:
            if (reason := _obstacle(spec)) and not obstacle:
                obstacle = reason
            if not obstacle:
                groups.append(_group(index, spec, tuple(labels[name] for name in spec.layer_names)))
        if obstacle:
            groups = []
        ranks = parallel.tensor_parallel_size // kv_cache_config.kv_tp_replicas
        if groups and settings.shards:
            _check_shards(settings.shards, ranks, [spec for _, spec in stored])
        names = _names(
            *(vllm_config, kv_cache_config, settings, groups, labels),
            shards=settings.shards or ranks,
            weights=weights,
            clustered=clustered,
        )
        return cls(tuple(groups), names, labels, ranks, obstacle)

    def shards_of(self, rank: int) -> range:
        """Return which shards of each layer a rank has."""
        each = self.names.shards // self.ranks
        return range(rank * each, (rank + 1) * each)


def announced_blocks(
    layout: Layout, vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig
) -> AnnouncedBlocks | None:
    """Return what routers are told of the blocks; None if no layers that are stored
    attend to all tokens.

    The size of a token is approximate: in windows and chunks as if all tokens were
    kept, a state divided by the tokens of its block, and all stages of a pipeline like
    the first.
    """
    group = next((group for group in layout.groups if group.is_full), None)
    if group is None:
        return None
    stored = [kv_cache_config.kv_cache_groups[index] for index in kv_cache_config.transfer_group_ids]
    rank_bytes = sum(_token_bytes(one) for one in stored)
    ranks = layout.ranks * vllm_config.parallel_config.pipeline_parallel_size
    return AnnouncedBlocks(
        attrs.evolve(layout.names, layers=group.layers),
        group.block_tokens,
        LayerGroups(layout.groups).hash_tokens,
        max(1, round(rank_bytes * ranks)),
    )


def announced_engine(url: str, names: BlockNames, kv_cache_config: KVCacheConfig) -> AnnouncedEngine:
    """Return what routers are told of an engine at this URL.

    The size of its cache is that of the first group of layers that attends to all
    tokens, or else of the first group: too large if there are others, for groups share
    the blocks.
    """
    groups = kv_cache_config.kv_cache_groups
    full = [group for group in groups if isinstance(_specs(group)[0], FullAttentionSpec)]
    block_tokens = [group.kv_cache_spec.block_size for group in [*full, *groups]]
    tokens = kv_cache_config.num_blocks * block_tokens[0] if block_tokens else 0
    return AnnouncedEngine(url, names.announcement, tokens)


def _token_bytes(group: "KVCacheGroupSpec") -> float:
    """Return the size of a token in one rank."""
    specs = _specs(group)
    layer_bytes: float = sum(spec.page_size_bytes / spec.block_size for spec in specs) / len(specs)
    return layer_bytes * len(group.layer_names)


def _specs(group: "KVCacheGroupSpec") -> list[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _obstacle(group: "KVCacheGroupSpec") -> str:
    """Return why a group cannot be stored; nothing if it can."""
    specs = _specs(group)
    for spec in specs:
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode not in ("align", "all"):
            return (
                "vLLM keeps no states at the ends of blocks; add --enable-prefix-caching --mamba-cache-mode align,"
                " if the model supports it"
            )
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec):
            return f"it has layers of the kind {type(spec).__name__}, which the connector does not know"
    if len({_kind(spec) for spec in specs}) > 1:
        return f"a group has layers of several kinds: {', '.join(sorted({type(spec).__name__ for spec in specs}))}"
    return "" if group.kv_cache_spec.prefix_cacheable else "vLLM cannot take a part of it from a cache"


def _check_shards(shards: int, ranks: int, groups: Iterable["KVCacheGroupSpec"]) -> None:
    """Check that each rank has whole shards, each of which is some heads with their
    keys and values.
    """
    setting = "kv_connector_extra_config: shards"
    if shards % ranks:
        raise ConfigError(
            f"{setting} must be a multiple of {ranks}, the number of ranks with KV heads of their own, not {shards}"
        )
    each = shards // ranks
    for spec in (spec for group in groups for spec in _specs(group)) if each > 1 else ():
        heads = getattr(spec, "num_kv_heads", 0)
        if isinstance(spec, MambaSpec) or spec.num_heads != heads:
            raise ConfigError(
                f"{setting} must be {ranks} or left out: layers of the kind {type(spec).__name__} have no KV heads that"
                " could be stored apart"
            )
        if heads % each:
            raise ConfigError(
                f"{setting} must divide the {ranks * heads} KV heads of a layer, and be a multiple of {ranks}, the"
                f" number of ranks with KV heads of their own, not {shards}"
            )


def _kind(spec: Any) -> tuple[int, int, bool, int]:
    """Return window, chunk, whether it is a state, and the block size."""
    window = spec.sliding_window + spec.extra_retained_tokens if isinstance(spec, SlidingWindowSpec) else 0
    chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0
    return window, chunk, isinstance(spec, MambaSpec), spec.block_size


def _group(index: int, group: "KVCacheGroupSpec", labels: tuple[str, ...]) -> LayerGroup:
    spec = _specs(group)[0]
    window, chunk, state, block_tokens = _kind(spec)
    offered = state and spec.mamba_cache_mode == "align"
    return LayerGroup(labels, block_tokens, index, window=window, chunk=chunk, state=state, offered=offered)


def _names(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    settings: ConnectorSettings,
    groups: list[LayerGroup],
    labels: dict[str, str],
    *,
    shards: int,
    weights: str,
    clustered: bool,
) -> BlockNames:
    """Return the names of blocks: equal if and only if blocks are interchangeable.

    If `clustered`, as many blocks as have `group_tokens` are on one node of a cluster.
    """
    model = settings.model or vllm_config.model_config.model
    unit = max(1, LayerGroups(groups).hash_tokens)
    attention = vllm_config.attention_config
    facts = {
        **model_facts(vllm_config, model),
        "weights": weights,
        "cache dtype": [vllm_config.cache_config.cache_dtype, vllm_config.cache_config.kv_cache_dtype_skip_layers],
        "attention": [attention.backend, attention.backend_per_kind, attention.indexer_kv_dtype],
        "layout": kv_cache_config.kv_cache_layout,
        "kernels": _kernels(),
        "block tokens": unit,
        "shards": shards,
    }
    if not LayerGroups(groups).is_uniform:
        facts["groups"] = sorted(
            {
                (*_kind(spec), str(getattr(spec, "shapes", "")), str(getattr(spec, "dtypes", "")))
                for group in kv_cache_config.kv_cache_groups
                for spec in _specs(group)
            }
        )
    return block_names(
        facts,
        model=model,
        namespace=settings.namespace,
        layers=tuple(labels.values()),
        shards=shards,
        group_blocks=max(1, settings.group_tokens // unit) if clustered else 0,
    )


def _kernels() -> object:
    """Return what else determines a block's layout: a CPU's instruction set."""
    if not current_platform.is_cpu():
        return current_platform.device_type
    import torch

    capabilities = torch.cpu.get_capabilities()
    return [capabilities.get("architecture"), torch.backends.cpu.get_cpu_capability(), capabilities.get("amx_tile")]
