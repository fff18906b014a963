"""The service manager that started this process, as systemd does: the sockets that it
gives, what it is told, the beats of the event loop that it waits for, and the
descriptors that it keeps from one run of the service to the next.

It is read from the environment once, by the command line. Without one, nothing is sent,
and no socket is given. See sd_notify(3), sd_listen_fds(3) and FileDescriptorStoreMax=
in systemd.service(5).
"""

import logging
import os
import select
import socket
import time
from array import array
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Final

import trio

from infinistore.errors import ConfigError

_log = logging.getLogger("infinistore.server")
FIRST_DESCRIPTOR: Final = 3
_BEAT_S: Final = 10.0
"""Between two messages while it starts and drains, if there is no watchdog."""
_PATIENCE: Final = 4
"""For how many beats a start or a drain may go on after the last one."""
_KEPT: Final = "infinistore-"
"""How the names of kept descriptors begin. Those of sockets that it listens on are the
names of units, which end with .socket."""
ANSWER_S: Final = 20.0
"""How long the service manager may take to read what it is sent."""


class ServiceManager:
    """Tells a service manager how far a server is. By default there is none.

    `address` is where its datagrams go; `watchdog_s` is how long it waits for a beat
    before it ends the process. `listeners` are the sockets that it listens on for the
    server: streams, TCP or Unix, not blocking. `most_kept` is how many descriptors it
    keeps at most, and `kept` are those that it has kept, by their names. They belong to
    this object until somebody takes them out.

    `part` is for one of several processes of a service: it tells nothing, and what it
    has kept has names that begin so. Such a process is told how much it may have kept
    when all of them end: of what is kept by one that ends alone, its next process would
    know nothing, and that of another run would believe it.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        watchdog_s: float | None = None,
        listeners: tuple[socket.socket, ...] = (),
        most_kept: int = 0,
        kept: Mapping[str, int] | None = None,
        part: str = "",
    ) -> None:
        self.watchdog_s = watchdog_s
        self.listeners = listeners
        self.most_kept = most_kept if address is not None else 0
        self.kept = dict(kept or {})
        self._names = list(self.kept)  # of what it still has
        self._part = part
        self._address = address
        self._serving = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str], process: int) -> "ServiceManager":
        """Take what is meant for this process out of the environment, so that no child
        takes it for its own. The given sockets now belong to the result.

        Raises:
            ConfigError: a variable or a socket is not what a service manager gives.
        """
        address = environment.pop("NOTIFY_SOCKET", "") or None
        if address is not None and address[0] not in "/@":
            raise ConfigError(f"NOTIFY_SOCKET={address}: must be a path, or a name that begins with @")
        watchdog_us = _number(environment, "WATCHDOG_USEC")
        if _number(environment, "WATCHDOG_PID") not in (0, process):
            watchdog_us = 0
        most_kept = _number(environment, "FDSTORE")
        given = _number(environment, "LISTEN_FDS")
        names = environment.pop("LISTEN_FDNAMES", "").split(":")
        if _number(environment, "LISTEN_PID") != process:
            given = 0
        kept: dict[str, int] = {}
        listeners: list[socket.socket] = []
        for index in range(given):
            descriptor = FIRST_DESCRIPTOR + index
            if len(names) == given and names[index].startswith(_KEPT) and not names[index].endswith(".socket"):
                kept[names[index]] = _given_descriptor(descriptor)
            else:
                listeners.append(_given_listener(descriptor))
        return cls(
            address and address.replace("@", "\0", 1),
            watchdog_s=watchdog_us / 1e6 if watchdog_us else None,
            listeners=tuple(listeners),
            most_kept=most_kept,
            kept=kept,
        )

    @property
    def may_keep(self) -> bool:
        """Whether there is somebody who may keep something, now or later."""
        return self._address is not None and (self.most_kept > 0 or bool(self._part))

    def of_part(self, name: str, address: str) -> "ServiceManager":
        """Return what one of several processes of the service is given; it sends
        what it has to say to `address`. What was kept for it now belongs to the result.
        """
        part = f"{name}-"
        kept = {name: self.kept.pop(name) for name in [*self.kept] if name.startswith(_KEPT + part)}
        self._names = list(self.kept)
        return ServiceManager(address, kept=kept, part=part)

    def add(self, kept: Mapping[str, int]) -> None:
        """Take what somebody else has kept, which belongs to this object now."""
        self.kept.update(kept)

    def close(self) -> None:
        """Close what is kept: another process has it now."""
        while self.kept:
            os.close(self.kept.popitem()[1])

    async def pass_on(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Send what another process of the service says."""
        if self._address is None:
            await trio.lowlevel.checkpoint()
            return
        try:
            with trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                await sock.connect(self._address)
                await sock.sendmsg([message], _rights(descriptors))
        except OSError as error:
            what = message.split(b"\n", 1)[0].decode(errors="replace")
            _log.warning("the service manager cannot be told", extra={"what": what, "error": error.strerror})

    def ready(self) -> None:
        """The server serves."""
        self._serving = True
        self._send("READY=1", "STATUS=serving")

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """The server reads its files again, within the block."""
        if self._serving:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        yield
        if self._serving:
            self.ready()

    def stopping(self) -> None:
        """The server drains."""
        self._serving = False
        self._send("STOPPING=1", "STATUS=draining")

    async def beat(self) -> None:
        """Tell again and again that the event loop runs, until cancelled.

        While the server starts or drains, each beat asks for more time, so that a large
        pool or a slow disk is not a fault, and a loop that hangs is one.
        """
        if self._address is None:
            return
        pause_s = self.watchdog_s / 2 if self.watchdog_s else _BEAT_S
        while True:
            lines = ["WATCHDOG=1"] if self.watchdog_s else []
            if not self._serving:
                lines.append(f"EXTEND_TIMEOUT_USEC={round(_PATIENCE * pause_s * 1e6)}")
            if lines:
                self._send(*lines)
            await trio.sleep(pause_s)

    def keep(self, descriptors: Sequence[tuple[str, int]]) -> None:
        """Have these descriptors kept for the next run of the service, the last of them
        last, under names that no other has. Blocking.

        Raises:
            OSError: they are not, or not all of them.
        """
        for name, descriptor in descriptors:
            self._send_now(["FDSTORE=1", f"FDNAME={self._name_of(name)}", "FDPOLL=0"], descriptor)
        self._wait()

    def look_at(self, name: str) -> int | None:
        """Return a kept descriptor; None if there is none of this name."""
        return self.kept.get(self._name_of(name))

    def take(self, name: str) -> int | None:
        """Take a kept descriptor; None if there is none of this name."""
        return self.kept.pop(self._name_of(name), None)

    def forget(self, which: str = "") -> None:
        """Close what is kept, and have it kept no longer: what has a name that begins
        with `which`, and was taken out or not. Blocking.
        """
        gone = [name for name in self._names if name.startswith(self._name_of(which))]
        for name in gone:
            self._names.remove(name)
            if name in self.kept:
                os.close(self.kept.pop(name))
        try:
            for name in gone:
                self._send_now(["FDSTOREREMOVE=1", f"FDNAME={name}"])
            if gone:
                self._wait()
        except OSError as error:
            _log.warning("the service manager cannot be told", extra={"what": "FDSTOREREMOVE=1", "error": str(error)})

    def _name_of(self, name: str) -> str:
        return f"{_KEPT}{self._part}{name}"

    def _send_now(self, lines: Sequence[str], *descriptors: int) -> None:
        """Send a message, and wait for room for it."""
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(ANSWER_S)
            sock.sendmsg(["\n".join(lines).encode()], _rights(descriptors), 0, self._address)

    def _wait(self) -> None:
        """Wait until the service manager has read all that it was sent: it then closes
        the pipe that comes with the last message."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self._send_now(["BARRIER=1"], writer)
            finally:
                os.close(writer)
            poll = select.poll()
            poll.register(reader, 0)
            if self._address is not None and not poll.poll(ANSWER_S * 1000):
                raise TimeoutError("it does not answer")
        finally:
            os.close(reader)

    def _send(self, *lines: str) -> None:
        if self._address is None or self._part:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.warning("the service manager cannot be told", extra={"what": lines[0], "error": error.strerror})


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, "array[int]"]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []


def _number(environment: MutableMapping[str, str], name: str) -> int:
    """Take a variable out of the environment; 0 if it is not set."""
    written = environment.pop(name, "") or "0"
    if not (written.isascii() and written.isdecimal()):
        raise ConfigError(f"{name}={written}: must be a number; a service manager sets it")
    return int(written)


def _given_descriptor(descriptor: int) -> int:
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is not there: {error.strerror}") from None
    return descriptor


def _given_listener(descriptor: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=_given_descriptor(descriptor))
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is no socket: {error.strerror}") from None
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not listens or sock.type != socket.SOCK_STREAM or sock.family not in families:
        sock.close()
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is no TCP or Unix stream socket that listens")
    sock.setblocking(False)
    return sock
