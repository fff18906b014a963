"""The bytes that replace a model's output: the same in every process for a given key.

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
from functools import cache

from infinistore.demo.layout import KVLayout

__all__ = ["block_content", "first_difference"]

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
