"""Sockets for threads: the same streams, with a deadline instead of cancellation."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream, connect_unix

FAR_S = 1e6
"""A deadline that no test reaches."""


def after(seconds: float = FAR_S) -> float:
    return time.monotonic() + seconds  # real time: deadlines are never reached, or certain to be


Pair: TypeAlias = tuple[BlockingSocketStream, BlockingSocketStream]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = map(BlockingSocketStream, socket.socketpair())
    left.deadline = right.deadline = after()
    yield left, right
    left.close()
    right.close()


def test_views_of_any_number_arrive_in_order(pair: Pair) -> None:
    left, right = pair
    data = bytes(range(256)) * 1024
    views = [memoryview(data)[start : start + 64] for start in range(0, len(data), 64)]
    sender = threading.Thread(target=left.send_all, args=(views,))
    sender.start()
    received = bytearray()
    while len(received) < len(data):
        first, second = bytearray(1000), bytearray(1000)
        count = right.receive_into([memoryview(first), memoryview(second)])
        assert count
        received += (first + second)[:count]
    sender.join()
    assert received == data


def test_the_end_of_a_stream_is_zero_bytes(pair: Pair) -> None:
    left, right = pair
    left.send_all([memoryview(b"last")])
    left.close()
    buffer = bytearray(10)
    assert right.receive_into([memoryview(buffer)]) == 4
    assert right.receive_into([memoryview(buffer)]) == 0


def test_sending_to_a_peer_that_has_gone_is_an_error(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(StoreUnavailable):
        left.send_all([memoryview(bytes(1 << 20))])


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 0.001])
def test_a_receive_and_a_send_give_up_at_their_deadline(deadline_s: float, pair: Pair) -> None:
    left, right = pair
    left.deadline = after(deadline_s)
    with pytest.raises(TimeoutError):
        left.receive_into([memoryview(bytearray(1))])
    right.deadline = after(deadline_s)
    with pytest.raises(TimeoutError):
        right.send_all([memoryview(bytes(64 << 20))])


def test_a_later_deadline_is_kept_after_an_earlier_one(pair: Pair) -> None:
    left, right = pair
    left.deadline = after(0.001)
    with pytest.raises(TimeoutError):
        left.receive_into([memoryview(bytearray(1))])
    left.deadline = after()
    answer = threading.Thread(target=right.send_all, args=([memoryview(b"x")],))
    answer.start()
    assert left.receive_into([memoryview(bytearray(1))]) == 1
    answer.join()


def test_an_idle_stream_is_stale_when_the_peer_spoke_or_left(pair: Pair) -> None:
    left, right = pair
    assert not left.is_stale()
    right.send_all([memoryview(b"x")])
    assert left.is_stale()
    left.receive_into([memoryview(bytearray(1))])
    assert not left.is_stale()
    right.close()
    assert left.is_stale()
    left.close()
    assert left.is_stale()


def test_a_listener_that_accepts_nobody_does_not_keep_a_client_for_ever(tmp_path: Path) -> None:
    """A Unix socket whose backlog is full makes connect wait: not beyond the
    deadline.
    """
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting: list[socket.socket] = []
        try:
            while True:
                sock = socket.socket(socket.AF_UNIX)
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect(path)
        except BlockingIOError:
            pass
        with pytest.raises(TimeoutError):
            connect_unix(path, after(0.01))
        for sock in waiting:
            sock.close()
