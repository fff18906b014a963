"""Frames to messages and back.

A frame is a 32-byte header, a msgpack body, zeros up to the next multiple of 64 bytes, and a raw payload. The padding
lets the payload start on a cache line, at both ends: copies from the kernel to unaligned addresses lose 15-20 %.

This module bounds every length before anything of that length is allocated. It raises `ProtocolError` or a subclass for
whatever it cannot accept, and nothing else.
"""

import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
from cattrs import Converter
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.fns import identity

from infinistore.errors import InvalidRequest, ProtocolError, VersionMismatch
from infinistore.keys import join_keys, split_keys
from infinistore.protocol.messages import (
    KINDS,
    PROTOCOL_VERSION,
    Keys,
    Message,
    Numbers,
    StatisticsReply,
    Tree,
)

__all__ = [
    "HEADER_BYTES",
    "MAX_LIST_ITEMS",
    "Header",
    "decode_body",
    "encode_head",
    "head_bytes",
    "numbers",
    "parse_header",
]

_new = tuple.__new__  # makes a named tuple without the call of a Python function
_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size
ALIGNMENT_BYTES = 64
MAGIC = b"INFS"
_MAX_DEADLINE_US = 2**63
_MAX_FIELDS = 64  # of a message, or of one level of the statistics
MAX_LIST_ITEMS = 512
"""How long a list in a `StatisticsReply` may be. No other message has lists."""
_MAX_STATISTICS_NODES = 2048
"""How many maps, and how many lists, a `StatisticsReply` may have."""


class Header(NamedTuple):
    """The fixed part of a frame. `deadline_us`: what is left of the caller's time, 0 for none."""

    kind: int
    request_id: int
    body_bytes: int
    payload_bytes: int
    deadline_us: int


def head_bytes(body_bytes: int) -> int:
    """Return how long header, body and padding are together."""
    return -(-(HEADER_BYTES + body_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def numbers(values: Any = ()) -> Numbers:
    """Pack an iterable of unsigned 64-bit numbers."""
    return Numbers(array("Q", values))


def encode_head(message: Message, *, request_id: int, payload_bytes: int = 0, deadline_us: int = 0) -> bytes:
    """Return header, body and padding of one frame; the payload follows it on the wire."""
    body: bytes = msgpack.Packer().pack(_UNSTRUCTURE[type(message)](message))
    body_bytes = len(body)
    header = _HEADER.pack(
        MAGIC,
        PROTOCOL_VERSION,
        message.KIND,
        0,
        request_id,
        body_bytes,
        payload_bytes,
        min(deadline_us, _MAX_DEADLINE_US),
    )
    return (header + body).ljust(-(-(HEADER_BYTES + body_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, b"\0")


def parse_header(data: memoryview, *, max_body_bytes: int, max_payload_bytes: int) -> Header:
    """Parse the first `HEADER_BYTES` bytes of a frame.

    Raises:
        ProtocolError: not a frame, or longer than the bounds allow.
        VersionMismatch: a frame of another version of the protocol.
    """
    magic, version, kind, flags, request_id, body_bytes, payload_bytes, deadline_us = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"not an InfiniStore frame: it begins with {bytes(data[:8])!r}; is this the right port?")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks version {version} of the protocol, this side version {PROTOCOL_VERSION};"
            " install the same release of infinistore on both"
        )
    if kind not in KINDS:
        raise ProtocolError(f"unknown kind of message 0x{kind:02x}")
    if flags:
        raise ProtocolError(f"unknown flags 0x{flags:04x}")
    if body_bytes > max_body_bytes:
        raise ProtocolError(f"a body of {body_bytes} bytes is over the limit of {max_body_bytes}")
    if payload_bytes > max_payload_bytes:
        raise ProtocolError(f"a payload of {payload_bytes} bytes is over the limit of {max_payload_bytes}")
    return _new(Header, (kind, request_id, body_bytes, payload_bytes, deadline_us))


def decode_body(kind: int, body: memoryview) -> Message:
    """Decode the body of a frame of this kind; no longer than `parse_header` let it be.

    Raises:
        InvalidRequest: well-formed, but it asks for something that cannot be asked for (an empty key).
        ProtocolError: not such a body.
    """
    cls = KINDS[kind]
    try:
        if cls is StatisticsReply:
            fields = msgpack.unpackb(
                body,
                object_pairs_hook=_map_maker(_MAX_STATISTICS_NODES),
                list_hook=_list_counter(_MAX_STATISTICS_NODES),
                max_array_len=MAX_LIST_ITEMS,
                max_map_len=_MAX_FIELDS,
                max_ext_len=0,
            )
        else:
            fields = msgpack.unpackb(
                body, object_pairs_hook=_flat_map, max_array_len=0, max_map_len=_MAX_FIELDS, max_ext_len=0
            )
        if type(fields) is not dict:
            raise TypeError(f"expected a map of fields, got {type(fields).__name__}")
        message: Message = _STRUCTURE[cls](fields, cls)
    except InvalidRequest:
        raise
    except _DECODING_ERRORS as error:
        raise ProtocolError(f"malformed {cls.__name__}: {_reason(error)}") from None
    return message


def _flat_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make the one map that the body of every message but one is. A body full of tiny maps would take 70 times its own
    size when decoded: it is refused with the first map that has some in it."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in a map")
    if dict in map(type, made.values()):
        raise ValueError("a map in a map")
    return made


def _map_maker(most: int) -> Callable[[list[tuple[Any, Any]]], dict[Any, Any]]:
    """Return what makes the maps of one body. It refuses a name that stands twice, and more than `most` maps."""
    left = most

    def make_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {most} maps")
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name stands twice in a map")
        return made

    return make_map


def _list_counter(most: int) -> Callable[[list[Any]], list[Any]]:
    """Return what is shown the lists of one body. It refuses more than `most` of them."""
    left = most

    def count_list(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {most} lists")
        return items

    return count_list


# What msgpack, cattrs and the validators raise for a body that is not one.
_DECODING_ERRORS = (
    ValueError,  # msgpack's errors, UnicodeDecodeError, and validators' bounds
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    OverflowError,
    BaseValidationError,
    ForbiddenExtraKeysError,
)


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return f"{type(error).__name__}: {error}"[:300]


def _exact(expected: type) -> Callable[[Any, Any], Any]:
    """Refuse what cattrs would convert: the text "5" is not a number here, nor is True."""

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not expected:
            raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return structure


def _structure_keys(value: Any, _: Any) -> Any:
    if type(value) is not str:
        raise TypeError(f"expected joined keys, got {type(value).__name__}")
    try:
        return split_keys(value)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _structure_numbers(value: Any, _: Any) -> Any:
    if type(value) is not bytes:
        raise TypeError(f"expected packed numbers, got {type(value).__name__}")
    packed = array("Q")
    packed.frombytes(value)  # ValueError unless a multiple of eight
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _unstructure_numbers(value: Any) -> bytes:
    packed: array[int] = value
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def _make_converter() -> Converter:
    converter = Converter(detailed_validation=False, forbid_extra_keys=True)
    for plain in (int, float, str, bytes, bool):
        converter.register_structure_hook(plain, _exact(plain))
        converter.register_unstructure_hook(plain, identity)  # which is not even called
    converter.register_structure_hook(Tree, _exact(dict))
    converter.register_unstructure_hook(Tree, identity)
    # One hook for the whole batch: structuring a thousand keys one by one costs 200 us.
    converter.register_structure_hook(Keys, _structure_keys)
    converter.register_unstructure_hook(Keys, join_keys)
    converter.register_structure_hook(Numbers, _structure_numbers)
    converter.register_unstructure_hook(Numbers, _unstructure_numbers)
    return converter


_converter = _make_converter()
# Looked up once: asking the converter for them each time takes as long as many of them do.
_STRUCTURE: dict[type[Message], Callable[[Any, Any], Any]] = {
    cls: _converter.get_structure_hook(cls) for cls in KINDS.values()
}
_UNSTRUCTURE: dict[type[Message], Callable[[Any], Any]] = {
    cls: _converter.get_unstructure_hook(cls) for cls in KINDS.values()
}
