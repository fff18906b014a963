"""The certificate of a server: loaded at the start, and again without a restart."""

import logging
import ssl

from infinistore.access.audit import Audit
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError
from infinistore.transports.base import Stream
from infinistore.transports.tls.session import TlsSession, client_context, server_context, trust
from infinistore.transports.tls.trio_stream import TlsStream

_log = logging.getLogger("infinistore.server")


class Certificates:
    """What new connections use. Those that are open keep what they began with."""

    def __init__(self, config: ServerConfig, audit: Audit | None = None) -> None:
        """`audit` hears of each time that the files are read again.

        Raises:
            ConfigError: a file cannot be used.
        """
        assert config.tls_cert is not None
        self._audit = audit or Audit()
        self._files = config.tls_cert, config.tls_key, config.tls_client_ca
        self._peer_ca = config.tls_peer_ca
        self.context, self._management = self._load()
        # A file that cannot be used is known at once. Most servers ask no others.
        self._peers = None if self._peer_ca is None else self._load_peers()

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return self._files[2] is not None

    def secure(self, stream: Stream) -> TlsStream:
        """Return the server's end of TLS over a stream that was accepted."""
        return TlsStream(stream, TlsSession(self.context, "the client"))

    def secure_management(self, stream: Stream) -> TlsStream:
        """Return the same for the management API, without a client's certificate."""
        return TlsStream(stream, TlsSession(self._management, "the client"))

    def connect_to_self(self, stream: Stream) -> TlsStream:
        """Return a client's end over a connection to this server, unverified."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's authorities, which take a while
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return TlsStream(stream, TlsSession(context, "this server", host_name="localhost"))

    def peer_context(self) -> ssl.SSLContext:
        """Return what new connections to other nodes of a cluster use: they show the
        server's certificate, and trust the authorities of the system, those that vouch
        for clients, and those that are given for nodes.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self._peers is None:
            self._peers = self._load_peers()
        return self._peers

    def _load_peers(self) -> ssl.SSLContext:
        cert, key, client_ca = self._files
        context = client_context(cert=cert, key=key)
        for flag, file in (("--tls-client-ca", client_ca), ("--tls-peer-ca", self._peer_ca)):
            if file is not None:
                trust(context, file, flag)
        return context

    def reload(self) -> None:
        """Read the files again: all are taken, or none. Blocking, for a moment.

        Raises:
            ConfigError: a file cannot be used; what was loaded before stays.
        """
        loaded = self._load()
        self._peers = None if self._peers is None else self._load_peers()
        self.context, self._management = loaded

    async def reload_and_log(self) -> str:
        """Reload, log and note what came of it; return the problem, if there is one."""
        file = str(self._files[0])
        try:
            self.reload()
        except ConfigError as error:
            _log.error("the certificate stays as it was", extra={"problem": str(error)})
            self._audit.note("reload", ok=False, certificate=file, problem=str(error))
            return str(error)
        self._audit.note("reload", ok=True, certificate=file)
        _log.info("the certificate was loaded again", extra={"file": file})
        return ""

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        cert, key, client_ca = self._files
        return server_context(cert, key, client_ca), server_context(cert, key)
