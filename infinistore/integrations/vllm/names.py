"""The keys of one engine's blocks.

A block of tokens is stored as one value for each layer and each tensor parallel shard
of a layer. A layer can thus be written while the next one is computed, and each worker
reads its own shard.

    vllm/NAMESPACE/MODEL/FINGERPRINT/HASH/SHARD/LAYER

In a cluster, HASH begins with the hash tag of its group of blocks: `{TAG}HASH`.
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence

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
    facts: Mapping[str, str] = attrs.field(factory=dict, eq=False)
    """What the fingerprint stands for."""

    @property
    def announcement(self) -> str:
        """The key under which engines say what the fingerprint stands for."""
        return "vllm-engines" + self.prefix.removeprefix("vllm")

    @property
    def keys_per_block(self) -> int:
        """The number of keys of one block of tokens, all layers together."""
        return len(self.layers) * self.shards

    def key(self, block_hash: str, shard: int, layer: str) -> str:
        """Return the key of one shard of one layer of a block."""
        return f"{self.prefix}/{block_hash}/{shard}/{layer}"

    def block_of(self, key: str, layers: Container[str]) -> str | None:
        """Return the hash of the block that has this key of one of these layers; None
        if it is another key.
        """
        own = f"{self.prefix}/"
        block, _, shard_and_layer = key[len(own) :].partition("/")
        return block if key.startswith(own) and shard_and_layer.partition("/")[2] in layers else None

    def some_keys(self, hashes: Sequence[str], layers: Sequence[str] = (), *, most: int) -> tuple[list[str], int]:
        """Return keys of these layers (or of all), block by block, and how many each
        block has: all of them, unless these are together more than `most`.

        Else a block has the keys of its first and last layer in one shard, which are
        evicted and written last, and as many others as there is room for. From block to
        block, they are others.
        """
        ends = self._ends(layers)
        each = max(2, most // max(1, len(hashes)))
        if len(ends) <= each:
            return self.all_keys(hashes, layers), len(ends)
        shards, others = self.shards, each - 2
        keys = []
        for number, block in enumerate(hashes):
            picked = [ends[number % shards], ends[-1 - number % shards]]
            picked += [ends[(number * others + turn) % len(ends)] for turn in range(others)]
            keys += [f"{self.prefix}/{block}{end}" for end in picked]
        return keys, each

    def all_keys(self, hashes: Iterable[str], layers: Sequence[str] = ()) -> list[str]:
        """Return the keys of these layers (or of all), block by block."""
        ends = self._ends(layers)
        return [f"{self.prefix}/{block}{end}" for block in hashes for end in ends]

    def _ends(self, layers: Sequence[str]) -> list[str]:
        return [f"/{shard}/{layer}" for layer in (layers or self.layers) for shard in range(self.shards)]


def block_names(
    facts: Mapping[str, object],
    *,
    model: str,
    namespace: str,
    layers: Sequence[str],
    shards: int,
    group_blocks: int = 0,
) -> BlockNames:
    """Return the names for an engine. `layers` are the labels of its layers.

    `facts` is everything that must match for blocks to be interchangeable.
    """
    if group_blocks:
        facts = {**facts, "group blocks": group_blocks}
    parts = ["vllm", namespace, model.rstrip("/").rpartition("/")[2][:100]]
    prefix = "/".join([part for part in parts if part] + [fingerprint({**facts, "namespace": namespace})])
    told = {name: str(value) for name, value in {**facts, "namespace": namespace}.items()}
    return BlockNames(prefix, tuple(layers), shards, group_blocks, told)


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short label for each layer: its number, if that is unique."""
    numbers = {name: ".".join(re.findall(r"\d+", name)) for name in names}
    if all(numbers.values()) and len(set(numbers.values())) == len(names):
        return numbers
    return {name: name for name in names}
