"""TCP and Unix sockets for threads, with a deadline on every call.

Calls wait in poll, because Python restarts it with the remaining time after each
signal. The kernel's timeout (SO_RCVTIMEO) would save a system call, but each signal
restarts it in full: with one signal every 0.2 s it never expires.
"""

import errno
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

from infinistore.protocol.effects import Span
from infinistore.settings import ADAPTIVE, Spin
from infinistore.transports.sockets.names import Dialer
from infinistore.transports.sockets.raw_sockets import (
    LOOK,
    broken,
    cannot_connect,
    prepare,
    receive_with_descriptors,
    send_at_once,
)
from infinistore.transports.sockets.spin import Spinner

_SEND_BYTES = 2 * 1024 * 1024  # at a time: with 4 MiB, a put of 64 x 64 KiB over TCP took a tenth longer
_NOW = socket.MSG_DONTWAIT
_SEND_TIMEOUT = struct.pack("@ll", 0, 20_000)
"""After 20 ms, a blocking send returns with what it has sent, if anything."""
_LONGEST_POLL_S = 3600.0
_TIMEVAL = struct.Struct("@ll")


class BlockingSocketStream:
    """A connected socket. Calls raise `TimeoutError` at the monotonic `deadline`."""

    def __init__(self, sock: socket.socket, spin_us: Spin = ADAPTIVE) -> None:
        self.socket = sock
        self.deadline = 0.0
        self.silence_s = math.inf
        self.ask: Callable[[], None] | None = None
        """Called after each `silence_s` of a wait; raises if the peer is gone."""
        self._overdue = -1.0  # the last deadline after which something was still there
        self._spinner = Spinner(spin_us)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        # A send by TCP blocks when there is no room for the rest, which saves a tenth
        # of the time of a long put; a signal ends it then. By a Unix socket its timeout
        # would begin anew with every piece of 32 KiB or so.
        self._send_flags = _NOW if sock.family == socket.AF_UNIX else 0
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
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
        while span.remaining:
            self._wait(self._writable)
            try:
                span.advance(self.socket.sendmsg(span.next_views(_SEND_BYTES), (), self._send_flags))
            except BlockingIOError:
                continue
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
            if count is not None:
                return count
            while count is None:
                self._wait(self._readable)
                try:
                    count = (
                        sock.recv_into(views[0], 0, _NOW) if len(views) == 1 else sock.recvmsg_into(views, 0, _NOW)[0]
                    )
                except BlockingIOError:
                    continue
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # our deadline, not the network's ETIMEDOUT
                raise
            raise broken(error) from error
        self._spinner.moved(self)
        return count

    def receive_descriptors(self, views: Sequence[memoryview], descriptors: list[int]) -> int:
        """Do as `receive_into`, and append the descriptors that come with the bytes.
        The caller closes them.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """
        while True:
            self._wait(self._readable)
            try:
                return receive_with_descriptors(self.socket, views, descriptors)
            except BlockingIOError:
                continue
            except OSError as error:
                raise broken(error) from error

    def is_stale(self) -> bool:
        """Whether the peer of an idle connection has closed it, or sent something."""
        try:
            # The usual case: to receive nothing would raise, which takes longer. The
            # number of a closed socket may be another's by now.
            if self.socket.fileno() >= 0 and not self._readable.poll(0):
                return False
            self.socket.recv(1, LOOK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _wait(self, until_ready: select.poll) -> None:
        """Wait until the deadline, or for an hour at most.

        From a peer that is asked, what is there when the time is over counts: this
        process may have waited for a core since it came, and a peer that answers would
        be taken for a silent one. It counts once for each deadline, so that a peer that
        sends bit by bit puts it off no further.
        """
        left_s = self.deadline - time.monotonic()
        while self.ask is not None and left_s > self.silence_s:
            if until_ready.poll(self.silence_s * 1000):
                return
            self.ask()
            left_s = self.deadline - time.monotonic()
        if left_s > 0:
            until_ready.poll(min(left_s, _LONGEST_POLL_S) * 1000)
            return
        counts = self.ask is not None and until_ready is self._readable and self._overdue != self.deadline
        if not (counts and until_ready.poll(0)):
            raise TimeoutError
        self._overdue = self.deadline


def connect_tcp(
    host: str, port: int, deadline: float, *, spin_us: Spin = ADAPTIVE, dialer: Dialer | None = None
) -> BlockingSocketStream:
    """Connect to the first address of the host that answers. With a `dialer`, what was
    begun goes on after the deadline.

    Raises:
        StoreUnavailable: no address answers.
        TimeoutError: the deadline has passed.
    """
    dialer = dialer or Dialer(keeps=False)
    try:
        now = time.monotonic()
        found = dialer.look_up(host, port, now).result(max(0.0, deadline - now))
        with dialer.dial(found, time.monotonic()) as dial:
            while (sock := dial.connected(now := time.monotonic())) is None:
                if now >= deadline:
                    raise TimeoutError
                _wait_for_any(dial.sockets, min(deadline, dial.next_at) - now)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no host can be called
        if isinstance(error, TimeoutError) and error.errno is None:  # our deadline, not the network's ETIMEDOUT
            raise
        raise cannot_connect(f"{host}:{port}", error) from error
    return BlockingSocketStream(sock, spin_us)


def _wait_for_any(sockets: Sequence[socket.socket], within_s: float) -> None:
    writable = select.poll()
    for sock in sockets:
        writable.register(sock, select.POLLOUT)
    writable.poll(min(within_s, _LONGEST_POLL_S) * 1000)


def connect_unix(path: str, deadline: float, *, spin_us: Spin = ADAPTIVE) -> BlockingSocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
        TimeoutError: the deadline has passed.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_connect(path, error) from error
    try:
        _connect_unix(sock, path, deadline)
        return BlockingSocketStream(sock, spin_us)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
            raise cannot_connect(path, error) from error
        raise


def _connect_unix(sock: socket.socket, path: str, deadline: float) -> None:
    while (left_s := deadline - time.monotonic()) > 0:
        # A server that accepts nobody lets connect wait, as long as a send may. Nothing
        # else tells when it accepts.
        microseconds = max(1000, int(min(left_s, _LONGEST_POLL_S) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))
        try:
            sock.connect(path)
            sock.getpeername()
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # it is that after a signal, when Python takes it for connected
                raise
        else:
            return
    raise TimeoutError
