"""A proxy between a client and a server that does harm at a chosen byte of their
conversation.

It runs in a thread of its own, so that a client of any kind can be tested against it,
and it knows nothing of the protocol: a fault strikes when so many bytes have passed in
one direction since it was armed, on whatever connection.
"""

import enum
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import attrs

__all__ = ["Action", "Direction", "Fault", "Proxy", "running_proxy"]

_RESET = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 64 * 1024
_TRICKLED_BYTES = 600
GARBAGE = 0xA5


class Direction(enum.Enum):
    REQUEST = enum.auto()
    REPLY = enum.auto()


class Action(enum.Enum):
    CUT = enum.auto()
    """Reset both connections before this byte passes."""
    END = enum.auto()
    """Close both connections in good order before this byte passes."""
    STALL = enum.auto()
    """Let this byte and what follows wait, for ever; the connections stay open."""
    CORRUPT = enum.auto()
    """Turn the bits of this byte round."""
    DROP = enum.auto()
    """Leave this byte out."""
    REPLACE = enum.auto()
    """Put other bytes in the place of these."""
    GARBAGE = enum.auto()
    """Replace this byte, and all that follow on the same connection."""
    TRICKLE = enum.auto()
    """Let the next bytes pass one by one."""


@attrs.frozen
class Fault:
    """What happens to byte number `offset` of the conversation in one direction. Once,
    unless `forever`.
    """

    action: Action
    direction: Direction
    offset: int
    data: bytes = b""
    forever: bool = False

    def __str__(self) -> str:
        return f"{self.action.name.lower()} at byte {self.offset} of the {self.direction.name.lower()}"


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        self.source = source
        self.target = target
        self.direction = direction
        self.waiting = bytearray()
        """What was read and is still to be written."""
        self.stalled = False
        self.held = bytearray()
        """What was read after the byte at which it stalled."""
        self.garbage = False
        self.trickle = 0
        self.ended = False


class Proxy:
    """Passes connections on to `upstream`, and does to them what `arm` says."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.port = 0
        self.accepted = 0
        """How many connections there have been."""
        self.struck = threading.Event()
        """A fault has struck since the last `arm`."""
        self._fault: Fault | None = None
        self._passed = {Direction.REQUEST: 0, Direction.REPLY: 0}
        self._kept: dict[Direction, bytearray] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Condition(self._lock)
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[socket.socket, tuple[_Pipe, _Pipe]] = {}
        self._listener: socket.socket | None = None
        self._wake_up, self._woken = socket.socketpair()
        self._orders: list[tuple[object, threading.Event]] = []
        self._stopping = False
        self._selector.register(self._woken, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, name="faulty proxy")

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._pipes) // 2

    def wait_for_ends(self, left: int = 0) -> None:
        """Wait until no more connections than these are open: the proxy hears in a
        moment of what was closed.
        """
        with self._closed:
            self._closed.wait_for(lambda: len(self._pipes) // 2 <= left)

    def arm(self, fault: Fault, *, keep: bool = False) -> None:
        """Count bytes from now on, and let this happen. `kept` returns what passes, if
        this is to be kept.
        """
        with self._lock:
            self.struck.clear()
            self._fault = fault
            self._passed = dict.fromkeys(Direction, 0)
            self._kept = {direction: bytearray() for direction in Direction} if keep else None

    def kept(self, direction: Direction) -> bytes:
        """What has come since `arm`."""
        with self._lock:
            assert self._kept is not None, "it was not asked for"
            return bytes(self._kept[direction])

    def disarm(self) -> dict[Direction, int]:
        """Do no harm from now on, and reset connections that are stalled. Returns the
        bytes passed since `arm`.
        """
        with self._lock:
            self._fault = None
            passed = dict(self._passed)
        self._order(self._reset_stalled)
        return passed

    def release(self) -> None:
        """Let what has stalled go on."""
        self._order(self._release_stalled)

    def refuse(self) -> None:
        """Close the listener and every connection: who connects from now on is
        refused.
        """
        self._order(self._close_listener)

    def accept_again(self) -> None:
        """Listen on the same port as before."""
        self._order(self._listen)

    def start(self) -> None:
        self._place = self._bound()  # the port is its own, too, while nobody listens there
        self.port = self._place.getsockname()[1]
        self._listen()
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake_up.send(b".")
        self._thread.join()
        self._close_listener()
        self._place.close()
        self._selector.close()
        self._wake_up.close()
        self._woken.close()

    def _order(self, what: object) -> None:
        """Have the proxy's thread do something, and wait until it is done."""
        done = threading.Event()
        with self._lock:
            self._orders.append((what, done))
        self._wake_up.send(b".")
        assert done.wait(60), "the proxy does not answer"

    def _obey(self, _: int) -> None:
        self._woken.recv(4096)
        with self._lock:
            orders, self._orders = self._orders, []
        for what, done in orders:
            assert callable(what)
            what()
            done.set()

    def _run(self) -> None:
        while not self._stopping:
            for key, mask in self._selector.select():
                key.data(mask)

    def _bound(self) -> socket.socket:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", self.port))
        return bound

    def _listen(self) -> None:
        self._listener = listener = self._bound()
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for client in list(self._pipes):
            self._close(client, reset=True)

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError, ConnectionError):
            client, _address = self._listener.accept()
            self.accepted += 1
            server = socket.socket()
            try:
                server.connect(self.upstream)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                server.close()
                return
            there = _Pipe(client, server, Direction.REQUEST)
            back = _Pipe(server, client, Direction.REPLY)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
            with self._lock:
                self._pipes[client], self._pipes[server] = (there, back), (back, there)
            for sock in (client, server):
                self._selector.register(sock, selectors.EVENT_READ, partial(self._ready, sock))

    def _ready(self, sock: socket.socket, mask: int) -> None:
        if sock not in self._pipes:
            return
        out, into = self._pipes[sock]
        try:
            if mask & selectors.EVENT_WRITE:
                self._write(into)
            if mask & selectors.EVENT_READ and sock in self._pipes:
                self._read(out)
        except OSError:
            self._close(sock, reset=True)
            return
        for end in (out.source, out.target):
            self._watch(end)

    def _watch(self, sock: socket.socket) -> None:
        """Wait for what this socket can do next."""
        if sock not in self._pipes:
            return
        out, into = self._pipes[sock]
        events = 0
        if not (out.stalled or out.waiting or out.ended):
            events |= selectors.EVENT_READ
        if into.waiting:
            events |= selectors.EVENT_WRITE
        try:
            registered = self._selector.get_key(sock).events
        except KeyError:
            registered = 0
        ready = partial(self._ready, sock)
        if events and registered:
            self._selector.modify(sock, events, ready)
        elif events:
            self._selector.register(sock, events, ready)
        elif registered:
            self._selector.unregister(sock)

    def _read(self, pipe: _Pipe) -> None:
        try:
            data = bytearray(pipe.source.recv(_CHUNK_BYTES))
        except BlockingIOError:
            return
        if not data:
            if self._pipes[pipe.source][1].ended or pipe.direction is Direction.REQUEST:
                self._close(pipe.source, reset=False)
                return
            pipe.ended = True
            pipe.target.shutdown(socket.SHUT_WR)
            return
        fault = self._fault_within(pipe.direction, data)
        if pipe.garbage:
            data[:] = bytes([GARBAGE]) * len(data)
        if fault is None:
            pipe.waiting += data
            self._write(pipe)
        else:
            self._strike(*fault, pipe, data)

    def _fault_within(self, direction: Direction, data: bytearray) -> tuple[Fault, int] | None:
        """Count bytes that have come; return the fault that strikes among them, if one
        does, and at which.
        """
        count = len(data)
        with self._lock:
            before = self._passed[direction]
            self._passed[direction] += count
            if self._kept is not None:
                self._kept[direction] += data
            fault = self._fault
            if fault is None or fault.direction is not direction:
                return None
            at = fault.offset - before
            if at >= count and not (fault.action in (Action.CUT, Action.END) and at == count):
                return None
            if at < 0 and not fault.forever:
                return None
            if not fault.forever:
                self._fault = None
            return fault, max(at, 0)

    def _strike(self, fault: Fault, at: int, pipe: _Pipe, data: bytearray) -> None:
        action = fault.action
        if action in (Action.CUT, Action.END):
            pipe.waiting += data[:at]
            self._write(pipe)
            self._close(pipe.source, reset=action is Action.CUT)
        elif action is Action.STALL:
            pipe.stalled = True
            pipe.held += data[at:]
            pipe.waiting += data[:at]
            self._write(pipe)
        else:
            if action is Action.CORRUPT:
                data[at] ^= 0xFF
            elif action is Action.DROP:
                del data[at]
            elif action is Action.REPLACE:
                data[at : at + len(fault.data)] = fault.data[: len(data) - at]
            elif action is Action.GARBAGE:
                pipe.garbage = True
                data[at:] = bytes([GARBAGE]) * (len(data) - at)
            elif action is Action.TRICKLE:
                pipe.trickle = _TRICKLED_BYTES
            pipe.waiting += data
            self._write(pipe)
        self.struck.set()

    def _write(self, pipe: _Pipe) -> None:
        with suppress(BlockingIOError):
            while pipe.waiting:
                length = 1 if pipe.trickle else len(pipe.waiting)
                sent = pipe.target.send(pipe.waiting[:length])
                del pipe.waiting[:sent]
                pipe.trickle = max(0, pipe.trickle - sent)

    def _reset_stalled(self) -> None:
        for client, (out, back) in list(self._pipes.items()):
            if out.stalled or back.stalled:
                self._close(client, reset=True)

    def _release_stalled(self) -> None:
        for client, pipes in list(self._pipes.items()):
            for pipe in pipes:
                pipe.stalled = False
                pipe.waiting += pipe.held
                pipe.held.clear()
            self._ready(client, selectors.EVENT_WRITE)

    def _close(self, sock: socket.socket, *, reset: bool) -> None:
        if sock not in self._pipes:
            return
        pipe = self._pipes[sock][0]
        for end in (pipe.source, pipe.target):
            with suppress(KeyError):
                self._selector.unregister(end)
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()
            with self._lock:  # only now: who sees no connection any more counts no descriptor of it either
                del self._pipes[end]
                self._closed.notify_all()


@contextmanager
def running_proxy(upstream: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy to `upstream`, until the block is left."""
    proxy = Proxy(upstream)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
