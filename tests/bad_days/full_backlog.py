"""A listener with which nobody can connect: packets to it are lost."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["full"]


@contextmanager
def full(listener: socket.socket, address: Any) -> Iterator[None]:
    """Fill the backlog of a listener that accepts nobody: who connects now gets no
    answer at all.
    """
    listener.listen(0)
    waiting: list[socket.socket] = []
    try:
        for _ in range(4):
            sock = socket.socket(listener.family)
            waiting.append(sock)
            sock.setblocking(False)
            sock.connect_ex(address)
        yield
    finally:
        for sock in waiting:
            sock.close()
