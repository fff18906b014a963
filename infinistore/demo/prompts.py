"""The options of the demonstration, its two prompts, and the blocks of their KV cache.

A transformer keeps, for every token and every layer, one key vector and one value
vector per KV head. Engines group the tokens of a prompt into chunks of a fixed length,
and give every chunk a name that depends on all tokens up to its end, because attention
does: the same sentence after another beginning has another KV cache. The name is
therefore a chain,

    name[0] = hash(layout, tokens of chunk 0)
    name[i] = hash(name[i - 1], tokens of chunk i)

so that two prompts share exactly the names of their common leading chunks. A block is
one layer of one chunk; its key is the chunk's name followed by the layer. In a cluster,
a few chunks in a row are a group that one node owns: the name of its first chunk is the
hash tag of all its keys.

No model runs. Prefill and decode must agree on every byte, and notice a block that is
damaged, misplaced or swapped. So each row of a block, one per token for K and one for
V, is a slice of a tape of 4 MiB, at an offset that SHAKE-128 (FIPS 202) derives from
the chunk's name and the layer. Slicing only copies memory, so that the figures of the
demonstration are those of the store.

Imports little: the help of the command line needs it.
"""

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from attrs import field, frozen
from attrs.validators import ge, gt

from infinistore.sizes import GIB, MIB, describe_size

CONTEXT_TOKENS: Final = 32_768
"""The longest prompt that Qwen2.5-7B is made for; a longer text is cut."""
DEFAULT_POOL_BYTES: Final = GIB
SMALLER_POOL_BYTES: Final = 512 * MIB
"""With a disk, because the simulated model computes prompts that fill the pool; and of
each node of a cluster."""
GROUP_CHUNKS: Final = 2
"""How many chunks one node of a cluster owns together: few, so that a short text has
several groups."""

_USABLE_PART_OF_POOL = 0.75  # below what a server evicts at, so that nothing is lost between prefill and decode
_UNIT_BYTES = 64 << 10
_NAME_BYTES = 16  # 128 bits: chunks of one name would be served each other's bytes


class DemoError(Exception):
    """The demonstration cannot continue, or a byte was wrong. The message is one
    line."""


@frozen
class KVLayout:
    """The shape of a model's KV cache in chunks. The defaults are those in Qwen2.5-7B's
    config.json, in bfloat16. A block is `[K or V][token][KV head][number]`, without
    gaps.
    """

    model: str = "Qwen2.5-7B"
    layers: int = field(default=28, validator=ge(1))
    kv_heads: int = field(default=4, validator=ge(1))
    head_dim: int = field(default=128, validator=ge(1))
    element_bytes: int = field(default=2, validator=ge(1))
    chunk_tokens: int = field(default=256, validator=ge(1))
    group_chunks: int = field(default=0, validator=ge(0))
    """In a cluster, how many chunks one node owns together; else 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer: all KV heads."""
        return self.kv_heads * self.head_dim * self.element_bytes

    @property
    def rows(self) -> int:
        """Rows of a block: one of K and one of V for each token of a chunk."""
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
        """What a chunk takes in the pool of a server that nobody tuned, where a block
        takes whole units."""
        return self.layers * -(-self.block_bytes // _UNIT_BYTES) * _UNIT_BYTES

    def whole_chunks(self, tokens: int) -> int:
        """Number of full chunks. As in engines, the rest is not stored."""
        return tokens // self.chunk_tokens


@frozen
class DemoSettings:
    """The text, the server, the layout, and the speed of the simulated model."""

    input_file: Path | None = None
    """None takes the text that the package ships."""
    url: str | None = None
    """A server that runs already; without one, a server is started."""
    pool_bytes: int = DEFAULT_POOL_BYTES
    """Memory of the server that is started."""
    disk: bool = False
    """Whether the server gets a disk, in a temporary folder, and is restarted on it."""
    nodes: int = 0
    """How many nodes of a cluster are started; 0 for a single server."""
    layout: KVLayout = field(factory=KVLayout)
    prefill_tokens_per_s: float = field(default=4000.0, validator=gt(0))


# Tokens

VOCABULARY_SIZE = 151_643
"""Of Qwen2.5."""
SAMPLE_TEXT: Final = Path(__file__).with_name("how_a_kv_cache_works.txt")
_INSERTED_SENTENCE = " (Here somebody inserted one sentence, and all that follows has another past.)"
_MAX_TEXT_BYTES = 1 << 20  # more than CONTEXT_TOKENS, for any text that people write
_PIECE = re.compile(r" ?[^\W\d_]{1,8}| ?\d{1,3}| ?[^\s\w]| ?_|\s+(?= )|\s+")


def pieces(text: str) -> list[str]:
    """Cut a text into pieces; joined again they are the text.

    A stand-in for a model's tokenizer, which would have to be downloaded: a piece is up
    to eight letters, up to three digits, or one other sign, each with the one space
    before it; what is left of white space is a piece too.
    """
    return _PIECE.findall(text)


@lru_cache(maxsize=65536)
def _token_id(piece: str) -> int:
    digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY_SIZE


def token_ids(text: str) -> list[int]:
    """Return one id in `range(VOCABULARY_SIZE)` for each piece, the same anywhere. Two
    pieces may share one, which is harmless here."""
    return [_token_id(piece) for piece in pieces(text)]


@frozen
class Prompt:
    """One prompt: a short name, one line that explains it, and its token ids."""

    name: str
    about: str
    tokens: list[int]


def two_prompts(tokens: list[int]) -> tuple[Prompt, Prompt]:
    """Return prompt A, which is `tokens`, and prompt B, the same with one sentence put
    in after two thirds.

    What stands before the sentence can be taken from the store. What comes after it
    cannot, although its words are the same: every key and value depends on all the
    tokens before.
    """
    place = 2 * len(tokens) // 3
    edited = tokens[:place] + token_ids(_INSERTED_SENTENCE) + tokens[place:]
    return Prompt("A", "the text", tokens), Prompt("B", "the text with one sentence put in after two thirds", edited)


def other_prompts(layout: KVLayout, tokens: Sequence[int], capacity_bytes: int) -> Iterator[Prompt]:
    """Yield prompts that fill a pool of `capacity_bytes` together: `tokens` again and
    again, each time behind another token that no text has, so that they share no block.
    """
    chunks = -(-capacity_bytes // layout.chunk_footprint_bytes)
    most = max(1, CONTEXT_TOKENS // layout.chunk_tokens)
    for number, start in enumerate(range(0, chunks, most)):
        length = min(chunks - start, most) * layout.chunk_tokens
        filling = [VOCABULARY_SIZE + number, *islice(cycle(tokens), length - 1)]
        yield Prompt(f"C{number + 1}", "others, to fill the pool", filling)


def read_text(settings: DemoSettings) -> tuple[str, list[int]]:
    """Return the name and the tokens of the text, or of the first MiB of a long one.

    Raises `DemoError` if it cannot be read, or is too short, or if the pool of a server
    that is to be started is too small for it.
    """
    file = settings.input_file or SAMPLE_TEXT
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_TEXT_BYTES).decode(errors="replace")
    except OSError as error:
        raise DemoError(f"cannot read {file}: {error.strerror or error}") from None
    tokens = token_ids(text)
    if settings.url is None:
        tokens_that_fit(settings.layout, len(tokens), settings.pool_bytes)
    return file.name, tokens


def tokens_that_fit(layout: KVLayout, tokens: int, capacity_bytes: int) -> int:
    """Return how many of `tokens` can be used, so that both prompts fit into a pool of
    `capacity_bytes` at once.

    Raises `DemoError` if that is less than one chunk.
    """
    if layout.whole_chunks(tokens) < 1:
        raise DemoError(
            f"the text has {tokens:,} tokens, and a chunk takes {layout.chunk_tokens:,}: "
            "take a longer text (--input) or shorter chunks (--chunk-tokens)"
        )
    room_chunks = int(capacity_bytes * _USABLE_PART_OF_POOL) // layout.chunk_footprint_bytes
    inserted = len(token_ids(_INSERTED_SENTENCE))
    used = min(tokens, CONTEXT_TOKENS)
    while chunks := layout.whole_chunks(used):
        of_b_alone = layout.whole_chunks(used + inserted) - layout.whole_chunks(2 * used // 3)
        if chunks + of_b_alone <= room_chunks:
            return used
        used = chunks * layout.chunk_tokens if used % layout.chunk_tokens else used - layout.chunk_tokens
    raise DemoError(
        f"the pool of {describe_size(capacity_bytes)} is too small: one chunk of the cache has "
        f"{describe_size(layout.chunk_bytes)}. Give the server more memory (--pool-size), or use "
        "shorter chunks (--chunk-tokens)"
    )


# Blocks


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


@cache
def _tape() -> memoryview:
    """Return the tape: little-endian, finite bfloat16 numbers, 2**-5 <= abs(x) < 2."""
    tape = bytearray(hashlib.shake_128(b"infinistore demo").digest(4 << 20))
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
