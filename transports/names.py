"""From the name of a host to its addresses, without waiting for it longer than the caller wants to.

The system's look-up cannot be stopped, and takes as long as it takes: so it runs in a thread of its own, which is left
to itself when nobody waits any more. Several who look for the same name at the same time share one look-up, so a name
server that does not answer costs one thread a name, not one a call.
"""

import os
import socket
import threading
from concurrent.futures import Future
from typing import TypeAlias

__all__ = ["NEXT_ADDRESS_AFTER_S", "SocketAddress", "look_up"]

SocketAddress: TypeAlias = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]
"""What `socket.getaddrinfo` returns for TCP: family, kind, protocol, canonical name, address."""

NEXT_ADDRESS_AFTER_S = 0.5
"""How long to wait for one address of a host before trying the next; the last one gets all the time that is left."""

_under_way: "dict[tuple[int, str, int], Future[list[SocketAddress]]]" = {}
_lock = threading.Lock()


def look_up(host: str, port: int) -> "Future[list[SocketAddress]]":
    """Return the addresses of a host, or the promise of them. An address needs no look-up, and so no thread.

    The future raises `OSError` or, for what no host can be called, `UnicodeError`. It cannot be cancelled.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass
    else:
        known: Future[list[SocketAddress]] = Future()
        known.set_result(found)  # type: ignore[arg-type]  # nobody asked for an address of a Unix socket
        return known
    # The process is part of what is looked for: in a forked child, nobody answers for the parent's threads.
    wanted = (os.getpid(), host, port)
    with _lock:
        answer = _under_way.get(wanted)
        if answer is None:
            answer = _under_way[wanted] = Future()
            answer.set_running_or_notify_cancel()
            threading.Thread(target=_look_up, args=(wanted, answer), name=f"look up {host}", daemon=True).start()
    return answer


def _look_up(wanted: tuple[int, str, int], answer: "Future[list[SocketAddress]]") -> None:
    _, host, port = wanted
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        with _lock:
            del _under_way[wanted]
        answer.set_exception(error)
    else:
        with _lock:
            del _under_way[wanted]
        answer.set_result(found)  # type: ignore[arg-type]


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
