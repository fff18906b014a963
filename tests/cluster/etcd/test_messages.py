"""What etcd sends: any bytes are understood, or raise one error."""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.cluster.etcd import gateway as messages
from infinistore.cluster.etcd.gateway import Answer, EtcdMisbehaved, EtcdRefused, HttpConversation

READERS: list[Callable[[bytes], Any]] = [
    messages.read_range,
    messages.read_outcome,
    messages.read_lease,
    messages.read_ttl,
    messages.read_token,
    messages.read_watch,
    lambda body: messages.read_error(Answer(500, body)),
]
NAMES = ["header", "revision", "kvs", "key", "value", "result", "events", "kv", "error", "code", "TTL", "ID", "type"]
NAMES += ["responses", "response_range", "compact_revision", "token", "lease", "create_revision"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["DELETE", "YQ==", "12"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
bodies = st.binary(max_size=30) | values.map(lambda value: json.dumps(value).encode())


@given(bodies)
def test_any_answer_is_understood_or_raises_one_error(body: bytes) -> None:
    for read in READERS:
        with contextlib.suppress(EtcdMisbehaved, EtcdRefused):
            read(body)


def test_the_keys_with_a_prefix_end_before_the_next_prefix() -> None:
    body = messages.range_of("/infinistore/a/").body
    assert body == {"key": "L2luZmluaXN0b3JlL2Ev", "range_end": "L2luZmluaXN0b3JlL2Ew"}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('{"error": {"grpc_code": 14, "message": "no leader"}}', 14),
        ('{"error": "no leader", "message": "no leader", "code": 14}', 14),
    ],
)
def test_an_error_on_a_watch_is_raised(line: str, code: int) -> None:
    with pytest.raises(EtcdRefused, match="no leader") as refused:
        messages.read_watch(line.encode())
    assert refused.value.code == code


HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTrailer: Grpc-Trailer\r\nTransfer-Encoding: chunked\r\n\r\n"
)
CHUNKED = HEAD + b"5\r\n{\n}\nx\r\n2\r\ny\n\r\n3\r\nend\r\n0\r\nGrpc-Trailer: application/grpc\r\n\r\n"


@given(st.lists(st.integers(1, len(CHUNKED)), max_size=8))
def test_an_answer_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    places = sorted({0, len(CHUNKED), *cuts})
    pieces = [CHUNKED[first:last] for first, last in itertools.pairwise(places)]
    http, lines = HttpConversation("etcd:2379"), HttpConversation("etcd:2379")
    http.request("/v3/watch", b"{}", "")
    lines.request("/v3/watch", b"{}", "")
    found = []
    for piece in pieces:
        assert not http.complete
        http.receive(piece)
        lines.receive(piece)
        while (line := lines.take_line()) is not None:
            found.append(line)

    assert (http.complete, http.reusable, http.answer) == (True, True, Answer(200, b"{\n}\nxy\nend"))
    assert found == [b"{", b"}", b"xy", b"end"]
    assert http.request("/v3/kv/range", b"{}", "a token").endswith(b"\r\n\r\n{}")


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_taken_or_raise_one_error(noise: bytes, after_a_head: bool) -> None:
    http = HttpConversation("etcd:2379")
    http.request("/v3/kv/range", b"{}", "")
    with contextlib.suppress(EtcdMisbehaved):
        http.receive((HEAD if after_a_head else b"") + noise)
        http.take_line()
        http.receive(b"")


def test_a_request_says_what_it_must() -> None:
    http = HttpConversation("[::1]:2379")
    sent = http.request("/v3/kv/range", b"{}", "a token")
    server = h11.Connection(h11.SERVER)
    server.receive_data(sent)
    request = server.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (b"POST", b"/v3/kv/range")
    assert dict(request.headers.raw_items()) == {
        b"Host": b"[::1]:2379",
        b"Content-Type": b"application/json",
        b"Content-Length": b"2",
        b"Authorization": b"a token",
    }


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinistore.cluster.etcd.gateway.MOST_ANSWER_BYTES", 10)
    http = HttpConversation("etcd:2379")
    http.request("/v3/watch", b"{}", "")
    with pytest.raises(EtcdMisbehaved, match="longer than 10"):
        http.receive(HEAD + b"20\r\n" + 32 * b"x")
