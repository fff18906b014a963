"""Frames: what is encoded comes back, and what is no frame is one typed error that
costs little memory.
"""

import struct
import tracemalloc
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinistore.errors import InfiniStoreException, InvalidRequest, LimitExceeded, ProtocolError, VersionMismatch
from infinistore.protocol import codec
from infinistore.protocol import messages as messages_of_the_wire
from infinistore.protocol.codec import (
    HEADER_BYTES,
    STRUCTURE,
    Header,
    Structure,
    decode_body,
    encode_head,
    head_bytes,
    pack_u64,
    parse_header,
    structure_function,
)
from infinistore.protocol.messages import (
    KINDS,
    Evict,
    Exists,
    GetReply,
    Hello,
    Keys,
    Message,
    Numbers,
    Put,
    StatisticsReply,
    Tree,
)
from infinistore.protocol.versions import MAJOR
from tests.examples import examples
from tests.tables import for_each

from .strategies import counts, messages, messages_of

MIB = 1024 * 1024
KIND_NUMBERS = sorted(KINDS)


def parse(head: bytes, max_body_bytes: int = 2**32, max_payload_bytes: int = 2**64) -> Header:
    return parse_header(memoryview(head), max_body_bytes=max_body_bytes, max_payload_bytes=max_payload_bytes)


def body_of(message: Message) -> bytes:
    head = encode_head(message, request_id=1)
    return head[HEADER_BYTES : HEADER_BYTES + parse(head).body_bytes]


def fields_of(message: Message) -> dict[str, Any]:
    """The body as it is on the wire: a map of plain values."""
    fields: dict[str, Any] = msgpack.unpackb(body_of(message))
    return fields


def decode(kind: int, body: bytes) -> Message | None:
    """Decode a body; None if it was refused, which `ProtocolError` alone may do."""
    try:
        return decode_body(kind, memoryview(body))
    except ProtocolError:
        return None


# What is encoded comes back


@given(messages, st.integers(0, 2**32 - 1), counts, counts)
def test_a_message_and_its_header_come_back_as_they_were(
    message: Message, request_id: int, payload_bytes: int, deadline_us: int
) -> None:
    head = encode_head(message, request_id=request_id, payload_bytes=payload_bytes, deadline_us=deadline_us)
    header = parse(head)
    assert header == Header(message.KIND, request_id, header.body_bytes, payload_bytes, min(deadline_us, 2**63))
    decoded = decode_body(header.kind, memoryview(head)[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
    assert decoded == message


@given(messages)
def test_a_payload_starts_at_a_multiple_of_64_bytes_after_zeros(message: Message) -> None:
    head = encode_head(message, request_id=1)
    end = HEADER_BYTES + parse(head).body_bytes
    assert len(head) == head_bytes(end - HEADER_BYTES)
    assert len(head) % 64 == 0
    assert len(head) - end < 64
    assert not any(head[end:])


def test_the_kinds_of_all_messages_differ() -> None:
    assert {kind: cls.KIND for kind, cls in KINDS.items()} == {kind: kind for kind in KINDS}
    defined = [cls for cls in vars(messages_of_the_wire).values() if isinstance(cls, type) and hasattr(cls, "KIND")]
    assert len(defined) == len(KINDS)


# Headers


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), counts, counts)
def test_any_32_bytes_are_a_header_within_the_bounds_or_a_protocol_error(
    data: bytes, max_body_bytes: int, max_payload_bytes: int
) -> None:
    try:
        header = parse(data, max_body_bytes, max_payload_bytes)
    except ProtocolError:
        return
    assert header.kind in KINDS
    assert header.body_bytes <= max_body_bytes
    assert header.payload_bytes <= max_payload_bytes


@given(messages, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_with_one_bit_wrong_is_refused_or_says_something_else(message: Message, bit: int) -> None:
    head = bytearray(encode_head(message, request_id=1))
    before = parse(bytes(head))
    head[bit // 8] ^= 1 << bit % 8
    if bit < 64 and not 40 <= bit < 48:  # magic, version, flags
        with pytest.raises(ProtocolError):
            parse(bytes(head))
    else:
        try:
            after = parse(bytes(head))
        except ProtocolError:
            assert bit < 48
        else:
            assert after != before


ORIGINAL_EXCHANGE = struct.pack("<IcI", 0xDEADBEEF, b"E", 30) + bytes(30)
"""How a client of the original InfiniStore begins: a header of 9 bytes, and a body."""


def test_the_error_for_another_version_names_both_even_if_nothing_else_is_known() -> None:
    other = struct.pack("<4sBBHIIQQ", b"INFS", 9, 200, 0xFFFF, 1, 2**32 - 1, 2**64 - 1, 0)
    with pytest.raises(VersionMismatch, match=f"version 9 .* version {MAJOR};.* same release"):
        parse(other, 0, 0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "is this the right port"),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n", "the port of a management API; use the service port"),
        (b"\x16\x03\x01\x02\x00\x01" + bytes(26), "the peer speaks TLS, and this end does not; use infinistores://"),
        (b"\x15\x03\x03\x00\x02" + bytes(27), "the peer speaks TLS"),
        (ORIGINAL_EXCHANGE, "of the original InfiniStore, and this end does not; install infinistore-trio on both"),
    ],
)
def test_the_error_for_another_protocol_says_what_to_look_at(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        parse(data[:HEADER_BYTES])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kind", 0x7F, "unknown kind of message 0x7f"),
        ("flags", 0x8001, "unknown flags 0x8001"),
        ("body", 101, "a body of 101 bytes is over the limit of 100"),
        ("payload", 1001, "a payload of 1001 bytes is over the limit of 1000"),
    ],
)
def test_the_error_for_a_field_that_cannot_be_accepted_names_it(field: str, value: int, words: str) -> None:
    fields = {"kind": 0x01, "flags": 0, "body": 100, "payload": 1000} | {field: value}
    packed = struct.pack(
        "<4sBBHIIQQ",
        b"INFS",
        MAJOR,
        fields["kind"],
        fields["flags"],
        1,
        fields["body"],
        fields["payload"],
        0,
    )
    with pytest.raises(ProtocolError, match=words):
        parse(packed, 100, 1000)


# Bodies


@given(st.sampled_from(KIND_NUMBERS), st.binary(max_size=200))
@example(Hello.KIND, b"")
@example(Hello.KIND, b"\x80\x80")
def test_any_bytes_are_a_body_or_a_protocol_error(kind: int, body: bytes) -> None:
    decode(kind, body)


_wire_names = st.sampled_from(sorted({field.name for cls in KINDS.values() for field in attrs.fields(cls)}))
_wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=20)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
    | st.datetimes().map(lambda when: msgpack.Timestamp(when.second, when.microsecond)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9) | st.binary(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


_any_names = _wire_names | st.text(max_size=4) | st.binary(max_size=4) | _wire_names.map(str.encode)


@given(st.sampled_from(KIND_NUMBERS), st.dictionaries(_any_names, _wire_values, max_size=5))
@example(Hello.KIND, {b"name": ""})
@example(Hello.KIND, {b"name": "", "more": 1})
def test_any_map_is_a_body_or_a_protocol_error(kind: int, fields: dict[str, Any]) -> None:
    decode(kind, msgpack.packb(fields))


@given(st.sampled_from(KIND_NUMBERS), _wire_values)
@example(Hello.KIND, [])
@example(Hello.KIND, [["name", ""], ["token", ""]])
def test_what_is_no_map_is_no_body(kind: int, value: Any) -> None:
    if not isinstance(value, dict):
        assert decode(kind, msgpack.packb(value)) is None


@given(messages, st.data())
def test_a_body_with_a_bit_flipped_or_its_end_cut_off_is_accepted_or_a_protocol_error(
    message: Message, data: st.DataObject
) -> None:
    body = bytearray(body_of(message))
    bit = data.draw(st.integers(0, 8 * len(body) - 1), label="bit")
    body[bit // 8] ^= 1 << bit % 8
    decode(message.KIND, bytes(body))
    cut = data.draw(st.integers(0, len(body) - 1), label="cut")
    assert decode(message.KIND, body_of(message)[:cut]) is None


@given(messages, st.binary(min_size=1, max_size=10))
def test_bytes_after_the_map_are_refused(message: Message, more: bytes) -> None:
    assert decode(message.KIND, body_of(message) + more) is None


@given(messages, st.text(max_size=5) | st.binary(max_size=5), _wire_values)
def test_a_field_that_no_message_of_this_kind_has_is_refused(message: Message, name: str | bytes, value: Any) -> None:
    fields = fields_of(message)
    if name not in fields:
        assert decode(message.KIND, msgpack.packb(fields | {name: value})) is None


def test_the_error_for_unknown_fields_names_them_whether_they_are_text_or_bytes() -> None:
    body = msgpack.packb({"name": "", "what": 1, b"\xff": 2})
    with pytest.raises(ProtocolError, match=r"malformed Hello: unknown fields 'what', b'\\xff'"):
        decode_body(Hello.KIND, memoryview(body))


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no words for this")


def test_whatever_decoding_raises_even_an_error_without_words_is_a_protocol_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fields: object, cls: object) -> Message:
        raise Unspeakable

    monkeypatch.setitem(STRUCTURE, Hello, refuse)
    with pytest.raises(ProtocolError, match="malformed Hello: Unspeakable"):
        decode_body(Hello.KIND, memoryview(b"\x80"))


@given(messages, st.data())
def test_a_field_that_stands_twice_is_refused(message: Message, data: st.DataObject) -> None:
    fields = list(fields_of(message).items())
    if not fields:
        return
    twice = [*fields, data.draw(st.sampled_from(fields))]
    packer = msgpack.Packer()
    body = packer.pack_map_header(len(twice)) + b"".join(packer.pack(part) for pair in twice for part in pair)
    with pytest.raises(ProtocolError, match="a name stands twice"):
        decode_body(message.KIND, memoryview(body))


@given(messages, st.data())
def test_a_missing_field_takes_its_default_or_is_named_by_the_error(message: Message, data: st.DataObject) -> None:
    fields = attrs.fields(type(message))
    if not fields:
        return
    field = data.draw(st.sampled_from(fields))
    sent = fields_of(message)
    sent.pop(field.name, None)  # a newer field is not sent if it has its default
    body = memoryview(msgpack.packb(sent))
    if field.default is attrs.NOTHING:
        with pytest.raises(ProtocolError, match=f"the field '{field.name}' is missing"):
            decode_body(message.KIND, body)
    else:
        default: Any = field.default
        expected: Any = attrs.evolve(message, **{field.name: default.factory() if field.type is Keys else default})
        assert decode_body(message.KIND, body) == expected


# One value of each type of the wire. None is taken for another, though to Python 1, 1.0
# and True are equal.
_OF_EACH_TYPE: list[Any] = [1, 1.0, True, "1", b"12345678", {}, [], None]
_ON_THE_WIRE: dict[Any, type] = {Keys: str, Numbers: bytes, Tree: dict}


_OUT_OF_BOUNDS: dict[Any, list[Any]] = {
    int: [-1],
    float: [-0.001, 1.001, float("nan"), float("inf")],
    str: ["x" * 1025],
}


@settings(max_examples=examples(10))
@given(data=st.data())
def test_a_field_of_the_wrong_type_or_out_of_its_bounds_is_refused(data: st.DataObject) -> None:
    """In a message of each kind: each of its fields."""
    other = []
    for cls in KINDS.values():
        sent = fields_of(data.draw(messages_of(cls)))
        for field in attrs.fields(cls):
            wrong = [value for value in _OF_EACH_TYPE if type(value) is not _ON_THE_WIRE.get(field.type, field.type)]
            for value in (*wrong, *_OUT_OF_BOUNDS.get(field.type, [])):
                try:
                    decode_body(cls.KIND, memoryview(msgpack.packb(sent | {field.name: value})))
                    refusal = "none"
                except ProtocolError as error:
                    refusal = str(error)
                if f"malformed {cls.__name__}" not in refusal:
                    other.append((cls.__name__, field.name, value, refusal))
    assert other == []


@for_each(sizes=[b"1234567", b"123456789"])
def test_packed_numbers_are_eight_bytes_each(sizes: bytes) -> None:
    assert decode(GetReply.KIND, msgpack.packb({"sizes": sizes, "checksums": b""})) is None


def test_packed_numbers_are_little_endian() -> None:
    reply = GetReply(sizes=pack_u64([1, 2**63]), checksums=pack_u64())
    assert fields_of(reply)["sizes"] == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80])


@for_each(joined=["\0", "a\0", "\0a", "a\0\0b", "x" * 1025, "\u00e9" * 513])
def test_a_key_that_no_store_takes_is_an_invalid_request(joined: str) -> None:
    with pytest.raises(InvalidRequest, match=r"key \d"):
        decode_body(Exists.KIND, memoryview(msgpack.packb({"keys": joined})))


@pytest.mark.parametrize("text", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80"], ids=["no UTF-8", "a surrogate", "overlong"])
def test_text_that_is_not_utf_8_is_refused(text: bytes) -> None:
    packer = msgpack.Packer()
    body = packer.pack({"keys": "@@@"}).replace(b"\xa3@@@", bytes([0xA0 | len(text)]) + text)
    assert decode(Exists.KIND, body) is None


def test_a_whole_number_is_a_ratio_to_the_caller_and_a_float_on_the_wire() -> None:
    assert fields_of(Evict(low=0, high=1)) == {"low": 0.0, "high": 1.0}
    assert type(fields_of(Evict(low=0, high=1))["high"]) is float


@settings(max_examples=examples(500))
@given(cls=st.sampled_from([*KINDS.values()]), data=st.data())
def test_a_short_body_is_decoded_as_a_long_one_is(cls: type[Message], data: st.DataObject) -> None:
    """Whatever is in it, the quick way gives what the thorough one gives, error and
    all.
    """
    sent = fields_of(data.draw(messages_of(cls)))
    values = st.sampled_from([*_OF_EACH_TYPE, [], {"a": {}}, {b"a": 1}, b"12345678", True, False, "k", "a\0\0b"])
    sent |= data.draw(st.dictionaries(st.sampled_from([*sent, "other", b"keys"]), values, max_size=2))
    body = msgpack.packb(sent)
    if data.draw(st.booleans()) and sent:  # one name twice
        name, value = data.draw(st.sampled_from(list(sent.items())))
        body = bytes([body[0] + 1]) + body[1:] + msgpack.packb(name) + msgpack.packb(value)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(body) - 1))
        body = body[:at] + bytes([data.draw(st.integers(0, 255))]) + body[at + 1 :]

    def outcome(structure: Structure) -> object:
        try:
            return decode_body(cls.KIND, memoryview(body), structure)
        except InfiniStoreException as error:
            return type(error), str(error)

    with pytest.MonkeyPatch.context() as patch:
        quickly = outcome(STRUCTURE)
        patch.setattr(codec, "SHORT_BODY_BYTES", 0)
        assert quickly == outcome({cls: structure_function(cls)})


# What a body costs


def peak_bytes(kind: int, body: bytes) -> int:
    """The most memory that decoding takes, and what it returns with it."""
    view = memoryview(body)
    tracemalloc.start()
    try:
        try:
            decoded = decode_body(kind, view)
        except ProtocolError:
            decoded = None
        peak = tracemalloc.get_traced_memory()[1]
        del decoded
        return peak
    finally:
        tracemalloc.stop()


def nested(depth: int, inner: bytes) -> bytes:
    return b"\x81\xa1a" * depth + inner


def bushy(depth: int) -> bytes:
    """A tree of maps, four in each."""
    body = b"\x80"
    for _ in range(depth):
        body = b"\x84" + b"".join(b"\xa1" + name + body for name in (b"a", b"b", b"c", b"d"))
    return body


@pytest.mark.parametrize(
    "value",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        b"\xdd\x00\x0f\xff\xff" + b"\x90" * 2**20,  # of a million empty lists
        b"\xdd\x00\x0f\xff\xff" + b"\x80" * 2**20,  # of a million empty maps
        b"\xdd\x00\x10\x00\x00" * 500,  # lists in lists, each for a million
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xc9\xff\xff\xff\xff\x05",  # 4 GiB of something else
        nested(100_000, b"\xc0"),
        bushy(9),
        b"\xdb\x00\x10\x00\x00" + b"ab\0d" * (2**18),  # many short keys
    ],
    ids=[
        "list",
        "empty lists",
        "empty maps",
        "lists in lists",
        "map",
        "text",
        "bytes",
        "extension",
        "deep maps",
        "bushy maps",
        "short keys",
    ],
)
@pytest.mark.parametrize("cls", ["Exists", "StatisticsReply"])
def test_a_small_body_does_not_take_much_memory(cls: str, value: bytes) -> None:
    kind, name = {"Exists": (0x04, b"\xa4keys"), "StatisticsReply": (0x8B, b"\xaastatistics")}[cls]
    body = b"\x81" + name + value
    assert peak_bytes(kind, body) < 2 * MIB + 64 * len(body) * (value[:1] == b"\xdb")


def tree_body(value: bytes) -> bytes:
    """The body of a StatisticsReply that holds this value, as msgpack."""
    return b"\x81\xaastatistics\x81\xa1a" + value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xdc\x02\x01" + b"\x01" * 513, "max_array_len"),
        (b"\xdc\x02\x00" + (b"\x95" + b"\x90" * 5) * 512, "more than 2048 lists"),
        (b"\xdc\x02\x00" + (b"\x95" + b"\x80" * 5) * 512, "more than 2048 maps"),
        (b"\xdc\x02\x00" * 5000, "malformed"),
    ],
    ids=["a long list", "many lists", "many maps", "deep lists"],
)
def test_the_lists_of_statistics_are_bounded(value: bytes, words: str) -> None:
    body = tree_body(value)
    with pytest.raises(ProtocolError, match=words):
        decode_body(StatisticsReply.KIND, memoryview(body))
    assert peak_bytes(StatisticsReply.KIND, body) < 8 * MIB


def test_the_names_in_statistics_are_text() -> None:
    with pytest.raises(ProtocolError, match="a name that is no text"):
        decode_body(StatisticsReply.KIND, memoryview(tree_body(b"\x81\xc4\x01a\x01")))


def test_only_statistics_have_lists() -> None:
    tree: dict[str, object] = {"a": [1, [2.5, "b"], {"c": []}]}
    reply = StatisticsReply(Tree(tree))
    assert decode_body(StatisticsReply.KIND, memoryview(body_of(reply))) == reply
    assert decode(Hello.KIND, msgpack.packb({"name": []})) is None


def test_a_million_keys_at_most_are_made_of_a_body() -> None:
    body = msgpack.packb({"keys": "\0".join(["ab"] * 4_000_000)})
    assert decode(Exists.KIND, body) is None
    assert peak_bytes(Exists.KIND, body) < 120 * MIB


def test_a_long_batch_is_decoded() -> None:
    keys = Keys([f"key {index}" for index in range(8192)])
    put = Put(keys, pack_u64([65536] * len(keys)))
    assert decode_body(Put.KIND, memoryview(body_of(put))) == put


WITH_KEYS = [cls for cls in KINDS.values() if "keys" in attrs.fields_dict(cls)]


@for_each(cls=WITH_KEYS, key=["\u00e9", "\u00e9" * 100], count=[1001, 100_000])
def test_a_batch_that_is_too_large_is_not_taken_apart(cls: type[Message], key: str, count: int) -> None:
    """It takes no more memory than to read its text, and none if that is too long."""
    body = memoryview(msgpack.packb({"keys": "\0".join([key] * count)}))

    def refused() -> None:
        with pytest.raises(LimitExceeded, match=f"in one {cls.__name__} are more than max_batch_keys=1000"):
            decode_body(cls.KIND, body, max_keys=1000)

    refused()  # what is made once, at the first time, does not count
    tracemalloc.start()
    try:
        refused()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(body) + 10_000
    assert peak < 10_000_000
