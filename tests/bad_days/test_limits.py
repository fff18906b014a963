"""A server whose numbers cannot be: the client neither loops on them nor takes memory
for them.
"""

from typing import Any

import pytest

from infinistore.client.connection.pool import Connection
from infinistore.client.operations.remote import RemoteOperations
from infinistore.client.options import Options
from infinistore.client.requests import Get
from infinistore.errors import ProtocolError
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import MISSING, Exists, ExistsReply, GetReply, HelloReply, Keys, Message
from tests.protocol.wire import Wire, frame

HELLO: dict[str, Any] = {
    "instance": "1",
    "server_version": "1",
    "max_body_bytes": 1 << 20,
    "max_batch_keys": 100,
    "max_batch_bytes": 1 << 20,
    "max_value_bytes": 1 << 20,
}


def greet(wire: Wire) -> Connection[object]:
    link: Connection[object] = Connection(object(), Options(), lambda: 0.0)
    wire.run(link.greet())
    link.open([], ("tcp", ""))
    return link


def operations_of(link: Connection[object]) -> RemoteOperations:
    assert link.operations is not None
    return link.operations


def after_hello(reply: Message, *, announced: int | None = None) -> tuple[Wire, Connection[object]]:
    wire = Wire(frame(HelloReply(**HELLO)) + frame(reply, request_id=2, announced=announced))
    return wire, greet(wire)


@pytest.mark.parametrize("name", ["max_body_bytes", "max_batch_keys", "max_batch_bytes", "max_value_bytes"])
def test_a_server_that_takes_nothing_at_all_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match=name):
        greet(Wire(frame(HelloReply(**{**HELLO, name: 0}))))


@pytest.mark.parametrize("sizes", [[2**50], [MISSING, 2**62], [2**20 - 1, 2**20 - 1, 2**20]])
def test_no_memory_is_taken_for_more_than_the_server_said_that_it_sends(sizes: list[int]) -> None:
    reply = GetReply(pack_u64(sizes), pack_u64([1] * len(sizes)))
    wire, link = after_hello(reply, announced=sum(size for size in sizes if size != MISSING))
    with pytest.raises(ProtocolError, match="more than"):
        wire.run(operations_of(link).get(Get(["a", "b", "c"][: len(sizes)])))
    assert not link.usable


@pytest.mark.parametrize("present", [b"\1\2", b"\xff\0"])
def test_neither_there_nor_missing_is_a_protocol_error(present: bytes) -> None:
    wire, link = after_hello(ExistsReply(present))
    with pytest.raises(ProtocolError, match="neither"):
        wire.run(operations_of(link).exists(Exists(Keys(["a", "b"]))))
