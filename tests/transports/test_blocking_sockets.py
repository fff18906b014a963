"""Sockets for threads: the same streams, with a deadline instead of cancellation."""

import socket
import threading
import time
from pathlib import Path

import pytest

from infinistore.errors import StoreUnavailable
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream, connect_unix

FAR_S = 1e6
"""A deadline that no test reaches."""


def after(seconds: float = FAR_S) -> float:
    return time.monotonic() + seconds  # real time: deadlines are never reached, or certain to be


def pair(deadline_s: float = FAR_S) -> tuple[BlockingSocketStream, BlockingSocketStream]:
    streams = tuple(map(BlockingSocketStream, socket.socketpair()))
    for stream in streams:
        stream.deadline = after(deadline_s)
    return streams[0], streams[1]


def test_views_of_any_number_arrive_in_order() -> None:
    left, right = pair()
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
    left.close()
    right.close()


def test_the_end_of_a_stream_is_zero_bytes() -> None:
    left, right = pair()
    left.send_all([memoryview(b"last")])
    left.close()
    buffer = bytearray(10)
    assert right.receive_into([memoryview(buffer)]) == 4
    assert right.receive_into([memoryview(buffer)]) == 0
    right.close()


def test_sending_to_a_peer_that_has_gone_is_an_error() -> None:
    left, right = pair()
    right.close()
    with pytest.raises(StoreUnavailable):
        left.send_all([memoryview(bytes(1 << 20))])
    left.close()


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 0.001])
def test_a_receive_gives_up_at_its_deadline(deadline_s: float) -> None:
    left, right = pair(deadline_s)
    with pytest.raises(TimeoutError):
        left.receive_into([memoryview(bytearray(1))])
    left.close()
    right.close()


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 0.001])
def test_a_send_gives_up_at_its_deadline(deadline_s: float) -> None:
    left, right = pair(deadline_s)
    with pytest.raises(TimeoutError):
        left.send_all([memoryview(bytes(64 << 20))])
    left.close()
    right.close()


def test_a_later_deadline_is_kept_after_an_earlier_one() -> None:
    left, right = pair(0.001)
    with pytest.raises(TimeoutError):
        left.receive_into([memoryview(bytearray(1))])
    left.deadline = right.deadline = after()
    answer = threading.Thread(target=right.send_all, args=([memoryview(b"x")],))
    answer.start()
    assert left.receive_into([memoryview(bytearray(1))]) == 1
    answer.join()
    left.close()
    right.close()


def test_an_idle_stream_is_stale_when_the_peer_spoke_or_left() -> None:
    left, right = pair()
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
