"""What of vLLM's KV cache is stored, and under which names."""

from typing import TYPE_CHECKING, Any

import attrs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from infinistore.errors import ConfigError
from infinistore.integrations.vllm.blocks import BlockNames, Group, block_names, hash_tokens, is_uniform, layer_labels
from infinistore.integrations.vllm.facts import model_facts, weights_of
from infinistore.integrations.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

__all__ = ["Layout"]


_UNKNOWN_WEIGHTS = (
    "it is not known what its weights are: they have no files at hand, or are replaced while vLLM runs; set namespace"
    " in kv_connector_extra_config, to another one for other weights"
)


@attrs.frozen
class Layout:
    """What of a model is stored. `groups` is empty if something cannot be stored, and
    `obstacle` says what.
    """

    groups: tuple[Group, ...]
    names: BlockNames
    labels: dict[str, str]
    """The label of each layer, by its name."""
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
            ConfigError: the blocks are spread over workers.
        """
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            raise ConfigError(
                "InfiniStoreConnector cannot store blocks that context parallelism spreads over workers: start vLLM"
                " without --decode-context-parallel-size and --prefill-context-parallel-size, or without the connector"
            )
        stored = [(index, kv_cache_config.kv_cache_groups[index]) for index in kv_cache_config.transfer_group_ids]
        labels = layer_labels([name for _, group in stored for name in group.layer_names])
        groups: list[Group] = []
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
        names = _names(vllm_config, kv_cache_config, settings, groups, labels, weights=weights, clustered=clustered)
        return cls(tuple(groups), names, labels, obstacle)


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


def _kind(spec: Any) -> tuple[int, int, bool, int]:
    """Return window, chunk, whether it is a state, and the block size."""
    window = spec.sliding_window + spec.extra_retained_tokens if isinstance(spec, SlidingWindowSpec) else 0
    chunk = spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0
    return window, chunk, isinstance(spec, MambaSpec), spec.block_size


def _group(index: int, group: "KVCacheGroupSpec", labels: tuple[str, ...]) -> Group:
    spec = _specs(group)[0]
    window, chunk, state, block_tokens = _kind(spec)
    offered = state and spec.mamba_cache_mode == "align"
    return Group(labels, block_tokens, index, window=window, chunk=chunk, state=state, offered=offered)


def _names(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    settings: ConnectorSettings,
    groups: list[Group],
    labels: dict[str, str],
    *,
    weights: str,
    clustered: bool,
) -> BlockNames:
    """Return the names of blocks: equal if and only if blocks are interchangeable.

    If `clustered`, as many blocks as have `group_tokens` are on one node of a cluster.
    """
    model = settings.model or vllm_config.model_config.model
    shards = vllm_config.parallel_config.tensor_parallel_size // kv_cache_config.kv_tp_replicas
    unit = max(1, hash_tokens(groups))
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
    if not is_uniform(groups):
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
