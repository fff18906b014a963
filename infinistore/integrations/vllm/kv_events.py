"""The connector's changes as vLLM's KV cache events, which vLLM's publisher sends."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import attrs
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from infinistore.integrations.vllm.block_events import BlockEvents, Change, SavedBlocks
from infinistore.integrations.vllm.groups import Group

__all__ = ["Stages", "WorkerMetadata", "describer", "events_of"]

Stages: TypeAlias = Mapping[int, Mapping[int, tuple[str, ...]]]

_REMOTE = "REMOTE"
_MOST_BLOCKS = 512
"""How many blocks one event has at most."""


class WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers have written, and, with the first step of a pipeline within a
    MultiConnector, the labels of each stage's layers, by the index of their group.
    """

    def __init__(self, saved: SavedBlocks, stages: Stages | None = None) -> None:
        self.saved = saved
        self.stages = stages or {}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Add another worker's."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.saved + other.saved, {**self.stages, **other.stages})


@attrs.frozen
class _About:
    lora_id: int | None
    lora_name: str | None


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
        return Change(tuple(hashes), parent, tuple(tokens), about)

    return describe


def events_of(events: BlockEvents, group: Group) -> Iterator[BlockStored | BlockRemoved]:
    """Take the changes, as events."""
    for change in events.take():
        for first in range(0, len(change.names), _MOST_BLOCKS):
            names = list(change.names[first : first + _MOST_BLOCKS])
            if not change.tokens:
                yield BlockRemoved(block_hashes=names, medium=MEDIUM_STORAGE, group_idx=group.index, locality=_REMOTE)
                continue
            tokens = change.tokens[first * group.block_tokens : (first + len(names)) * group.block_tokens]
            yield BlockStored(
                block_hashes=names,
                parent_block_hash=change.names[first - 1] if first else change.parent,
                token_ids=list(tokens),
                block_size=group.block_tokens,
                lora_id=change.about.lora_id,
                lora_name=change.about.lora_name,
                medium=MEDIUM_STORAGE,
                group_idx=group.index,
                locality=_REMOTE,
            )
