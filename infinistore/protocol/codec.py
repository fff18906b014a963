"""Encodes messages as frames, and decodes them.

A frame is a 32-byte header, a msgpack body, zeros up to the next multiple of 64 bytes,
and a raw payload: copies from the kernel to unaligned addresses are 15 to 20 % slower.
cattrs makes the functions that turn a message into a map of fields and back; a sender
leaves out a field that is newer (`since`) and has its default. The bodies of messages
about a single block look the same every time and are written and read without msgpack,
in a third of the time. Statistics cross as nested maps. Every length is checked before
memory of that length is allocated, and input that cannot be accepted raises
`ProtocolError` or a subclass, and nothing else.
"""

import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import attrs
import msgpack
from cattrs import Converter
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.fns import identity
from cattrs.gen import make_dict_unstructure_fn, override

from infinistore.errors import InvalidRequest, LimitExceeded, ProtocolError, VersionMismatch
from infinistore.keys import MAX_KEY_BYTES, join_keys, split_keys
from infinistore.protocol.messages import (
    KINDS,
    Exists,
    Get,
    GetReply,
    Keys,
    Message,
    Numbers,
    Put,
    PutReply,
    StatisticsReply,
    Tree,
)
from infinistore.protocol.versions import LAST_RELEASE, MAJOR, MINOR, OFFER, NewerFields, Offer
from infinistore.statistics import DiskTierStatistics, DrainStatistics, ServerDetails, ServerStatistics, StoreStatistics

_REMEDY = "install the same release of infinistore on both"

Structure: TypeAlias = Mapping[type[Message], Callable[[Any, Any], Any]]
"""Maps each message to the function that makes it from a map of fields."""


class Unstructure(dict[type[Message], Callable[[Any], Any]]):
    """Maps each message that a peer understands to the function that unstructures it.

    Raises:
        VersionMismatch: the peer does not understand the message.
    """

    def __missing__(self, cls: type[Message]) -> Callable[[Any], Any]:
        raise VersionMismatch(f"the peer does not understand {cls.__name__}; {_REMEDY}")


def structure_for(peer: Offer) -> Structure:
    """Return the functions that decode what this peer sends.

    They ignore fields that are newer than this release where the message allows that.
    """
    return STRUCTURE if peer.minor <= MINOR else _STRUCTURE_OF_NEWER


def unstructure_for(peer: Offer) -> Unstructure:
    """Return the functions that encode what is sent to this peer."""
    if peer.minor >= MINOR and peer.capabilities == OFFER.capabilities:
        return UNSTRUCTURE
    understood = [cls for cls in KINDS.values() if _understands(peer, cls)]
    return Unstructure({cls: unstructure_function(cls, peer.minor) for cls in understood})


def _understands(peer: Offer, cls: type[Message]) -> bool:
    return not cls.CAPABILITY or bool(cls.CAPABILITY & peer.capabilities)


def structure_function(cls: type[Any], *, of_newer: bool = False) -> Callable[[Any, Any], Any]:
    """Return the function that makes a message from a map of fields.

    `of_newer`: the map comes from a peer of a newer release.
    """
    strict: Callable[[Any, Any], Any] = _converter.get_structure_hook(cls)
    if not of_newer or cls.NEWER_FIELDS is NewerFields.REFUSED:
        return strict
    known = [field.name for field in attrs.fields(cls)]

    def structure(fields: Any, cls: Any) -> Any:
        if bytes in map(type, fields):  # msgpack allows names of bytes, too
            raise TypeError("a name that is no text")
        return strict({name: fields[name] for name in known if name in fields}, cls)

    return structure


def unstructure_function(cls: type[Any], minor: int = MINOR) -> Callable[[Any], Any]:
    """Return the function that makes a map of fields for this minor version."""
    since = {field.name: field.metadata.get("since", 0) for field in attrs.fields(cls)}
    optional: Any = {name: override(omit_if_default=True) for name, version in since.items() if version}
    if not optional:
        return _converter.get_unstructure_hook(cls)
    plain = make_dict_unstructure_fn(cls, _converter, **optional)
    unknown = [name for name, version in since.items() if version > minor]
    may_go = cls.NEWER_FIELDS is NewerFields.IGNORED

    def unstructure(message: Any) -> Any:
        fields = plain(message)
        for name in unknown:
            if name in fields and not may_go:
                raise VersionMismatch(f"the peer does not know the field {name!r} of {cls.__name__}; {_REMEDY}")
            fields.pop(name, None)
        return fields

    return unstructure if unknown else plain


def _exact(expected: type) -> Callable[[Any, Any], Any]:
    """Refuse what cattrs would convert, such as the text "5" to a number."""

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


def _quick_exists(fields: Any, cls: Any) -> Any:
    if len(fields) == 2:
        keys, touch = fields.get("keys"), fields.get("touch")
        if type(keys) is str and type(touch) is bool:
            return Exists(_structure_keys(keys, None), touch)
    return _GENERATED[Exists](fields, cls)


def _quick_get(fields: Any, cls: Any) -> Any:
    if len(fields) == 3:
        keys, capacities, checksums = fields.get("keys"), fields.get("capacities"), fields.get("checksums")
        if type(keys) is str and type(capacities) is bytes and type(checksums) is bool:
            return Get(_structure_keys(keys, None), _structure_numbers(capacities, None), checksums)
    return _GENERATED[Get](fields, cls)


def _quick_put(fields: Any, cls: Any) -> Any:
    if len(fields) == 4:
        keys, sizes = fields.get("keys"), fields.get("sizes")
        checksums, replace = fields.get("checksums"), fields.get("replace")
        if type(keys) is str and type(sizes) is bytes and type(checksums) is bool and type(replace) is bool:
            return Put(_structure_keys(keys, None), _structure_numbers(sizes, None), checksums, replace)
    return _GENERATED[Put](fields, cls)


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
# Looked up once: the converter's own lookup takes as long as decoding a short message.
_GENERATED: dict[type[Message], Callable[[Any, Any], Any]] = {cls: structure_function(cls) for cls in KINDS.values()}
# What cattrs generates takes twice as long; what is not quite as usual is left to it.
STRUCTURE: dict[type[Message], Callable[[Any, Any], Any]] = {
    **_GENERATED,
    Exists: _quick_exists,
    Get: _quick_get,
    Put: _quick_put,
}
_STRUCTURE_OF_NEWER: Structure = {cls: structure_function(cls, of_newer=True) for cls in KINDS.values()}
UNSTRUCTURE = Unstructure({cls: unstructure_function(cls) for cls in KINDS.values()})
UNSTRUCTURE_FOR_STRANGERS = unstructure_for(LAST_RELEASE)
"""For a peer that has made no offer yet."""


_SHORT, _LONG = 32, 256  # from this length in bytes on, msgpack writes the length of a text otherwise
_FIXSTR, _STR8 = 0xA0, 0xD9
_GET_REPLY = struct.Struct("<9sQ12sQ")

_PUT_KEYS = b"\x84\xa4keys"
_GET_KEYS = b"\x83\xa4keys"
_KEYS_BYTES = len(_PUT_KEYS)
_SIZE = b"\xa5sizes\xc4\x08"
_PUT_FLAGS = {
    (checksums, replace): b"\xa9checksums" + bytes((0xC2 + checksums,)) + b"\xa7replace" + bytes((0xC2 + replace,))
    for checksums in (False, True)
    for replace in (False, True)
}
_PUT_FLAGS_OF = {text: flags for flags, text in _PUT_FLAGS.items()}
_ANY_ROOM = b"\xaacapacities\xc4\x00"
_ROOM = b"\xaacapacities\xc4\x08"
_GET_FLAG = {checksums: b"\xa9checksums" + bytes((0xC2 + checksums,)) for checksums in (False, True)}
_GET_FLAG_OF = {text: flag for flag, text in _GET_FLAG.items()}
_ALL_STORED = b"\x81\xa7skipped\xc4\x00"
_ALL_STORED_REPLY = PutReply(Numbers(array("Q")))
_GET_REPLY_SIZES, _GET_REPLY_CHECKSUMS = b"\x82\xa5sizes\xc4\x08", b"\xa9checksums\xc4\x08"


def _text(key: str) -> bytes | None:
    """Return a key as msgpack writes it; None if it is long."""
    data = key.encode()
    length = len(data)
    if length < _SHORT:
        return bytes((_FIXSTR | length,)) + data
    return bytes((_STR8, length)) + data if length < _LONG else None


def _key_of(body: bytes) -> tuple[str, int] | None:
    """Return the one key of a request, and where what follows it begins."""
    mark = body[_KEYS_BYTES]
    if mark == _STR8:
        start = _KEYS_BYTES + 2
        end = start + body[_KEYS_BYTES + 1]
    else:
        start = _KEYS_BYTES + 1
        end = start + mark - _FIXSTR
        if not start < end < start + _SHORT:
            return None
    key = body[start:end].decode()
    return (key, end) if key and "\0" not in key else None


def _write_put(put: Any) -> bytes | None:
    if len(put.keys) != 1 or len(put.sizes) != 1 or put.ttl_us or put.since:
        return None
    key = _text(put.keys[0])
    return (
        None
        if key is None
        else b"".join((_PUT_KEYS, key, _SIZE, put.sizes.tobytes(), _PUT_FLAGS[put.checksums, put.replace]))
    )


def _read_put(body: bytes) -> Put | None:
    if not body.startswith(_PUT_KEYS) or (found := _key_of(body)) is None:
        return None
    key, at = found
    flags = _PUT_FLAGS_OF.get(body[at + 16 :])
    if flags is None or not body.startswith(_SIZE, at):
        return None
    return Put(Keys([key]), Numbers(array("Q", body[at + 8 : at + 16])), *flags)


def _write_get(get: Any) -> bytes | None:
    rooms = get.capacities
    if len(get.keys) != 1 or len(rooms) > 1:
        return None
    key = _text(get.keys[0])
    if key is None:
        return None
    flag = _GET_FLAG[get.checksums]
    if rooms:
        return b"".join((_GET_KEYS, key, _ROOM, rooms.tobytes(), flag))
    return b"".join((_GET_KEYS, key, _ANY_ROOM, flag))


def _read_get(body: bytes) -> Get | None:
    if not body.startswith(_GET_KEYS) or (found := _key_of(body)) is None:
        return None
    key, at = found
    at += len(_ROOM)
    if body.endswith(_ANY_ROOM, 0, at):
        rooms = b""
    elif body.endswith(_ROOM, 0, at):
        rooms = body[at : at + 8]
        at += 8
    else:
        return None
    flag = _GET_FLAG_OF.get(body[at:])
    return None if flag is None else Get(Keys([key]), Numbers(array("Q", rooms)), flag)


def _write_put_reply(reply: Any) -> bytes | None:
    return None if reply.skipped else _ALL_STORED


def _read_put_reply(body: bytes) -> PutReply | None:
    return _ALL_STORED_REPLY if body == _ALL_STORED else None


def _write_get_reply(reply: Any) -> bytes | None:
    sizes, checksums = reply.sizes, reply.checksums
    if len(sizes) != 1 or len(checksums) != 1:
        return None
    return _GET_REPLY.pack(_GET_REPLY_SIZES, sizes[0], _GET_REPLY_CHECKSUMS, checksums[0])


def _read_get_reply(body: bytes) -> GetReply | None:
    if len(body) != _GET_REPLY.size:
        return None
    first, size, second, checksum = _GET_REPLY.unpack(body)
    if first != _GET_REPLY_SIZES or second != _GET_REPLY_CHECKSUMS:
        return None
    return GetReply(Numbers(array("Q", (size,))), Numbers(array("Q", (checksum,))))


WRITE: Mapping[type[Message], Callable[[Any], bytes | None]]
READ: Mapping[int, Callable[[bytes], Message | None]]
if sys.byteorder == "little":  # as packed numbers are
    WRITE = {Put: _write_put, Get: _write_get, PutReply: _write_put_reply, GetReply: _write_get_reply}
    READ = {Put.KIND: _read_put, Get.KIND: _read_get, PutReply.KIND: _read_put_reply, GetReply.KIND: _read_get_reply}
else:
    WRITE, READ = {}, {}


class StatisticsTree(NamedTuple):
    """What a server sends."""

    server: ServerStatistics
    store: StoreStatistics
    details: ServerDetails | None
    disk: DiskTierStatistics | None = None
    drain: DrainStatistics | None = None


def _structure_float(value: Any, _: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measure of anything")
    return number


_statistics_converter = Converter()
_statistics_converter.register_structure_hook(float, _structure_float)


def statistics_to_tree(
    server: ServerStatistics,
    store: StoreStatistics,
    details: ServerDetails | None = None,
    disk: DiskTierStatistics | None = None,
    drain: DrainStatistics | None = None,
) -> Tree:
    """Turn statistics into nested maps and lists of plain values."""
    parts = {"server": server, "store": store, "details": details, "disk": disk, "drain": drain}
    return Tree({name: _statistics_converter.unstructure(part) for name, part in parts.items() if part is not None})


def statistics_from_tree(tree: Tree) -> StatisticsTree:
    """Turn nested maps and lists back into statistics.

    Raises:
        ProtocolError: they are none.
    """
    try:
        return StatisticsTree(
            _statistics_converter.structure(tree["server"], ServerStatistics),
            _statistics_converter.structure(tree["store"], StoreStatistics),
            _statistics_converter.structure(tree["details"], ServerDetails) if "details" in tree else None,
            _statistics_converter.structure(tree["disk"], DiskTierStatistics) if "disk" in tree else None,
            _statistics_converter.structure(tree["drain"], DrainStatistics) if "drain" in tree else None,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, BaseValidationError) as error:
        raise ProtocolError(f"the server's statistics are not those of this release: {error!r:.300}") from None


_Notice = TypeVar("_Notice", bound=Message)
_new = tuple.__new__  # makes a named tuple without the call of a Python function
_HEADER = struct.Struct("<4sBBHIIQQ")
HEADER_BYTES = _HEADER.size
ALIGNMENT_BYTES = 64
MAGIC = b"INFS"
_HTTP = b"HTTP"
_ORIGINAL = (0xDEADBEEF).to_bytes(4, "little")  # how each request of the original InfiniStore begins
_TLS = (b"\x15\x03", b"\x16\x03")  # how an alert and a handshake begin
_MAX_DEADLINE_US = 2**63
SHORT_BODY_BYTES = 1024
"""A body up to this length takes little memory, and is decoded before it is checked."""
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

    `unstructure` is for the receiver; see `unstructure_for`.

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


def check_beginning(data: memoryview) -> None:
    """Check the first bytes of a frame, however few have arrived.

    Raises:
        ProtocolError: they are of another protocol, which the error names if it is
            known, with the remedy.
    """
    beginning = bytes(data[:8])
    magic = beginning[: len(MAGIC)]
    if len(magic) < len(MAGIC) or magic == MAGIC:
        return
    if magic.startswith(_TLS):
        raise ProtocolError(
            "the peer speaks TLS, and this end does not; use infinistores:// with a server that has --tls-cert"
        )
    if magic == _HTTP:
        raise ProtocolError("the peer speaks HTTP: this is the port of a management API; use the service port")
    if magic == _ORIGINAL:
        raise ProtocolError(
            "the peer speaks the protocol of the original InfiniStore, and this end does not;"
            " install infinistore-trio on both and switch clients and servers at the same time"
        )
    raise ProtocolError(f"not an InfiniStore frame: it begins with {beginning!r}; is this the right port?")


def parse_header(data: memoryview, *, max_body_bytes: int, max_payload_bytes: int) -> Header:
    """Parse the first `HEADER_BYTES` bytes of a frame.

    Raises:
        ProtocolError: not a frame, or longer than the limits allow.
        VersionMismatch: the frame has another major version.
    """
    magic, version, kind, flags, request_id, body_bytes, payload_bytes, deadline_us = _HEADER.unpack_from(data)
    if magic != MAGIC:
        check_beginning(data)
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

    `structure` is for the sender; see `structure_for`.

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


def decode_notices(data: bytes, cls: type[_Notice]) -> Iterator[_Notice]:
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
    """Decode a short, plain body in half the time; None: `_flat_map` is to decide."""
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
    """Return the hook that refuses more than `most` lists in one body."""
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
