"""The options of the demonstration, its two prompts, and the blocks of their KV cache.

As in engines, a prompt is cut into chunks of so many tokens. The name of a chunk is a
hash of the name before and of its own tokens, because attention depends on all tokens
before: two prompts share exactly the names of their common leading chunks. A block is
one layer of one chunk; its key is the name and the layer. In a cluster, a few chunks in
a row have one hash tag, the name of the first, and so one owner.

No model runs. A block is cut from a tape of 4 MiB, at an offset that SHAKE-128 (FIPS
202) derives from the chunk's name and the layer: prefill and decode agree on every
byte, notice a block that is damaged or swapped, and take no time from the store.

Imports little: the help of the command line needs it.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Final

from attrs import field, frozen
from attrs.validators import ge, gt

from infinistore.sizes import GIB, MIB, describe_size

CONTEXT_TOKENS: Final = 32_768  # the longest prompt that Qwen2.5-7B is made for; a longer text is cut
DEFAULT_POOL_BYTES: Final = GIB
SMALLER_POOL_BYTES: Final = 512 * MIB  # with a disk, since prefill fills the pool, and for each node
GROUP_CHUNKS: Final = 2  # few, so that a short text has several groups
SAMPLE_TEXT: Final = Path(__file__).with_name("how_a_kv_cache_works.txt")
VOCABULARY_SIZE: Final = 151_643  # of Qwen2.5

_USABLE_PART_OF_POOL = 0.75  # below what a server evicts at, so that nothing is lost between prefill and decode
_UNIT_BYTES = 64 << 10
_TAPE_BYTES = 4 << 20
_NAME_BYTES = 16  # 128 bits: chunks of one name would be served each other's bytes


class DemoError(Exception):
    """One line that says why the demonstration failed, such as a byte that is wrong."""


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
    def block_bytes(self) -> int:
        """Bytes of one layer of one chunk, which is the value of one key."""
        return 2 * self.chunk_tokens * self.kv_heads * self.head_dim * self.element_bytes

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
    """The options of `infinistore demo`."""

    input_file: Path | None = None
    url: str | None = None
    pool_bytes: int = DEFAULT_POOL_BYTES
    disk: bool = False
    nodes: int = 0
    layout: KVLayout = field(factory=KVLayout)
    prefill_tokens_per_s: float = field(default=4000.0, validator=gt(0))


# Tokens

_INSERTED_SENTENCE = " (Here somebody inserted one sentence, and all that follows has another past.)"
_MAX_TEXT_BYTES = 1 << 20  # more than CONTEXT_TOKENS, for any text that people write
_PIECE = re.compile(r" ?[^\W\d_]{1,8}| ?\d{1,3}| ?[^\s\w]| ?_|\s+(?= )|\s+")


def pieces(text: str) -> list[str]:
    """Cut a text into pieces; joined again they are the text. A stand-in for a model's
    tokenizer, which would have to be downloaded.
    """
    return _PIECE.findall(text)


def token_ids(text: str) -> list[int]:
    """Return one id in `range(VOCABULARY_SIZE)` for each piece, the same anywhere. Two
    pieces may share one, which is harmless here."""
    found = pieces(text)
    hashes = {one: hashlib.blake2b(one.encode("utf-8", "surrogatepass"), digest_size=8).digest() for one in set(found)}
    return [int.from_bytes(hashes[piece], "little") % VOCABULARY_SIZE for piece in found]


@frozen
class Prompt:
    """One prompt: a short name, one line that explains it, and its token ids."""

    name: str
    about: str
    tokens: list[int]


def two_prompts(tokens: list[int]) -> tuple[Prompt, Prompt]:
    """Return prompt A, which is `tokens`, and prompt B, the same with one sentence put
    in after two thirds. What comes after it cannot be taken from the store: every key
    and value depends on all the tokens before.
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
    `capacity_bytes` at once. Raises `DemoError` if that is less than one chunk.
    """
    if layout.whole_chunks(tokens) < 1:
        raise DemoError(
            f"the text has {tokens:,} tokens, and a chunk takes {layout.chunk_tokens:,}: "
            "take a longer text (--input) or shorter chunks (--chunk-tokens)"
        )
    room_chunks = int(capacity_bytes * _USABLE_PART_OF_POOL) // layout.chunk_footprint_bytes
    inserted = len(token_ids(_INSERTED_SENTENCE))
    most = min(tokens, CONTEXT_TOKENS)
    for used in chain([most], range(layout.whole_chunks(most) * layout.chunk_tokens, 0, -layout.chunk_tokens)):
        of_b_alone = layout.whole_chunks(used + inserted) - layout.whole_chunks(2 * used // 3)
        if 0 < layout.whole_chunks(used) <= room_chunks - of_b_alone:
            return used
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
    name. The hash is BLAKE2b (RFC 7693).
    """
    shape = (layout.model, layout.layers, layout.kv_heads, layout.head_dim, layout.element_bytes, layout.chunk_tokens)
    name = hashlib.blake2b(repr(shape).encode(), digest_size=_NAME_BYTES).digest()
    names: list[bytes] = []
    tag = b""
    for start in range(0, layout.whole_chunks(len(tokens)) * layout.chunk_tokens, layout.chunk_tokens):
        chunk = repr(list(tokens[start : start + layout.chunk_tokens]))
        name = hashlib.blake2b(name + chunk.encode(), digest_size=_NAME_BYTES).digest()
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

    So the longest stored prefix divided by the layers is the number of complete chunks.
    """
    return [block_key(name, layer) for name in names for layer in range(layout.layers)]


@cache
def _tape(more_bytes: int) -> bytes:
    """Return 4 MiB of little-endian, finite bfloat16 numbers, 2**-5 <= abs(x) < 2,
    which begin again after that, for at least so many bytes more.
    """
    tape = bytearray(hashlib.shake_128(b"infinistore demo").digest(_TAPE_BYTES))
    # The second byte of a little-endian bfloat16 is the sign and seven of the eight
    # exponent bits.
    allowed = bytes((0x3D, 0x3E, 0x3F, 0xBD, 0xBE, 0xBF))
    tape[1::2] = tape[1::2].translate(bytes(allowed[byte % len(allowed)] for byte in range(256)))
    return bytes(tape) * (1 + -(-more_bytes // _TAPE_BYTES))


def block_content(layout: KVLayout, name: bytes, layer: int) -> bytes:
    """Return the `layout.block_bytes` bytes of one layer of the chunk called `name`."""
    digest = hashlib.shake_128(name + b"/%d" % layer).digest(8)
    start = int.from_bytes(digest, "little") % _TAPE_BYTES & ~1  # on a whole bfloat16 number
    return _tape(layout.block_bytes)[start : start + layout.block_bytes]
