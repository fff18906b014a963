"""The certificate of a server: loaded at the start, and again without a restart."""

import logging
import signal
import ssl
from typing import TYPE_CHECKING

import trio

from infinistore.errors import ConfigError
from infinistore.transports.base import Stream
from infinistore.transports.tls.contexts import server_context
from infinistore.transports.tls.session import TlsSession
from infinistore.transports.tls.trio_stream import TlsStream

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Certificates"]

_log = logging.getLogger("infinistore.server")


class Certificates:
    """What new connections use. Those that are open keep what they began with."""

    def __init__(self, cert: "Path", key: "Path | None", client_ca: "Path | None") -> None:
        """Raises ConfigError if a file cannot be used."""
        self._files = cert, key, client_ca
        self.context = self._load()
        """What the next connection uses."""

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._files[2] is not None

    def secure(self, stream: Stream) -> TlsStream:
        """Return the server's end of TLS over a stream that was accepted."""
        return TlsStream(stream, TlsSession(self.context, "the client"))

    def reload(self) -> None:
        """Read the files again: all are taken, or none. Blocking, for a moment.

        Raises:
            ConfigError: a file cannot be used; what was loaded before stays.
        """
        self.context = self._load()

    async def reload_on_signal(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reload at each SIGHUP, and log what came of it."""
        with trio.open_signal_receiver(signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                try:
                    self.reload()
                except ConfigError as error:
                    _log.error("the certificate stays as it was", extra={"problem": str(error)})
                else:
                    _log.info("the certificate was loaded again", extra={"file": str(self._files[0])})

    def _load(self) -> ssl.SSLContext:
        cert, key, client_ca = self._files
        return server_context(cert, key, client_ca)
