"""Ports that a test keeps while nobody listens at them.

The kernel gives any free port of its range to any program that asks for one, or that
connects. So a server that is started again where it was may find that another test run
has its port. These ports are outside of that range, and a name that the kernel keeps
for this process says which are taken.
"""

import random
import socket
from pathlib import Path
from typing import Final

__all__ = ["own_ports"]

_FIRST: Final = 15_000


def own_ports(count: int) -> list[int]:
    """Return free ports of loopback that no other test gets until this process and its
    children have ended.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = range(_FIRST, first_of_kernel)
    found: list[int] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        if len(found) == count:
            break
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0infinistore-tests-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
        else:
            name.detach()  # from here on it is open until the process ends
            found.append(port)
    assert len(found) == count, f"{count} ports wanted, {len(found)} are free"
    return found
