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

import json
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.host import raise_descriptor_limit
from infinistore.server.shards.shard import MOST_KEPT
from infinistore.server.take_over.memory import take_ownership
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.raw_sockets import peer_user, receive_with_descriptors
from infinistore.transports.sockets.trio_streams import SocketStream, connect_unix
from infinistore.transports.sockets.unix_listener import UnixListener

_log = logging.getLogger("infinistore.server")
STEP_S: Final = 60.0
"""For each message, besides what the old shards need to finish what is under way."""
_DECIDE_FOR_EACH_BYTE_S: Final = 2e-6
"""How much longer the new shards may take for each byte of the states that they read: a
key needs 50 bytes or more, and a third of this on a busy machine."""
_LONGEST_BYTES: Final = 1 << 17
"""Of a message."""
_OWN_DESCRIPTORS: Final = 200
"""What a supervisor needs besides those that are kept."""
_AT_ONCE: Final = 100
"""Descriptors in one message; the kernel takes 253."""


def place_of(unix_socket: Path) -> Path:
    """Return where the supervisor listens whose first shard has this socket."""
    return Path(f"{unix_socket}.shards")


def make_room(shards: int) -> int:
    """Raise the limit of descriptors, and return how many each of so many shards may
    have kept: a supervisor has them twice, as they came and as they go to the shards.
    """
    wanted = 2 * shards * MOST_KEPT
    return min((raise_descriptor_limit(wanted + _OWN_DESCRIPTORS) - _OWN_DESCRIPTORS) // (2 * shards), MOST_KEPT)


class Keeper:
    """What shards have kept. It goes to the service manager, or to the successor."""

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        self.address = str(folder / "notify")
        self.kept: dict[str, int] | None = None
        """Descriptors by their names, for a successor; None if there is none."""
        self._manager = manager

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read what the shards send, until cancelled."""
        room = memoryview(bytearray(_LONGEST_BYTES))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.bind(self.address)
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(sock)
                descriptors: list[int] = []
                try:
                    message = bytes(room[: receive_with_descriptors(sock, [room], descriptors)])
                    if self.kept is None:
                        await self._manager.pass_on(message, descriptors)
                    elif message.startswith(b"FDSTORE=1\n"):
                        lines = dict(line.split("=", 1) for line in message.decode().splitlines())
                        self.kept[lines["FDNAME"]] = os.dup(descriptors[0])
                except OSError:  # nothing came, or there is no descriptor for it: then it is missing at the end
                    continue
                finally:
                    close_all(descriptors)


class Wire:
    """One end of the connection between two supervisors."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream

    async def send(self, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send a message, with descriptors.

        Raises:
            StoreUnavailable: the connection is over.
        """
        line = memoryview(json.dumps(fields).encode() + b"\n")
        await self._stream.send_descriptors([line], descriptors)

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Receive a message, and descriptors that belong to the caller.

        Raises:
            StoreUnavailable: the connection is over, or it is no supervisor that talks.
        """
        line, room, descriptors = b"", memoryview(bytearray(_LONGEST_BYTES)), list[int]()
        try:
            while not line.endswith(b"\n"):
                count = await self._stream.receive_descriptors([room[len(line) :]], descriptors)
                if not count:
                    raise StoreUnavailable("the other server has closed the connection")
                line = bytes(room[: len(line) + count])
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("no object")
        except ValueError as error:
            close_all(descriptors)
            raise StoreUnavailable(f"what the other server says cannot be read: {error}") from None
        except BaseException:
            close_all(descriptors)
            raise
        return fields, descriptors

    @property
    def is_of_this_user(self) -> bool:
        """Whether the process at the other end is this user's."""
        return peer_user(self._stream.socket) == os.geteuid()

    async def over(self) -> None:
        """Wait until the other end has closed the connection, or gone."""
        with suppress(StoreUnavailable):
            while await self._stream.receive_into([memoryview(bytearray(1))]):
                pass

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._stream.close()


async def hand_over(wire: Wire, given: Sequence[tuple[str, int]]) -> None:
    """Send descriptors with their names, some at a time, each time that they are asked
    for.

    Raises:
        StoreUnavailable: the connection is over.
    """
    for first in range(0, len(given), _AT_ONCE):
        part = given[first : first + _AT_ONCE]
        names, left = [name for name, _ in part], len(given) - first - len(part)
        await wire.send([descriptor for _, descriptor in part], names=names, left=left)
        if left:
            close_all((await wire.receive())[1])


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
    try:
        stream = await connect_unix(str(place_of(unix_socket)))
    except StoreUnavailable:
        if await _answers(unix_socket):
            raise ConfigError(
                f"--take-over: the server on {unix_socket} has one process, or is of an older release; stop it, and "
                "start without --take-over"
            ) from None
        _log.warning("no server to take over from; the cache starts empty", extra={"unix_socket": str(unix_socket)})
        return None
    wire = Wire(stream)
    resources.callback(wire.close)
    if not wire.is_of_this_user:
        raise ConfigError(f"--take-over: the server on {unix_socket} belongs to another user")
    make_room(shards)
    names, descriptors = list[str](), list[int]()
    resources.callback(close_all, descriptors)
    try:
        with trio.fail_after(within_s):
            left = 1
            while left:
                await wire.send(shards=shards)
                told, more = await wire.receive()
                descriptors += more
                names += told.get("names", ())
                if refusal := told.get("refusal"):
                    raise ConfigError(f"--take-over: {refusal}")
                if not more or len(names) != len(descriptors):
                    raise ConfigError("--take-over: descriptors are missing; raise the limit on them (ulimit -n)")
                left = told.get("left", 0)
    except trio.TooSlowError:
        raise ConfigError(f"--take-over: the server did not answer within {within_s:g} s") from None
    except StoreUnavailable as error:
        raise ConfigError(f"--take-over: {error}; see whether it serves on, and try again") from None
    return _succession(zip(names, descriptors, strict=True), wire, resources)


def _succession(given: Iterable[tuple[str, int]], wire: Wire, resources: ExitStack) -> Succession:
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


def close_all(descriptors: Iterable[int]) -> None:
    """Close these descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


async def _answers(unix_socket: Path) -> bool:
    try:
        (await connect_unix(str(unix_socket))).close()
    except StoreUnavailable:
        return False
    return True
