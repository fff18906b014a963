"""Ports that a test keeps while nobody listens at them.

The kernel gives any free port of its range to any program that asks for one, or that
connects. So a server that is started again where it was may find that another test run
has its port. These ports are outside of that range. They come in blocks, and a name
that the kernel keeps for this process says which blocks are taken.
"""

import os
import random
import socket
from pathlib import Path
from typing import Final

__all__ = ["own_ports"]

_FIRST: Final = 23_000  # above 18080 and 22345, where a server listens that is told nothing else
_BLOCK: Final = 50

_left: dict[int, list[int]] = {}
"""What is left of the blocks of a process; one that is forked takes its own."""


def own_ports(count: int) -> list[int]:
    """Return free ports of loopback that no other test gets until this process and its
    children have ended.
    """
    left = _left.setdefault(os.getpid(), [])
    found: list[int] = []
    while len(found) < count:
        if not left:
            left += _take_block()
        port = left.pop()
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue  # somebody who knows nothing of this has it
        found.append(port)
    return found


def _take_block() -> range:
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    blocks = range(_FIRST, first_of_kernel - _BLOCK, _BLOCK)
    for first in random.SystemRandom().sample(blocks, len(blocks)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0infinistore-tests-ports-{first}")
        except OSError:
            name.close()
            continue
        name.detach()  # from here on it is open until the process ends
        return range(first, first + _BLOCK)
    raise AssertionError("no ports are left for tests")
