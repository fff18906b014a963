"""TCP and Unix sockets for threads, with a deadline on every call.

The socket stays in blocking mode, and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): Python's own timeouts
make two system calls where this makes one. The timeout is set again only when it is too long by more than a few
milliseconds, or far too short.
"""

import errno
import math
import select
import socket
import struct
import time
from collections.abc import Sequence

from infinistore.protocol.span import Span
from infinistore.transports.names import NEXT_ADDRESS_AFTER_S, SocketAddress, look_up
from infinistore.transports.sockets import (
    broken,
    cannot_connect,
    looks_stale,
    prepare,
    receive_with_descriptors,
    send_at_once,
)
from infinistore.transports.spin import DEFAULT_SPIN_S, Spinner

__all__ = ["BlockingSocketStream", "connect_tcp", "connect_unix"]

_SEND_BYTES = 2 * 1024 * 1024  # at a time: with 4 MiB, a put of 64 x 64 KiB over TCP took a tenth longer
_NOW = socket.MSG_DONTWAIT
_TIMEOUT_SLACK_S = 0.005
_SHORTER = 8 / 9
"""The kernel's timer wheel rounds long timeouts up, by as much as an eighth: seconds for 30 s. So what it is given is
so much shorter, then the little that is left, and so on. Poll is precise, but costs a system call more each time."""
_LONGEST_POLL_S = 3600.0
_TIMEVAL = struct.Struct("@ll")


class BlockingSocketStream:
    """A connected socket. `deadline` is when calls give up, on `time.monotonic`; they raise `TimeoutError` then."""

    def __init__(self, sock: socket.socket, spin_s: float = DEFAULT_SPIN_S) -> None:
        self.socket = sock
        self.deadline = 0.0
        self._spinner = Spinner(spin_s)
        # A blocking send to a Unix socket begins its timeout anew with every piece of 32 KiB or so, and a reader that
        # takes one now and then would keep it for long. Polling costs it up to 4 % of the throughput.
        self._polls = sock.family == socket.AF_UNIX
        self._timeouts = {socket.SO_RCVTIMEO: math.inf, socket.SO_SNDTIMEO: math.inf}  # a new socket waits for ever
        sock.setblocking(True)
        prepare(sock)

    def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed; some bytes may have been sent.
        """
        views = send_at_once(self.socket, views)
        if views:
            self._send_rest(Span(views))
        self._spinner.moved(self)

    def _send_rest(self, span: Span) -> None:
        flags = _NOW if self._polls else 0
        while span.remaining:
            self._set_timeout(socket.SO_SNDTIMEO)
            try:
                span.advance(self.socket.sendmsg(span.next_views(_SEND_BYTES), (), flags))
            except BlockingIOError:
                # The timeout was over, or there is no room now. If the deadline is over, the next round says so.
                if self._polls:
                    self._wait_for_room()
            except OSError as error:
                raise broken(error) from error

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """
        sock = self.socket
        try:
            count = self._spinner.spin(self, sock, views)
            while count is None:
                self._set_timeout(socket.SO_RCVTIMEO)
                try:
                    count = sock.recv_into(views[0]) if len(views) == 1 else sock.recvmsg_into(views)[0]
                except BlockingIOError:
                    continue
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # our deadline, not the network's ETIMEDOUT
                raise
            raise broken(error) from error
        self._spinner.moved(self)
        return count

    def receive_descriptors(self, views: Sequence[memoryview], descriptors: list[int]) -> int:
        """As `receive_into`, and append the descriptors that come beside the bytes; they are the caller's to close.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """
        while True:
            self._set_timeout(socket.SO_RCVTIMEO)
            try:
                return receive_with_descriptors(self.socket, views, descriptors)
            except BlockingIOError:
                continue
            except OSError as error:
                raise broken(error) from error

    def is_stale(self) -> bool:
        """Whether the peer has closed an idle connection, or said something that nobody asked for."""
        return looks_stale(self.socket)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        poll.poll(min(max(0.0, self.deadline - time.monotonic()), _LONGEST_POLL_S) * 1000)

    def _set_timeout(self, option: int) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if not left_s / 2 <= self._timeouts[option] <= left_s * _SHORTER + _TIMEOUT_SLACK_S:
            self.socket.setsockopt(socket.SOL_SOCKET, option, _timeval(left_s))
            self._timeouts[option] = left_s * _SHORTER


def _timeval(left_s: float) -> bytes:
    """Return a timeout for the kernel that is over before this time is; at least a millisecond, 0 would be for ever."""
    return _TIMEVAL.pack(*divmod(max(1000, int(left_s * _SHORTER * 1e6)), 1_000_000))


def connect_tcp(host: str, port: int, deadline: float, *, spin_s: float = DEFAULT_SPIN_S) -> BlockingSocketStream:
    """Connect to the first address of the host that answers.

    Raises:
        StoreUnavailable: none does.
        TimeoutError: the deadline has passed.
    """
    place = f"{host}:{port}"
    try:
        addresses = look_up(host, port).result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise
    except (OSError, UnicodeError) as error:  # UnicodeError: what no host can be called
        raise cannot_connect(place, error) from error
    refused = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for number, found in enumerate(addresses, 1):
        next_at = deadline if number == len(addresses) else time.monotonic() + NEXT_ADDRESS_AFTER_S
        try:
            return BlockingSocketStream(_connected(found, min(deadline, next_at)), spin_s)
        except OSError as error:
            refused = error
        if time.monotonic() >= deadline:
            raise TimeoutError
    raise cannot_connect(place, refused) from refused


def _connected(found: SocketAddress, deadline: float) -> socket.socket:
    family, kind, protocol, _, address = found
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def connect_unix(path: str, deadline: float, *, spin_s: float = DEFAULT_SPIN_S) -> BlockingSocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
        TimeoutError: the deadline has passed.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_connect(path, error) from error
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            # A server that accepts nobody lets connect wait, as long as a send may.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(left_s))
            sock.connect(path)
        except BlockingIOError:
            continue
        except OSError as error:
            sock.close()
            raise cannot_connect(path, error) from error
        return BlockingSocketStream(sock, spin_s)
    sock.close()
    raise TimeoutError
