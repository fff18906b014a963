"""Frames as annotated hex dumps, and the frames that `docs/protocol.md` shows."""

import struct
from collections.abc import Iterator

import msgpack
from xxhash import xxh3_64_intdigest

from infinistore.protocol.codec import HEADER_BYTES, decode_body, head_bytes, pack_u64, parse_header, with_offer
from infinistore.protocol.messages import (
    KINDS,
    Hello,
    Keys,
    Message,
    Put,
)
from infinistore.protocol.versions import LAST_RELEASE, MAJOR, OFFER, Offer

from .wire import frame

__all__ = ["annotate", "worked_example"]

_BYTES_A_LINE = 16
_ZEROS = "zeros"


def worked_example() -> str:
    """The frames as text."""
    blocks = [b"the first block", b"and the second"]
    checksums = [xxh3_64_intdigest(block) for block in blocks]
    keys = ["prompt/0", "prompt/1"]
    sizes = pack_u64(map(len, blocks))
    put = Put(Keys(keys), sizes)
    payload = b"".join(blocks) + pack_u64(checksums).tobytes()
    frames = [
        with_offer(frame(Hello(name="decode-7"), request_id=1), OFFER),
        frame(put, payload, request_id=2, deadline_us=5_000_000),
    ]
    return "\n\n".join("\n".join(annotate(data)) for data in frames)


def annotate(data: bytes) -> Iterator[str]:
    """Yield the lines for one frame, beginning with its message."""
    header = parse_header(memoryview(data), max_body_bytes=2**32, max_payload_bytes=2**64)
    yield KINDS[header.kind].__name__
    position = 0
    for length, meaning in _parts(data):
        yield from _lines(position, data[position : position + length], meaning)
        position += length
    assert position == len(data)


def _parts(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the length and the meaning of each part of a frame."""
    header = parse_header(memoryview(data), max_body_bytes=2**32, max_payload_bytes=2**64)
    yield 4, "magic INFS"
    yield 1, f"version {data[4]}"
    yield 1, f"kind 0x{header.kind:02x}"
    yield 2, "flags"
    yield 4, f"request_id {header.request_id}"
    yield 4, f"body_bytes {header.body_bytes}"
    yield 8, f"payload_bytes {header.payload_bytes}"
    yield 8, _shown_deadline(header.deadline_us)
    end = HEADER_BYTES + header.body_bytes
    yield from _body_parts(data[HEADER_BYTES:end])
    if head_bytes(header.body_bytes) > end:
        yield head_bytes(header.body_bytes) - end, _ZEROS
    yield from _payload_parts(decode_body(header.kind, memoryview(data)[HEADER_BYTES:end]))


def _shown_deadline(number: int) -> str:
    offer = Offer.from_number(number)
    if offer is LAST_RELEASE:
        return f"deadline_us {number}"
    return f"offer: {MAJOR}.{offer.minor}, capabilities {offer.capabilities.value}"


def _body_parts(body: bytes) -> Iterator[tuple[int, str]]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(body)
    fields = unpacker.read_map_header()
    yield unpacker.tell(), f"a map of {fields}"
    for _ in range(fields):
        start = unpacker.tell()
        name = unpacker.unpack()
        value = unpacker.unpack()
        yield unpacker.tell() - start, f"{name}: {_shown(name, value)}"


def _shown(name: str, value: object) -> str:
    if isinstance(value, bytes):
        packed = struct.unpack(f"<{len(value) // 8}Q", value)
        return ", ".join(map(str, packed)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("\0", " NUL ") or "empty"


def _payload_parts(message: Message) -> Iterator[tuple[int, str]]:
    """Yield the length and the meaning of each part of a payload."""
    if isinstance(message, Put):
        for number, size in enumerate(message.sizes):
            yield size, f"payload: block {number}"
        if message.checksums:
            for number in range(len(message.sizes)):
                yield 8, f"payload: checksum of block {number}"


def _lines(position: int, part: bytes, meaning: str) -> Iterator[str]:
    if meaning == _ZEROS:
        assert not part.strip(b"\0")
        yield f"{position:4}  {f'00 * {len(part)}':<{2 * _BYTES_A_LINE}}  {meaning}"
        return
    for start in range(0, len(part), _BYTES_A_LINE):
        octets = part[start : start + _BYTES_A_LINE].hex()
        yield f"{position + start:4}  {octets:<{2 * _BYTES_A_LINE}}  {meaning if not start else ''}".rstrip()
