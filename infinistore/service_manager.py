"""The service manager that started this process, as systemd does: the sockets that it
gives, what it is told, and the beats of the event loop that it waits for.

It is read from the environment once, by the command line. Without one, nothing is sent,
and no socket is given. See sd_notify(3) and sd_listen_fds(3).
"""

import logging
import os
import socket
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

import trio

from infinistore.errors import ConfigError

__all__ = ["ServiceManager"]

_log = logging.getLogger("infinistore.server")
_FIRST_DESCRIPTOR: Final = 3
_BEAT_S: Final = 10.0
"""Between two messages while it starts and drains, if there is no watchdog."""
_PATIENCE: Final = 4
"""For how many beats a start or a drain may go on after the last one."""


class ServiceManager:
    """Tells a service manager how far a server is. By default there is none.

    `address` is where its datagrams go; `watchdog_s` is how long it waits for a beat
    before it ends the process. `listeners` are the sockets that it listens on for the
    server: streams, TCP or Unix, not blocking.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        watchdog_s: float | None = None,
        listeners: tuple[socket.socket, ...] = (),
    ) -> None:
        self.watchdog_s = watchdog_s
        self.listeners = listeners
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
        given = _number(environment, "LISTEN_FDS")
        environment.pop("LISTEN_FDNAMES", None)
        if _number(environment, "LISTEN_PID") != process:
            given = 0
        return cls(
            address and address.replace("@", "\0", 1),
            watchdog_s=watchdog_us / 1e6 if watchdog_us else None,
            listeners=tuple(_given_listener(_FIRST_DESCRIPTOR + index) for index in range(given)),
        )

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

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.warning("the service manager cannot be told", extra={"what": lines[0], "error": error.strerror})


def _number(environment: MutableMapping[str, str], name: str) -> int:
    """Take a variable out of the environment; 0 if it is not set."""
    written = environment.pop(name, "") or "0"
    if not (written.isascii() and written.isdecimal()):
        raise ConfigError(f"{name}={written}: must be a number; a service manager sets it")
    return int(written)


def _given_listener(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is no socket: {error.strerror}") from None
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not listens or sock.type != socket.SOCK_STREAM or sock.family not in families:
        sock.close()
        raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is no TCP or Unix stream socket that listens")
    sock.setblocking(False)
    return sock
