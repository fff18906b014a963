"""The keys of one engine's blocks.

A block of tokens is stored as one value for each layer and for each part that tensor parallelism makes of a layer. So a
layer can be written while the next is computed, and each worker reads what is its own.

    vllm/NAMESPACE/MODEL/FINGERPRINT/HASH/SHARD/LAYER
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from infinistore.integrations.prefix_keys import fingerprint

__all__ = ["BlockNames", "block_names", "layer_labels"]


@attrs.frozen
class BlockNames:
    """How blocks are called. `layers` are the labels of the layers, in the order in which they are computed."""

    prefix: str
    layers: tuple[str, ...]
    shards: int = 1
    """Into how many parts tensor parallelism cuts each layer of a block."""

    @property
    def keys_per_block(self) -> int:
        """How many keys one block of tokens has."""
        return len(self.layers) * self.shards

    def key(self, block_hash: str, shard: int, layer: str) -> str:
        """Return the key of one part of a block."""
        return f"{self.prefix}/{block_hash}/{shard}/{layer}"

    def last_keys(self, hashes: Iterable[str]) -> list[str]:
        """Return what is written last of each block, `shards` keys a block."""
        last = self.layers[-1]
        return [self.key(block, shard, last) for block in hashes for shard in range(self.shards)]

    def all_keys(self, hashes: Iterable[str]) -> list[str]:
        """Return all keys of each block, `keys_per_block` a block, block by block."""
        ends = [f"/{shard}/{layer}" for layer in self.layers for shard in range(self.shards)]
        return [f"{self.prefix}/{block}{end}" for block in hashes for end in ends]


def block_names(
    facts: Mapping[str, object], *, model: str, namespace: str, layers: Sequence[str], shards: int
) -> BlockNames:
    """Return the names for an engine; `facts` is all that must be the same for blocks to be interchangeable."""
    parts = ["vllm", namespace, model.rstrip("/").rpartition("/")[2][:100]]
    prefix = "/".join([part for part in parts if part] + [fingerprint({**facts, "namespace": namespace})])
    return BlockNames(prefix, tuple(layer_labels(layers).values()), shards)


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short label for each layer: its number, where the names tell the layers apart by that."""
    numbers = {name: ".".join(re.findall(r"\d+", name)) for name in names}
    if all(numbers.values()) and len(set(numbers.values())) == len(names):
        return numbers
    return {name: name for name in names}
