"""The bodies of messages about one block are those of msgpack, byte for byte, and say
the same.
"""

import sys
from typing import Any
from unittest import mock

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import InfiniStoreException
from infinistore.protocol import codec
from infinistore.protocol.codec import READ, SHORT_BODY_BYTES, UNSTRUCTURE, WRITE, decode_body, pack_u64
from infinistore.protocol.messages import Get, GetReply, Keys, Message, Numbers, Put, PutReply
from tests.protocol.strategies import counts, keys, messages_of

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="packed numbers are little-endian")
_one_key = (keys | st.text("k", min_size=1, max_size=300)).map(lambda key: Keys([key]))
_one = counts.map(lambda number: pack_u64((number,)))
_none: st.SearchStrategy[Numbers] = st.builds(pack_u64)
singles: st.SearchStrategy[Message] = st.one_of(
    st.builds(Put, _one_key, _one, st.booleans(), st.booleans()),
    st.builds(Get, _one_key, _one | _none, st.booleans()),
    st.builds(PutReply, _none),
    st.builds(GetReply, _one, _one),
)
SMALL: list[Message] = [
    Put(Keys(["k" * 40]), pack_u64((4096,)), True, True),
    Put(Keys(["k"]), pack_u64((4096,)), False, False),
    Get(Keys(["k"]), pack_u64(), True),
    Get(Keys(["k" * 40]), pack_u64((1,)), False),
    PutReply(pack_u64()),
    GetReply(pack_u64((2**64 - 1,)), pack_u64((7,))),
]


def packed(message: Message) -> bytes:
    """The body as msgpack writes it."""
    body: bytes = msgpack.packb(UNSTRUCTURE[type(message)](message))
    return body


def outcome(kind: int, body: bytes) -> Any:
    """What a body is decoded as, or the class of the error."""
    try:
        return decode_body(kind, memoryview(body))
    except InfiniStoreException as error:
        return type(error)


def outcome_by_msgpack(kind: int, body: bytes) -> Any:
    with mock.patch.object(codec, "READ", {}):
        return outcome(kind, body)


@pytest.mark.parametrize("message", SMALL, ids=repr)
def test_messages_about_one_short_block_need_no_msgpack(message: Message) -> None:
    body = WRITE[type(message)](message)
    assert body == packed(message)
    assert READ[message.KIND](body) == message


@given(singles | st.one_of([messages_of(kind) for kind in (Put, Get, PutReply, GetReply)]))
def test_what_is_written_is_what_msgpack_writes(message: Message) -> None:
    assert WRITE[type(message)](message) in (None, packed(message))


@given(
    singles.filter(lambda message: len(packed(message)) <= SHORT_BODY_BYTES),
    st.lists(st.tuples(st.integers(0, SHORT_BODY_BYTES), st.integers(0, 255))),
    st.integers(0, SHORT_BODY_BYTES),
    st.binary(max_size=3),
)
@example(Put(Keys([""]), pack_u64((1,)), True, True), [], 1024, b"")
@example(Get(Keys(["a\0b"]), pack_u64((1,)), True), [], 1024, b"")
@example(PutReply(pack_u64()), [(0, 0x82)], 1024, b"\xa1x\xc0")
def test_a_changed_body_is_read_as_msgpack_reads_it(
    message: Message, changes: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    body = bytearray(packed(message))
    for at, byte in changes:
        body[at % len(body)] = byte
    wrong = bytes(body[:cut]) + more
    assert outcome(message.KIND, wrong) == outcome_by_msgpack(message.KIND, wrong)
