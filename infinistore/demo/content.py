"""The bytes that stand in for what a model would compute: the same in every process that knows the block's key.

No model runs in the demonstration. What matters is that prefill and decode, two processes that share nothing but the
store, agree on every byte, and that a block which is damaged, misplaced or swapped for another is noticed. So the
content is a function of the chunk's name and the layer:

- A *tape* of 4 MiB of bfloat16 numbers is made once per process from SHAKE-128 (FIPS 202) of a constant.
- A block has one row per token for K and one for V. Each row is cut from the tape at a place that SHAKE-128 of the
  chunk's name and the layer gives. Two blocks are equal only if all of their hundreds of rows fall on the same places.

Cutting and joining is a matter of copying memory, ten times faster here than `random.randbytes`, so that the figures of
the demonstration are those of the store. It needs neither numpy nor torch.
"""

import hashlib
import struct
from functools import cache

from infinistore.demo.layout import KVLayout

__all__ = ["block_content", "first_difference"]

_TAPE_BYTES = 4 << 20


@cache
def _tape() -> memoryview:
    """Return the tape: little-endian bfloat16 numbers, all finite, of either sign and with 2**-5 <= abs(x) < 2."""
    tape = bytearray(hashlib.shake_128(b"infinistore demo").digest(_TAPE_BYTES))
    # The second byte of a little-endian bfloat16 is the sign and seven of the eight exponent bits.
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
    """Return the place of the first byte that differs, None if there is none. A missing byte differs."""
    found = bytes(found)  # comparing a memoryview goes number by number, 20 times slower than this copy and a memcmp
    if found == expected:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(expected), len(found)))
