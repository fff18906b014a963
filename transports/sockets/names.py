"""Name resolution that never blocks its caller for longer than the caller wants.

The system's lookup cannot be cancelled and has no time limit. So it runs in a thread of
its own, which is abandoned when nobody waits any more. Concurrent lookups of one name
share a thread, so a name server that does not answer costs one thread per name, not one
per call.
"""

import errno
import os
import socket
import threading
from concurrent.futures import Future
from typing import TypeAlias

from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.new_threads import start_thread

__all__ = ["NEXT_ADDRESS_AFTER_S", "Found", "SocketAddress", "found_addresses", "look_up"]

SocketAddress: TypeAlias = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]
"""What `socket.getaddrinfo` returns for TCP: family, kind, protocol, canonical name,
address.
"""

Found: TypeAlias = "list[SocketAddress] | KeptError"
"""The outcome of a lookup. Several callers may wait for it, so an error is a
`KeptError`, which each of them raises anew.
"""

NEXT_ADDRESS_AFTER_S = 0.5
"""How long to wait for one address of a host before trying the next; the last one gets
all the time that is left.
"""

_under_way: "dict[tuple[int, str, int], Future[Found]]" = {}
_lock = threading.Lock()


def found_addresses(found: Found) -> list[SocketAddress]:
    """Return the addresses that a lookup has found.

    Raises:
        OSError: it has found none.
        UnicodeError: this is no host name.
        StoreUnavailable: the system gave no thread for the lookup.
    """
    if isinstance(found, KeptError):
        raise found.again()
    return found


def look_up(host: str, port: int) -> "Future[Found]":
    """Return the addresses of a host, or a future of them. An address needs no lookup,
    and so no thread.

    The future cannot be cancelled. `found_addresses` reads its outcome.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass
    else:
        known: Future[Found] = Future()
        known.set_result(found)  # type: ignore[arg-type]  # nobody asked for an address of a Unix socket
        return known
    # The process is part of what is looked for: in a forked child, nobody answers for
    # the parent's threads.
    wanted = (os.getpid(), host, port)
    with _lock:
        answer = _under_way.get(wanted)
        if answer is None:
            answer = Future()
            answer.set_running_or_notify_cancel()
            thread = threading.Thread(target=_look_up, args=(wanted, answer), name=f"look up {host}", daemon=True)
            try:
                start_thread(thread)
            except StoreUnavailable as error:
                answer.set_result(KeptError(error))
            else:
                _under_way[wanted] = answer  # only now, when somebody is there to answer
    return answer


def _look_up(wanted: tuple[int, str, int], answer: "Future[Found]") -> None:
    _, host, port = wanted
    found: Found
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[assignment]
    except (OSError, UnicodeError) as error:
        found = KeptError(error)
    except MemoryError:
        found = KeptError(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with _lock:
        if _under_way.get(wanted) is answer:  # Ctrl-C may have come before it was there
            del _under_way[wanted]
    answer.set_result(found)


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
