"""How a KV cache is split into blocks, the keys of the blocks, and their bytes.

A transformer keeps, for every token and every layer, one key vector and one value
vector per KV head. Engines group the tokens of a prompt into chunks of a fixed length,
and give every chunk a name that depends on *all* tokens up to its end, because
attention does: the same sentence after another beginning has another KV cache. The name
is therefore a chain,

    name[0] = hash(layout, tokens of chunk 0)
    name[i] = hash(name[i - 1], tokens of chunk i)

so that two prompts share exactly the names of their common leading chunks. A stored
block is one layer of one chunk; its key is the chunk's name followed by the layer.

In a cluster, a few chunks in a row are a *group*, whose blocks one node has. The name
of its first chunk stands before the names of all its chunks, and is the hash tag of
their keys.

No model runs in the demonstration. Prefill and decode, two processes that share only
the store, must agree on every byte and detect a block that is damaged, misplaced or
swapped. The contents are therefore a function of the chunk's name and the layer:

- A *tape* of 4 MiB of bfloat16 numbers is created once per process from SHAKE-128 (FIPS
  202) of a constant.
- A block has one row per token for K and one for V. Each row is a slice of the tape, at
  an offset derived by SHAKE-128 from the chunk's name and the layer. Two blocks are
  equal only if all of their hundreds of rows have equal offsets.

Slicing and joining only copies memory, ten times faster here than `random.randbytes`,
so that the figures of the demonstration are those of the store. It needs neither numpy
nor torch.
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import cache

from attrs import field, frozen
from attrs.validators import ge

DEFAULT_CHUNK_TOKENS = 256
_UNIT_BYTES = 64 << 10
_NAME_BYTES = 16  # 128 bits: two chunks with one name would be served each other's bytes, so make it not happen


@frozen
class KVLayout:
    """The shape of a model's KV cache in chunks. The defaults are Qwen2.5-7B's.

    They come from the model's config.json: 28 layers, 28 query heads that share 4 KV
    heads, 128 numbers per head, bfloat16. The layout of a block is
    `[K or V][token][KV head][number]`, without gaps.
    """

    model: str = "Qwen2.5-7B"
    layers: int = field(default=28, validator=ge(1))
    kv_heads: int = field(default=4, validator=ge(1))
    head_dim: int = field(default=128, validator=ge(1))
    element_bytes: int = field(default=2, validator=ge(1))
    chunk_tokens: int = field(default=DEFAULT_CHUNK_TOKENS, validator=ge(1))
    group_chunks: int = field(default=0, validator=ge(0))
    """In a cluster, how many chunks one node has together; else 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer: all KV heads."""
        return self.kv_heads * self.head_dim * self.element_bytes

    @property
    def rows(self) -> int:
        """Rows of `row_bytes` in a block: one of K and one of V per token of a
        chunk.
        """
        return 2 * self.chunk_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer of one chunk: the value of one key."""
        return self.rows * self.row_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all layers of one chunk."""
        return self.layers * self.block_bytes

    @property
    def chunk_footprint_bytes(self) -> int:
        """What a chunk takes in the pool of a server that nobody tuned: each block a
        whole number of units.
        """
        return self.layers * -(-self.block_bytes // _UNIT_BYTES) * _UNIT_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return 2 * self.row_bytes * self.layers

    def whole_chunks(self, tokens: int) -> int:
        """Number of full chunks of `tokens` tokens. As in engines, the rest is not
        stored.
        """
        return tokens // self.chunk_tokens


def chunk_names(layout: KVLayout, tokens: Sequence[int]) -> list[bytes]:
    """Return the name of every full chunk of `tokens`, in order: 16 bytes, and before
    them, with groups, the 16 of the first chunk of its group.

    The chain starts with the layout, so that caches of different shapes never share a
    name. The hash is BLAKE2b (RFC 7693). Token ids are hashed as 32-bit little-endian
    numbers; a larger one raises `struct.error`.
    """
    shape = (layout.model, layout.layers, layout.kv_heads, layout.head_dim, layout.element_bytes, layout.chunk_tokens)
    name = hashlib.blake2b(repr(shape).encode(), digest_size=_NAME_BYTES).digest()
    pack = struct.Struct(f"<{layout.chunk_tokens}I").pack
    names: list[bytes] = []
    tag = b""
    for start in range(0, layout.whole_chunks(len(tokens)) * layout.chunk_tokens, layout.chunk_tokens):
        chunk = pack(*tokens[start : start + layout.chunk_tokens])
        name = hashlib.blake2b(name + chunk, digest_size=_NAME_BYTES).digest()
        if layout.group_chunks and len(names) % layout.group_chunks == 0:
            tag = name
        names.append(tag + name)
    return names


def block_key(name: bytes, layer: int) -> str:
    """Return the key of one layer of the chunk `name`, such as `demo/0f...9c/L07`, or
    with a group `demo/{3d...a1}0f...9c/L07`.
    """
    tag, own = name[:-_NAME_BYTES].hex(), name[-_NAME_BYTES:].hex()
    return f"demo/{'{' + tag + '}' if tag else ''}{own}/L{layer:02d}"


def block_keys(layout: KVLayout, names: Sequence[bytes]) -> list[str]:
    """Return the keys of all blocks, chunk by chunk, and layer by layer within each.

    In this order, the longest stored prefix divided by the number of layers is the
    number of complete chunks: a chunk with an evicted layer does not count.
    """
    return [block_key(name, layer) for name in names for layer in range(layout.layers)]


_TAPE_BYTES = 4 << 20


@cache
def _tape() -> memoryview:
    """Return the tape: little-endian, finite bfloat16 numbers, 2**-5 <= abs(x) < 2."""
    tape = bytearray(hashlib.shake_128(b"infinistore demo").digest(_TAPE_BYTES))
    # The second byte of a little-endian bfloat16 is the sign and seven of the eight
    # exponent bits.
    allowed = bytes((0x3D, 0x3E, 0x3F, 0xBD, 0xBE, 0xBF))
    tape[1::2] = tape[1::2].translate(bytes(allowed[byte % len(allowed)] for byte in range(256)))
    return memoryview(bytes(tape))


def block_content(layout: KVLayout, name: bytes, layer: int) -> bytes:
    """Return the `layout.block_bytes` bytes of one layer of the chunk called `name`."""
    tape, row_bytes = _tape(), layout.row_bytes
    places = (len(tape) - row_bytes) // 2  # a row starts on a whole bfloat16 number
    stream = hashlib.shake_128(struct.pack("<I", layer) + name).digest(4 * layout.rows)
    starts = [2 * (number % places) for number in struct.unpack(f"<{layout.rows}I", stream)]
    return b"".join([tape[start : start + row_bytes] for start in starts])


def first_difference(expected: bytes, found: bytes | bytearray | memoryview) -> int | None:
    """Return the index of the first different or missing byte, or None."""
    found = bytes(found)  # comparing a memoryview goes number by number, 20 times slower than this copy and a memcmp
    if found == expected:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(expected), len(found)))
