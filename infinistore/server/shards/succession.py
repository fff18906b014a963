"""The supervisor of a server with shards gives its place to another one, and the new
one takes it, with the caches of all shards or of none.

The shards have their supervisor keep what they have, as a service manager would
(`infinistore.service_manager`), and end. The supervisor hands that over, and with it
the ownership of the place, which only one of the two can take: the new supervisor once
all its shards are ready to serve, or the old one if the new one has gone or takes too
long. The old one then starts its shards again with what it has kept. Until somebody
has taken the ownership, no shard of the new one changes anything.

The new supervisor connects to a Unix socket of the old one, and asks. Each message is a
line of JSON: the two may be of different releases.
"""

import array
import json
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from infinistore.errors import ConfigError
from infinistore.server.take_over.memory import take_ownership
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.raw_sockets import peer_user
from infinistore.transports.sockets.unix_listener import UnixListener

_log = logging.getLogger("infinistore.server")
STEP_S: Final = 60.0
"""For each message, besides what the old shards need to finish what is under way."""
_DECIDE_FOR_EACH_BYTE_S: Final = 2e-6
"""How much longer the new shards may take for each byte of the states that they read: a
key needs 50 bytes or more, and a third of this on a busy machine."""
_LONGEST_BYTES: Final = 1 << 17
"""Of a message."""
_AT_ONCE: Final = 100
"""Descriptors in one message; the kernel takes 253."""
_RIGHTS_BYTES: Final = socket.CMSG_SPACE(_AT_ONCE * array.array("i").itemsize)


def place_of(unix_socket: Path) -> Path:
    """Return where the supervisor listens whose first shard has this socket."""
    return Path(f"{unix_socket}.shards")


class Keeper:
    """What shards have kept. It goes to the service manager, or to the successor."""

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        self.address = str(folder / "notify")
        self.kept: dict[str, int] | None = None
        """Descriptors by their names, for a successor; None if there is none."""
        self._manager = manager
        self._sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read what the shards send, until cancelled."""
        with self._sock:
            await self._sock.bind(self.address)
            task_status.started()
            while True:
                message, descriptors = await _receive(self._sock)
                try:
                    if self.kept is None:
                        await self._manager.pass_on(message, descriptors)
                    elif message.startswith(b"FDSTORE=1\n"):
                        lines = dict(line.split("=", 1) for line in message.decode().splitlines())
                        self.kept[lines["FDNAME"]] = os.dup(descriptors[0])
                finally:
                    _close(descriptors)


async def _receive(sock: trio.socket.SocketType) -> tuple[bytes, list[int]]:
    """Receive some bytes, and descriptors that belong to the caller."""
    data, ancillary, _, _ = await sock.recvmsg(_LONGEST_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, rights in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(rights[: len(rights) - len(rights) % descriptors.itemsize])
    return data, descriptors.tolist()


class Wire:
    """One end of the connection between two supervisors."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock

    async def send(self, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        line = memoryview(json.dumps(fields).encode() + b"\n")
        line = line[await self._sock.sendmsg([line], rights) :]
        while line:
            line = line[await self._sock.send(line) :]

    async def receive(self, descriptors: list[int] | None = None) -> dict[str, Any]:
        """Receive a message; the descriptors that come with it are added to
        `descriptors`, or thrown away.

        Raises:
            OSError: the connection is over.
            ValueError: the other end is no supervisor.
        """
        line = b""
        while not line.endswith(b"\n"):
            if descriptors is None:
                data = await self._sock.recv(_LONGEST_BYTES)
            else:
                data, more = await _receive(self._sock)
                descriptors += more
            if not data:
                raise ConnectionResetError("the server has closed the connection")
            line += data
            if len(line) > _LONGEST_BYTES:
                raise ValueError("the server sends too much")
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("the server sends something else")
        return fields

    async def is_of_this_user(self) -> bool:
        """Whether the process at the other end is this user's."""
        await trio.lowlevel.checkpoint()
        with socket.socket(fileno=os.dup(self._sock.fileno())) as plain:
            return peer_user(plain) == os.geteuid()

    async def over(self) -> None:
        """Wait until the other end has closed the connection, or gone."""
        try:
            while await self._sock.recv(_LONGEST_BYTES):
                pass
        except OSError:
            return

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sock.close()


async def hand_over(wire: Wire, given: Sequence[tuple[str, int]]) -> None:
    """Send descriptors with their names, some at a time, each time that they are asked
    for.

    Raises:
        OSError: the connection is over.
        ValueError: the other end is no supervisor.
    """
    for first in range(0, len(given), _AT_ONCE):
        part = given[first : first + _AT_ONCE]
        names, left = [name for name, _ in part], len(given) - first - len(part)
        await wire.send([descriptor for _, descriptor in part], names=names, left=left)
        if left:
            await wire.receive()


def decide_s(kept: dict[str, int]) -> float:
    """Return how long a successor may take to read what was kept, and get ready."""
    states = [descriptor for name, descriptor in kept.items() if name.endswith("-state")]
    return STEP_S + _DECIDE_FOR_EACH_BYTE_S * sum(os.fstat(state).st_size for state in states)


@attrs.define
class Succession:
    """What the old supervisor has handed over; `kept` is what its shards have kept."""

    kept: dict[str, int]
    management: list[socket.socket]
    listener: UnixListener
    _ownership: int
    _wire: Wire

    def take(self) -> None:
        """Take the place of the old supervisor, which ends.

        Raises:
            ConfigError: it serves on.
        """
        if not take_ownership(self._ownership):
            raise ConfigError("--take-over: the server did not wait, and has served on; try again")
        with suppress(OSError):  # somebody has removed it
            self.listener.own_path()
        self._wire.close()


async def succeed(unix_socket: Path, shards: int, within_s: float, resources: ExitStack) -> Succession | None:
    """Ask the supervisor of the server on this socket for all that it has; None if no
    server is there. `resources` closes what is not used.

    Raises:
        ConfigError: it refuses, and serves on.
    """
    place = place_of(unix_socket)
    sock = resources.enter_context(trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        await sock.connect(str(place))
    except OSError:
        if await _answers(unix_socket):
            raise ConfigError(
                f"--take-over: the server on {unix_socket} has one process, or is of an older release; stop it, and "
                "start without --take-over"
            ) from None
        _log.warning("no server to take over from; the cache starts empty", extra={"unix_socket": str(unix_socket)})
        return None
    wire = Wire(sock)
    if not await wire.is_of_this_user():
        raise ConfigError(f"--take-over: the server on {unix_socket} belongs to another user")
    names, descriptors = list[str](), list[int]()
    resources.callback(_close, descriptors)
    try:
        with trio.fail_after(within_s):
            left = 1
            while left:
                await wire.send(shards=shards)
                told = await wire.receive(descriptors)
                if refusal := told.get("refusal"):
                    raise ConfigError(f"--take-over: {refusal}")
                names += map(str, told.get("names", ()))
                left = int(told.get("left", 0))
                if not names or len(names) != len(descriptors):
                    raise ConfigError("--take-over: descriptors are missing; raise the limit on them (ulimit -n)")
    except trio.TooSlowError:
        raise ConfigError(f"--take-over: the server did not answer within {within_s:g} s") from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--take-over: {error}; see whether it serves on, and try again") from None
    return _succession(list(zip(names, descriptors, strict=True)), wire, resources)


def _succession(given: Sequence[tuple[str, int]], wire: Wire, resources: ExitStack) -> Succession:
    kept, management = dict[str, int](), list[socket.socket]()
    listener, ownership = None, -1
    for name, descriptor in given:
        if name == "management":
            management.append(resources.enter_context(socket.socket(fileno=os.dup(descriptor))))
        elif name == "listener":
            listener = resources.enter_context(UnixListener(fileno=os.dup(descriptor)))
        elif name == "ownership":
            ownership = descriptor
        else:
            kept[name] = os.dup(descriptor)
    for sock in management:
        sock.setblocking(False)
    if listener is None or ownership < 0:
        raise ConfigError("--take-over: the server is of a release that hands over in another way; restart it")
    return Succession(kept, management, listener, ownership, wire)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


async def _answers(unix_socket: Path) -> bool:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            await sock.connect(str(unix_socket))
        except OSError:
            return False
        return True
