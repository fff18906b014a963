"""TCP and Unix sockets for threads, with a deadline on every call.

The socket stays in blocking mode, and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): Python's own timeouts make two
system calls where this makes one. The timeout is set again only when it is off by more than a few milliseconds.
"""

import socket
import struct
import time
from collections.abc import Sequence

from infinistore.errors import StoreUnavailable
from infinistore.protocol.span import Span
from infinistore.transports.sockets import broken, reason

__all__ = ["BlockingSocketStream", "connect_tcp", "connect_unix"]

_SEND_BYTES = 4 * 1024 * 1024
_TIMEOUT_SLACK_S = 0.005
_TIMEVAL = struct.Struct("@ll")


class BlockingSocketStream:
    """A connected socket. `deadline` is when calls give up, on `time.monotonic`; they raise `TimeoutError` then."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.deadline = 0.0
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed; some bytes may have been sent.
        """
        span = Span(views)
        while span.remaining:
            self._set_timeout(socket.SO_SNDTIMEO)
            try:
                span.advance(self.socket.sendmsg(span.next_views(_SEND_BYTES)))
            except BlockingIOError:
                continue  # the timeout was over; if the deadline is, the next round says so
            except OSError as error:
                raise broken(error) from error

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """
        while True:
            self._set_timeout(socket.SO_RCVTIMEO)
            try:
                return self.socket.recv_into(views[0]) if len(views) == 1 else self.socket.recvmsg_into(views)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise broken(error) from error

    def is_stale(self) -> bool:
        """Whether the peer has closed an idle connection, or said something that nobody asked for."""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _set_timeout(self, option: int) -> None:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if abs(left_s - self._timeouts[option]) > _TIMEOUT_SLACK_S:
            micros = max(1000, int(left_s * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))
            self._timeouts[option] = left_s


def connect_tcp(host: str, port: int, deadline: float) -> BlockingSocketStream:
    """Connect to the first address of the host that answers.

    Raises:
        StoreUnavailable: none does.
        TimeoutError: the deadline has passed.
    """
    try:
        sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
    except TimeoutError:
        raise
    except OSError as error:
        raise StoreUnavailable(
            f"cannot connect to {host}:{port}: {reason(error)}; is the server running there?"
        ) from error
    return BlockingSocketStream(sock)


def connect_unix(path: str) -> BlockingSocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise StoreUnavailable(f"cannot connect to {path}: {reason(error)}; is the server running there?") from error
    return BlockingSocketStream(sock)
