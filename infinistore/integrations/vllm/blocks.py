"""What the connector's scheduler half and its workers say to each other about blocks:
in which group of layers they are, what they are called, and which are read and written.

Each group of layers of a model has a table of blocks of its own. What a group needs
after n tokens decides what is stored and read. Full attention needs every block; a
sliding window, the blocks of the last tokens; local attention, those of the current
chunk; a state (Mamba, linear attention), the one after the last block.

A block of tokens is stored as one value for each layer and each tensor parallel shard
of a layer. A layer can thus be written while the next one is computed, and each worker
reads its own shard.

    vllm/NAMESPACE/MODEL/FINGERPRINT/HASH/SHARD/LAYER

In a cluster, HASH begins with the hash tag of its group of blocks: `{TAG}HASH`.
"""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from infinistore.integrations.internal.prefix_keys import fingerprint


@attrs.frozen
class LayerGroup:
    """Layers with the same table of blocks.

    At most one of `window`, `chunk` and `state` is set; without any, the layers attend
    to all tokens.
    """

    layers: tuple[str, ...]
    """The labels of its layers, in computation order."""
    block_tokens: int
    index: int = 0
    """Its place among vLLM's tables of blocks."""
    window: int = 0
    """How many tokens back its layers attend, the current one included, plus what vLLM
    keeps besides."""
    chunk: int = 0
    """Its layers attend within chunks of so many tokens."""
    state: bool = False
    """Its layers keep one state, not keys and values of tokens."""
    offered: bool = False
    """vLLM says which states are complete; the table of blocks does not."""

    @property
    def is_full(self) -> bool:
        """Whether its layers attend to all tokens."""
        return not (self.window or self.chunk or self.state)

    def needed(self, tokens: int) -> range:
        """Return the numbers of the blocks that the token after `tokens` needs.

        `tokens` is a multiple of the block size.
        """
        end = tokens // self.block_tokens
        if self.state:
            first = max(0, tokens - 1)
        elif self.window:
            first = max(0, tokens - self.window + 1)
        else:
            first = tokens // self.chunk * self.chunk if self.chunk else 0
        return range(min(first // self.block_tokens, end), end)


class LayerGroups(tuple[LayerGroup, ...]):
    """All groups of a model's layers."""

    @property
    def is_uniform(self) -> bool:
        """Whether there is one group, which attends to all tokens."""
        return len(self) == 1 and self[0].is_full

    @cached_property
    def hash_tokens(self) -> int:
        """How many tokens a hash stands for: each block ends with such a hash."""
        return math.gcd(*(group.block_tokens for group in self))

    @cached_property
    def alignment(self) -> int:
        """A read is a multiple of so many tokens: blocks of each group end there."""
        return math.lcm(*(group.block_tokens for group in self))

    def aligned(self, tokens: int) -> int:
        """Return the most tokens, up to this number, that can be read."""
        return tokens // self.alignment * self.alignment

    def hashes_of(self, group: LayerGroup, numbers: Iterable[int], hashes: Sequence[str]) -> list[str]:
        """Return the hashes of blocks of a group: for each that of its last tokens."""
        each = group.block_tokens // self.hash_tokens
        return [hashes[(number + 1) * each - 1] for number in numbers]


@attrs.frozen
class BlockNames:
    """The keys of blocks. `layers` are the layers' labels in computation order."""

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
        """Return the hash of the block with this key of one of the layers, or None."""
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


def salt_key(cache_salt: str, first: int) -> bytes:
    """Return what a block depends on besides its tokens, if its request has at most a
    cache salt: no adapter, images or embeddings. `first` is its first token's number.
    """
    return repr((("cache_salt", cache_salt),)).encode() if cache_salt and first == 0 else b""


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short label for each layer: its number, if that is unique."""
    numbers = {name: ".".join(re.findall(r"\d+", name)) for name in names}
    if all(numbers.values()) and len(set(numbers.values())) == len(names):
        return numbers
    return {name: name for name in names}


@attrs.frozen
class Blocks:
    """Blocks of one group of layers: what they are called, and where they are."""

    hashes: list[str]
    block_ids: list[int]
    group: int = 0


@attrs.frozen
class Load:
    """Read these blocks for a request in the background."""

    request_id: str
    parts: list[Blocks]
    tokens: int = 0
    """How many tokens that spares to compute."""
    is_on_disk: bool = False
    """Whether the store had some of them on disk only when it was asked."""
    limit_s: float | None = None
    """After how long to give it up: it only measures whether a load pays again."""

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all groups."""
        return [block_id for part in self.parts for block_id in part.block_ids]


@attrs.frozen
class Save:
    """Write these blocks of a request, which are full at the end of this step."""

    request_id: str
    blocks: Blocks
    number: int = 0
    """If it is not 0, workers say when they have written them."""
    ttl_s: float | None = None
    """How long after that they end; None: as the connector's settings say."""


@attrs.frozen
class Step:
    """One step: loads, saves, preempted requests, whether anything is computed, and how
    often the cache was reset before.
    """

    loads: list[Load] = attrs.field(factory=list)
    saves: list[Save] = attrs.field(factory=list)
    preempted: set[str] = attrs.field(factory=set)
    computes: bool = False
    resets: int = 0
    number: int = 0
    """If it is not 0, workers report it when it has ended, with what they have read."""
