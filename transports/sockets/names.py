"""From the name of a host to a socket, without blocking the caller for longer than the
caller wants.

The system's lookup cannot be cancelled and has no time limit. So it runs in a thread of
its own, which is abandoned when nobody waits any more. Concurrent lookups of one name
share a thread, so a name server that does not answer costs one thread per name, not one
per call.

The addresses of a name race ("Happy Eyeballs", RFC 8305), and what a call has begun
goes on when the call is over: otherwise a caller whose deadline is short would never be
connected. The kernel does that; nothing here waits.
"""

import errno
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Self, TypeAlias

from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError
from infinistore.transports.sockets.raw_sockets import looks_stale

SocketAddress: TypeAlias = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]
]
"""What `socket.getaddrinfo` returns: family, kind, protocol, name, address."""

Found: TypeAlias = "list[SocketAddress] | KeptError"
"""The outcome of a lookup; a `KeptError` is raised anew by each that waits for it."""

NEXT_ADDRESS_AFTER_S: Final = 0.25
"""How long an address has before the next is tried beside it (RFC 8305, section 5)."""
_KEPT_S: Final = 10.0
"""How long an attempt, and the answer of a lookup, are kept after their call."""
_MOST_KEPT: Final = 8
_UNDER_WAY: Final = (errno.EINPROGRESS, errno.EALREADY)
_CONNECTED: Final = (0, errno.EISCONN)

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


def look_up(host: str, port: int) -> Future[Found]:
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


def _look_up(wanted: tuple[int, str, int], answer: Future[Found]) -> None:
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


class _Attempt(NamedTuple):
    """A socket that is being connected, which `connect` tells of when asked again."""

    socket: socket.socket
    address: Any
    begun_at: float


class Dialer:
    """The way to one server: which address answered last, and attempts to connect that
    outlast the calls that made them. Any thread may use it.

    Without `keeps` it forgets both.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._lock = threading.Lock()
        self._last: object = None
        self._left: list[_Attempt] = []
        self._answer: tuple[Future[Found], float] | None = None
        """What was looked up, and when a call last waited for it."""

    def look_up(self, host: str, port: int, now: float) -> Future[Found]:
        """Do as `look_up`, or return a recent lookup that was waited for in vain."""
        answer, waited_at = self._answer or (look_up(host, port), now)
        if not answer.done():
            waited_at = now
        elif waited_at + _KEPT_S <= now:
            answer, waited_at = look_up(host, port), now
        if self.keeps:
            self._answer = answer, waited_at
        return answer

    def dial(self, found: Found, now: float) -> "Dial":
        """Begin to connect to what was looked up.

        Raises:
            OSError, UnicodeError, StoreUnavailable: as `found_addresses`.
        """
        self._answer = None
        addresses = found_addresses(found)
        with self._lock:
            left, self._left = self._left, []
        young = [attempt for attempt in left if attempt.begun_at + _KEPT_S > now]
        _close(attempt for attempt in left if attempt not in young)
        return Dial(self, _in_order(addresses, self._last), young)

    def keep(self, attempts: Sequence[_Attempt]) -> None:
        """Have attempts go on, the oldest to each address."""
        with self._lock:
            oldest: dict[object, _Attempt] = {}
            for attempt in sorted((*self._left, *attempts), key=lambda attempt: attempt.begun_at):
                if not self.keeps or oldest.setdefault(attempt.address, attempt) is not attempt:
                    attempt.socket.close()
            self._left = list(oldest.values())

    def remember(self, address: object) -> None:
        """Note which address answered."""
        if self.keeps:
            self._last = address

    def close(self) -> None:
        """End all attempts, and keep none from now on. Any number of times."""
        self.keeps = False
        self.keep([])

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors."""
        self.keeps = False
        _close(self._left)


class Dial:
    """The attempts of one call, in a `with`: without success they go on after it."""

    def __init__(self, dialer: Dialer, addresses: Sequence[SocketAddress], left: list[_Attempt]) -> None:
        self._dialer = dialer
        self._to_begin = list(addresses)
        self._left = left
        self._begun: list[_Attempt] = []
        self._problem: tuple[int | None, str | None] = errno.EADDRNOTAVAIL, "the name has no address"
        self._done = False
        self._now = self.next_at = float("-inf")

    @property
    def sockets(self) -> list[socket.socket]:
        """Ask again when one of these is writable, and at `next_at`."""
        return [attempt.socket for attempt in (*self._left, *self._begun)]

    def connected(self, now: float) -> socket.socket | None:
        """Begin what is due, and return a socket that is connected, if one is.

        Raises:
            OSError: no address answers; the reason of the last one.
        """
        self._now = now
        while True:
            for attempts in (self._left, self._begun):
                for attempt in list(attempts):
                    problem = attempt.socket.connect_ex(attempt.address)
                    if problem in _UNDER_WAY:
                        continue
                    attempts.remove(attempt)
                    if problem in _CONNECTED and not (attempts is self._left and looks_stale(attempt.socket)):
                        self._done = True
                        self._dialer.remember(attempt.address)
                        return attempt.socket
                    attempt.socket.close()
                    if attempts is self._begun:
                        self._failed(problem, os.strerror(problem))
            if not self._to_begin and not self._begun:
                raise OSError(*self._problem)
            if now < self.next_at:
                return None
            if not self._to_begin:
                self.next_at = float("inf")
                return None
            self._begin_next()

    def _begin_next(self) -> None:
        family, kind, protocol, _, address = self._to_begin.pop(0)
        self.next_at = self._now + NEXT_ADDRESS_AFTER_S
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            self._failed(error.errno, error.strerror)
        else:
            sock.setblocking(False)
            self._begun.append(_Attempt(sock, address, self._now))

    def _failed(self, number: int | None, text: str | None) -> None:
        self._problem = number, text
        self.next_at = float("-inf")  # nobody waits for it any more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._done or not self._dialer.keeps:
            _close((*self._left, *self._begun))
            return
        while self._to_begin and len(self._begun) < _MOST_KEPT:
            self._begin_next()
        alive = []
        for attempt in (*self._left, *self._begun):
            if attempt.socket.connect_ex(attempt.address) in (*_CONNECTED, *_UNDER_WAY):
                alive.append(attempt)
            else:
                attempt.socket.close()
        self._dialer.keep(alive)


def _close(attempts: Iterable[_Attempt]) -> None:
    for attempt in attempts:
        attempt.socket.close()


def _in_order(addresses: Sequence[SocketAddress], last: object) -> list[SocketAddress]:
    """Return addresses, the last good one first, then families in turn (RFC 8305)."""
    ordered = sorted(addresses, key=lambda found: found[4] != last)
    family = ordered[0][0] if ordered else None
    turns = zip_longest(
        (found for found in ordered if found[0] == family), (found for found in ordered if found[0] != family)
    )
    return [found for turn in turns for found in turn if found is not None]
