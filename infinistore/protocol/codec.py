"""Encodes messages as frames, and decodes them.

A frame is a 32-byte header, a msgpack body, zeros up to the next multiple of 64 bytes,
and a raw payload. The padding aligns the payload to a cache line at both ends: copies
from the kernel to unaligned addresses are 15 to 20 % slower.

Every length is checked before memory of that length is allocated. The functions here
raise `ProtocolError` or a subclass for input that they cannot accept, and nothing else.
"""

import struct
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgpack
from cattrs.errors import ForbiddenExtraKeysError

from infinistore.errors import InvalidRequest, LimitExceeded, ProtocolError, VersionMismatch
from infinistore.keys import MAX_KEY_BYTES
from infinistore.protocol.body_fields import STRUCTURE, UNSTRUCTURE, Structure, Unstructure
from infinistore.protocol.fields import Numbers
from infinistore.protocol.messages import KINDS, Message, StatisticsReply
from infinistore.protocol.single_bodies import READ, WRITE
from infinistore.protocol.versions import MAJOR, Offer

__all__ = [
    "HEADER_BYTES",
    "MAX_LIST_ITEMS",
    "SHORT_BODY_BYTES",
    "Header",
    "decode_body",
    "decode_notices",
    "encode_head",
    "head_bytes",
    "pack_u64",
    "parse_header",
    "with_offer",
]

Notice = TypeVar("Notice", bound=Message)
_new = tuple.__new__  # makes a named tuple without the call of a Python function
_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size
ALIGNMENT_BYTES = 64
MAGIC = b"INFS"
_HTTP = b"HTTP"
_TLS = (b"\x15\x03", b"\x16\x03")  # how an alert and a handshake begin
_MAX_DEADLINE_US = 2**63
SHORT_BODY_BYTES = 1024
"""Up to this length, a body is decoded before it is checked: whatever is in it, it does
not take much memory."""
_MOST_BYTES_OF_KEY = MAX_KEY_BYTES + 64  # with all numbers that belong to it
_MOST_OTHER_BYTES = 64 * 1024
_FIXMAP = 0x80  # how msgpack begins a map of up to 15
_OFFER_AT = HEADER_BYTES - 8  # where the deadline stands in a header
MAX_FIELDS = 64
"""The maximum number of fields of a message, or of one level of the statistics."""
MAX_LIST_ITEMS = 512
"""The maximum length of a list in a `StatisticsReply`. No other message has lists."""
MAX_STATISTICS_NODES = 2048
"""The maximum number of maps, and of lists, in a `StatisticsReply`."""


class Header(NamedTuple):
    """The fixed part of a frame.

    `deadline_us` is the time that the caller has left, 0 for no deadline. In the first
    frame of either side it is the offer of that side.
    """

    kind: int
    request_id: int
    body_bytes: int
    payload_bytes: int
    deadline_us: int


def head_bytes(body_bytes: int) -> int:
    """Return the length of header, body and padding together, in bytes."""
    return -(-(HEADER_BYTES + body_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pack_u64(values: Any = ()) -> Numbers:
    """Pack an iterable of unsigned 64-bit numbers."""
    return Numbers(array("Q", values))


def encode_head(
    message: Message,
    *,
    request_id: int,
    payload_bytes: int = 0,
    deadline_us: int = 0,
    unstructure: Unstructure = UNSTRUCTURE,
) -> bytes:
    """Return header, body and padding of one frame. The payload follows it on the wire.

    `unstructure` is for the receiver; see `body_fields.unstructure_for`.

    Raises:
        VersionMismatch: the receiver does not understand this message.
    """
    write = WRITE.get(type(message))
    body: bytes | None = None if write is None else write(message)
    if body is None:
        body = msgpack.Packer().pack(unstructure[type(message)](message))
    body_bytes = len(body)
    header = _HEADER.pack(
        MAGIC,
        MAJOR,
        message.KIND,
        0,
        request_id,
        body_bytes,
        payload_bytes,
        min(deadline_us, _MAX_DEADLINE_US),
    )
    return (header + body).ljust(-(-(HEADER_BYTES + body_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, b"\0")


def with_offer(head: bytes, offer: Offer) -> bytes:
    """Return a head that has no deadline with the offer of its sender."""
    return head[:_OFFER_AT] + offer.to_number().to_bytes(8, "little") + head[HEADER_BYTES:]


def parse_header(data: memoryview, *, max_body_bytes: int, max_payload_bytes: int) -> Header:
    """Parse the first `HEADER_BYTES` bytes of a frame.

    Raises:
        ProtocolError: not a frame, or longer than the limits allow.
        VersionMismatch: the frame has another major version.
    """
    magic, version, kind, flags, request_id, body_bytes, payload_bytes, deadline_us = _HEADER.unpack_from(data)
    if magic != MAGIC:
        if magic.startswith(_TLS):
            raise ProtocolError(
                "the peer speaks TLS, and this end does not; use infinistores:// with a server that has --tls-cert"
            )
        if magic == _HTTP:
            raise ProtocolError("the peer speaks HTTP: this is the port of a management API; use the service port")
        raise ProtocolError(f"not an InfiniStore frame: it begins with {bytes(data[:8])!r}; is this the right port?")
    if version != MAJOR:
        raise VersionMismatch(
            f"the peer speaks version {version} of the protocol, this side version {MAJOR};"
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


def decode_body(kind: int, body: memoryview, structure: Structure = STRUCTURE, max_keys: int | None = None) -> Message:
    """Decode the body of a frame of this kind. `parse_header` has checked its length.

    `structure` is for the sender; see `body_fields.structure_for`.

    Raises:
        LimitExceeded: the body is long, and has more than `max_keys` keys. They were
            not taken apart.
        InvalidRequest: the body is well-formed, but its contents are invalid, such as
            an empty key.
        ProtocolError: the body is malformed.
    """
    if (read := READ.get(kind)) is not None and len(body) <= SHORT_BODY_BYTES:
        try:
            found = read(bytes(body))
        except (IndexError, UnicodeDecodeError):  # too short, or no text
            found = None
        if found is not None:
            return found
    cls = KINDS[kind]
    try:
        if cls is StatisticsReply:
            fields = msgpack.unpackb(
                body,
                object_pairs_hook=_map_maker(MAX_STATISTICS_NODES),
                list_hook=_list_counter(MAX_STATISTICS_NODES),
                max_array_len=MAX_LIST_ITEMS,
                max_map_len=MAX_FIELDS,
                max_ext_len=0,
            )
        else:
            fields = _short_map(body)
            if fields is None:
                if max_keys is not None and len(body) > _MOST_OTHER_BYTES + max_keys * _MOST_BYTES_OF_KEY:
                    raise _too_many_keys(cls, f"{len(body)} bytes", max_keys)
                fields = msgpack.unpackb(
                    body, object_pairs_hook=_flat_map, max_array_len=0, max_map_len=MAX_FIELDS, max_ext_len=0
                )
                if max_keys is not None and type(fields) is dict:
                    _check_batch(cls, fields.get("keys"), max_keys)
        if type(fields) is not dict:
            raise TypeError(f"expected a map of fields, got {type(fields).__name__}")
        message: Message = structure[cls](fields, cls)
    except (InvalidRequest, LimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001  # of msgpack, cattrs or validators
        raise ProtocolError(f"malformed {cls.__name__}: {_reason(error)}") from None
    return message


def _check_batch(cls: type[Message], keys: object, max_keys: int) -> None:
    # Each key has a character, and one between it and the next.
    if type(keys) is str and len(keys) > 2 * max_keys and (count := keys.count("\0") + 1) > max_keys:
        raise _too_many_keys(cls, f"{count} keys", max_keys)


def _too_many_keys(cls: type[Message], what: str, max_keys: int) -> LimitExceeded:
    return LimitExceeded(
        f"{what} in one {cls.__name__} are more than max_batch_keys={max_keys} allows; split the batch"
    )


def decode_notices(data: bytes, cls: type[Notice]) -> Iterator[Notice]:
    """Decode consecutive frames without payload, all with messages of one class.

    Raises:
        ProtocolError: the data contains anything else, or the last frame is incomplete.
    """
    rest = memoryview(data)
    while rest:
        if len(rest) < HEADER_BYTES:
            raise ProtocolError("a frame without a whole header")
        header = parse_header(rest, max_body_bytes=len(rest) - HEADER_BYTES, max_payload_bytes=0)
        if header.kind != cls.KIND:
            raise ProtocolError(f"{KINDS[header.kind].__name__} where only {cls.__name__} belongs")
        message = decode_body(header.kind, rest[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
        assert isinstance(message, cls)
        yield message
        rest = rest[head_bytes(header.body_bytes) :]


def _short_map(body: memoryview) -> dict[Any, Any] | None:
    """Decode a short body that is as it should be, in half the time; None if
    `_flat_map` is to decide.
    """
    if not 0 < len(body) <= SHORT_BODY_BYTES:
        return None
    try:
        fields = msgpack.unpackb(body, max_array_len=0, max_map_len=MAX_FIELDS, max_ext_len=0)
    except Exception:  # noqa: BLE001  # it is raised again, by who is to decide
        return None
    # The first byte has the number of names: with fewer in the map, one stands twice.
    if type(fields) is not dict or body[0] != _FIXMAP | len(fields) or dict in map(type, fields.values()):
        return None
    return fields


def _flat_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make the map of a body. Only a `StatisticsReply` has maps inside it.

    A body full of tiny maps would take 70 times its own size when decoded, so a body is
    refused as soon as a map contains another one.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in a map")
    if dict in map(type, made.values()):
        raise ValueError("a map in a map")
    return made


def _map_maker(most: int) -> Callable[[list[tuple[Any, Any]]], dict[Any, Any]]:
    """Return the hook that makes the maps of one body.

    It refuses a duplicate name, a name that is not text, and more than `most` maps.
    """
    left = most

    def make_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {most} maps")
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name stands twice in a map")
        if bytes in map(type, made):  # msgpack allows names of bytes, too
            raise TypeError("a name that is no text")
        return made

    return make_map


def _list_counter(most: int) -> Callable[[list[Any]], list[Any]]:
    """Return the hook that counts the lists of one body and refuses more than
    `most`.
    """
    left = most

    def count_list(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {most} lists")
        return items

    return count_list


def _reason(error: Exception) -> str:
    """Describe why a body is malformed.

    The peer chose its contents, so nothing here may depend on them.
    """
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, ForbiddenExtraKeysError):  # its own text needs names of text
        return f"unknown fields {', '.join(sorted(repr(name[:40]) for name in error.extra_fields))}"[:300]
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  # of other libraries
        words = ""
    return f"{type(error).__name__}: {words}"[:300]
