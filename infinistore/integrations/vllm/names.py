"""The keys of one engine's blocks.

A block of tokens is stored as one value for each layer and each tensor parallel shard
of a layer. A layer can thus be written while the next one is computed, and each worker
reads its own shard.

    vllm/NAMESPACE/MODEL/FINGERPRINT/HASH/SHARD/LAYER

In a cluster, HASH begins with the hash tag of its group of blocks: `{TAG}HASH`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from infinistore.integrations.internal.prefix_keys import fingerprint

__all__ = ["BlockNames", "block_names", "layer_labels"]


@attrs.frozen
class BlockNames:
    """The keys of blocks. `layers` are the labels of the layers in computation
    order.
    """

    prefix: str
    layers: tuple[str, ...]
    shards: int = 1
    """The number of tensor parallel shards of each layer."""
    group_blocks: int = 0
    """In a cluster, how many blocks in a row have the same hash tag; else 0."""

    @property
    def keys_per_block(self) -> int:
        """The number of keys of one block of tokens."""
        return len(self.layers) * self.shards

    def key(self, block_hash: str, shard: int, layer: str) -> str:
        """Return the key of one shard of one layer of a block."""
        return f"{self.prefix}/{block_hash}/{shard}/{layer}"

    def last_keys(self, hashes: Iterable[str]) -> list[str]:
        """Return the keys that are written last, `shards` per block."""
        last = self.layers[-1]
        return [self.key(block, shard, last) for block in hashes for shard in range(self.shards)]

    def all_keys(self, hashes: Iterable[str]) -> list[str]:
        """Return all keys, block by block, `keys_per_block` per block."""
        ends = [f"/{shard}/{layer}" for layer in self.layers for shard in range(self.shards)]
        return [f"{self.prefix}/{block}{end}" for block in hashes for end in ends]


def block_names(
    facts: Mapping[str, object],
    *,
    model: str,
    namespace: str,
    layers: Sequence[str],
    shards: int,
    group_blocks: int = 0,
) -> BlockNames:
    """Return the names for an engine.

    `facts` is everything that must match for blocks to be interchangeable.
    """
    if group_blocks:
        facts = {**facts, "group blocks": group_blocks}
    parts = ["vllm", namespace, model.rstrip("/").rpartition("/")[2][:100]]
    prefix = "/".join([part for part in parts if part] + [fingerprint({**facts, "namespace": namespace})])
    return BlockNames(prefix, tuple(layer_labels(layers).values()), shards, group_blocks)


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short label for each layer: its number, if that is unique."""
    numbers = {name: ".".join(re.findall(r"\d+", name)) for name in names}
    if all(numbers.values()) and len(set(numbers.values())) == len(names):
        return numbers
    return {name: name for name in names}
