"""Frames as annotated hex dumps, and the conversation that `docs/protocol.md` shows."""

import struct
from collections.abc import Iterator

import msgpack
from xxhash import xxh3_64_intdigest

from infinistore.errors import InvalidRequest
from infinistore.protocol.codec import HEADER_BYTES, decode_body, head_bytes, pack_u64, parse_header, with_offer
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    ErrorReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    Keys,
    Message,
    Put,
    PutReply,
)
from infinistore.protocol.versions import LAST_RELEASE, MAJOR, OFFER, Offer

from .wire import frame

__all__ = ["annotate", "worked_example"]

_BYTES_A_LINE = 16


def worked_example() -> str:
    """The conversation as text: who speaks, and the frame."""
    blocks = [b"the first block", b"and the second"]
    checksums = [xxh3_64_intdigest(block) for block in blocks]
    keys = ["prompt/0", "prompt/1"]
    sizes = pack_u64(map(len, blocks))
    limits = HelloReply("6f1ce0", "1.0", 2**26, 8192, 2**30, 2**30)
    put = Put(Keys(keys), sizes)
    frames = [
        ("client", with_offer(frame(Hello(name="decode-7"), request_id=1), OFFER)),
        ("server", with_offer(frame(limits, request_id=1), OFFER)),
        ("client", frame(put, b"".join(blocks) + pack_u64(checksums).tobytes(), request_id=2, deadline_us=5_000_000)),
        ("server", frame(PutReply(pack_u64()), request_id=2)),
        ("client", frame(Get(Keys([*keys, "prompt/2"]), pack_u64()), request_id=3, deadline_us=1_000_000)),
        (
            "server",
            frame(GetReply(pack_u64([*sizes, MISSING]), pack_u64([*checksums, 0])), b"".join(blocks), request_id=3),
        ),
        ("client", frame(Put(Keys(["k", "k"]), pack_u64([1, 1]), checksums=False), b"ab", request_id=4)),
        ("server", frame(ErrorReply(InvalidRequest.code, "the key 'k' is named twice in one put"), request_id=4)),
    ]
    return "\n\n".join("\n".join(annotate(who, data)) for who, data in frames)


def annotate(who: str, data: bytes) -> Iterator[str]:
    """Yield the lines for one frame, beginning with who sends what."""
    header = parse_header(memoryview(data), max_body_bytes=2**32, max_payload_bytes=2**64)
    yield f"{who}: {KINDS[header.kind].__name__}"
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
        yield head_bytes(header.body_bytes) - end, "zeros"
    yield from _payload_parts(decode_body(header.kind, memoryview(data)[HEADER_BYTES:end]))


def _shown_deadline(number: int) -> str:
    offer = Offer.from_number(number)
    if offer is LAST_RELEASE:
        return f"deadline_us {number}"
    return f"offer: {MAJOR}.{offer.minor}, capabilities {' + '.join(str(one.value) for one in offer.capabilities)}"


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
        if name == "checksums":
            return ", ".join(f"{number:016x}" for number in packed) or "none"
        return ", ".join("2^64 - 1" if number == MISSING else str(number) for number in packed) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("\0", " NUL ") or "empty"


def _payload_parts(message: Message) -> Iterator[tuple[int, str]]:
    """Yield the length and the meaning of each part of a payload."""
    if isinstance(message, (Put, GetReply)):
        present = [size for size in message.sizes if size != MISSING]
        for number, size in enumerate(present):
            yield size, f"payload: block {number}"
        if isinstance(message, Put) and message.checksums:
            for number in range(len(present)):
                yield 8, f"payload: checksum of block {number}"


def _lines(position: int, part: bytes, meaning: str) -> Iterator[str]:
    for start in range(0, len(part), _BYTES_A_LINE):
        octets = part[start : start + _BYTES_A_LINE].hex(" ")
        yield f"{position + start:4}  {octets:<{3 * _BYTES_A_LINE}} {meaning if not start else ''}".rstrip()
