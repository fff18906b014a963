"""The connector's changes as vLLM's KV cache events, which vLLM's publisher sends."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, get_kv_cache_spec_kind

from infinistore.integrations.vllm.block_events import BlockEvents, Change, SavedBlocks
from infinistore.integrations.vllm.blocks import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Stages", "Teller", "WorkerMetadata", "describer", "teller_of"]

Stages: TypeAlias = Mapping[int, Mapping[int, tuple[str, ...]]]

_REMOTE = "REMOTE"
_MOST_BLOCKS = 512
"""How many blocks one event has at most."""


class WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers have written, how many are past which reset of the cache, by its
    number, and, with the first step of a pipeline within a MultiConnector, the labels
    of each stage's layers, by the index of their group.
    """

    def __init__(self, saved: SavedBlocks, stages: Stages | None = None, past: Counter[int] | None = None) -> None:
        self.saved = saved
        self.stages = stages or {}
        self.past = past or Counter()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Add another worker's."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.saved + other.saved, {**self.stages, **other.stages}, self.past + other.past)


@attrs.frozen
class _About:
    lora_id: int | None
    lora_name: str | None


@attrs.frozen
class Teller:
    """Makes events of the changes of one group's blocks, which vLLM calls a `kind`."""

    changes: BlockEvents
    group: Group
    kind: str

    def take(self) -> Iterator[BlockStored | BlockRemoved]:
        """Take the changes, as events."""
        for whole in self.changes.take():
            for first in range(0, len(whole.names), _MOST_BLOCKS):
                yield self._event(whole.part(first, first + _MOST_BLOCKS))

    def _event(self, change: Change) -> BlockStored | BlockRemoved:
        where = {"medium": MEDIUM_STORAGE, "group_idx": self.group.index, "locality": _REMOTE}
        if not change.tokens:
            return BlockRemoved(block_hashes=list(change.names), **where)
        return BlockStored(
            block_hashes=list(change.names),
            parent_block_hash=change.parent,
            token_ids=list(change.tokens),
            block_size=self.group.block_tokens,
            lora_id=change.about.lora_id,
            lora_name=change.about.lora_name,
            extra_keys=to_event_extra_keys(change.extra_keys),
            kv_cache_spec_kind=self.kind,
            **where,
        )


def teller_of(vllm_config: "VllmConfig", kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> Teller | None:
    """Return what tells of the first group that attends to all tokens, if vLLM's
    configuration asks for events.
    """
    told = next((group for group in groups if group.is_full), None)
    config = vllm_config.kv_events_config
    if told is None or config is None or not config.enable_kv_cache_events:
        return None
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if told.block_tokens % hash_tokens:
        return None  # vLLM has no hashes of its blocks
    changes = BlockEvents(vllm_config.parallel_config.world_size, describer(told, hash_tokens))
    kind = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[told.index].kv_cache_spec)
    return Teller(changes, told, kind.value)


def describer(group: Group, hash_tokens: int) -> Callable[[Any, int, int], Change]:
    """Return what describes blocks of this group, where each hash of a request is of
    `hash_tokens` tokens.
    """
    each = group.block_tokens // hash_tokens

    def describe(request: Any, first: int, end: int) -> Change:
        ends = range(max(first, 1), end + 1)
        hashes = [maybe_convert_block_hash(request.block_hashes[number * each - 1]) for number in ends]
        parent = hashes.pop(0) if first else None
        tokens = request.all_token_ids[first * group.block_tokens : end * group.block_tokens]
        lora = request.lora_request
        about = _About(lora.adapter_id, lora.name) if lora else _About(None, None)
        return Change(tuple(hashes), parent, tuple(tokens), about, _extra_keys(request, group, first, end))

    return describe


def _extra_keys(request: Any, group: Group, first: int, end: int) -> tuple[Any, ...]:
    keys, image = [], 0
    for number in range(first, end):
        start = number * group.block_tokens
        own, image = generate_block_hash_extra_keys(request, start, start + group.block_tokens, image)
        keys.append(own)
    return tuple(keys) if any(keys) else ()
