"""Who may talk to a server: what a connection proves of who is at its other end, the
tenants, the audit log, and what SIGHUP reads again without a restart.

The audit log is lines of JSON in a file, and for the logger `infinistore.audit`, if an
application has given it handlers. No request waits for it, or fails because of it.
Lines wait in memory for a thread that writes them; what finds no place there, or on the
disk, is counted, and the count is written when there is room again. SIGHUP opens the
file anew, for programs that rotate logs, or because the old one hangs.
"""

import json
import logging
import os
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import trio

from infinistore.access.audit import Audit, Fields
from infinistore.access.identity import Credentials, Identity, UnixAccess
from infinistore.access.policy import OneTenant, Policy, TenantPolicy
from infinistore.access.tenants import Tenants
from infinistore.access.tenants_file import parse_tenants
from infinistore.addresses import with_port
from infinistore.config import ServerConfig
from infinistore.errors import AuthenticationFailed, ConfigError
from infinistore.host import NO_THREAD
from infinistore.secret_files import read_text, read_token
from infinistore.service_manager import ServiceManager
from infinistore.tenant_limits import TenantLimits
from infinistore.transports.base import Stream

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates
    from infinistore.transports.tls.trio_stream import TlsStream


_log = logging.getLogger("infinistore.server")

Reload: TypeAlias = Callable[[], Awaitable[str]]
"""Reads files again, and logs what came of it. If a file cannot be used, what was read
before stays, and the problem is returned; else it is empty.
"""


class Reloads:
    """All that a server reads again, in the order in which it was added."""

    def __init__(self) -> None:
        self._all: list[Reload] = []

    def add(self, reload: Reload) -> None:
        """Let this be read again, too, from the next time on."""
        self._all.append(reload)

    @property
    def empty(self) -> bool:
        """Whether there is nothing."""
        return not self._all

    async def run(self) -> list[str]:
        """Read everything again, whatever fails, and return the problems."""
        if not self._all:
            _log.info("there is nothing to read again")
        return [problem for reload in list(self._all) if (problem := await reload())]


async def reload_on_signal(
    reloads: Reloads,
    service_manager: ServiceManager | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Read everything again at each SIGHUP, until cancelled. `service_manager` is told.

    Also a server that has nothing to read takes the signal: it would end of it.
    """
    manager = service_manager or ServiceManager()
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            with manager.reloading():
                await reloads.run()


AUDIT_LOGGER: Final = logging.getLogger("infinistore.audit")
"""It passes nothing on to the log of the server: events have their own handlers."""
AUDIT_LOGGER.propagate = False
AUDIT_LOGGER.setLevel(logging.INFO)
_MOST_LINES: Final = 10_000
_SUM_UP_AFTER_S: Final = 10.0
_SLOWEST_WRITE_S: Final = 5.0
_MOST_HANGING: Final = 2
_STDERR: Final = 2


class AuditLog(Audit):
    """Writes the events of one server, while `run` runs. `path` is a file, `-` for
    standard error, or None for handlers of the logger alone.
    """

    def __init__(self, path: str | None, now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the file cannot be opened."""
        super().__init__(self._take, time.monotonic)
        self._path = path
        self._now = now
        self._lines: deque[bytes] = deque()
        self.lost = 0
        self._warned = False
        self._something = trio.Event()
        self._suppressed = trio.Event()
        self._file: _File | None = None
        self._earlier: list[_File] = []
        """Those that were open before, and to which a thread still writes."""
        if path is not None:
            try:
                self._file = _File(_open(path))
            except OSError as error:
                raise ConfigError(f"--audit-log {path}: {error.strerror}; give a file that can be written") from None

    @property
    def threads(self) -> int:
        """How many threads write: at most one to each file that was opened."""
        files = self._earlier if self._file is None else [*self._earlier, self._file]
        return sum(file.writer.borrowed_tokens for file in files)

    @property
    def path(self) -> str | None:
        """Where lines are written."""
        return self._path

    async def run(self) -> None:
        """Write what is noted, until cancelled; then what is left, for a moment."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sum_up_now_and_then)
                while True:
                    await self._something.wait()
                    self._something = trio.Event()
                    await self._write_lines()
        finally:
            self.sum_up()
            await self._write_lines()
            self._close()

    @property
    def listens(self) -> bool:
        """Whether there is a file, or a handler of the logger."""
        return self._path is not None or bool(AUDIT_LOGGER.handlers)

    async def reopen(self) -> str:
        """Open a renamed file again, or keep the open one; return the problem."""
        if self._path is None or self._file is None:
            return ""
        try:
            new = _open(self._path)
        except OSError as error:
            problem = f"--audit-log {self._path}: {error.strerror}"
            _log.error("the audit log stays as it was", extra={"problem": problem})
            return problem
        old, self._file = self._file, _File(new, self._file.torn)
        self._earlier = [file for file in (*self._earlier, old) if file.writer.borrowed_tokens]
        old.close()
        return ""

    def _take(self, fields: Fields) -> None:
        if AUDIT_LOGGER.handlers:
            AUDIT_LOGGER.info(fields["event"], extra={"audit": dict(fields)})
        if self._path is None:
            return
        if len(self._lines) >= _MOST_LINES:
            self.lost += 1
            return
        time_ = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        self._lines.append(json.dumps({"time": time_, **fields}, default=str).encode() + b"\n")
        self._something.set()

    def _left_out(self) -> None:
        self._suppressed.set()

    async def _sum_up_now_and_then(self) -> None:
        while True:
            await self._suppressed.wait()
            await trio.sleep(_SUM_UP_AFTER_S)
            self._suppressed = trio.Event()
            self.sum_up()

    async def _write_lines(self) -> None:
        while self._lines and (file := self._file) is not None:
            lines, self._lines = self._lines, deque()
            lost = self.lost
            if lost:
                lines.appendleft(json.dumps({"event": "lost", "count": lost}).encode() + b"\n")
            waiting = len(lines)
            try:
                if file.writer.borrowed_tokens:
                    raise OSError("an earlier line is still being written")
                if self.threads >= _MOST_HANGING:
                    raise OSError("too many files hang that were open before this one")
                descriptor = os.dup(file.descriptor)
                # Even at the end: what is being written comes before what is left.
                with trio.CancelScope(deadline=trio.current_time() + _SLOWEST_WRITE_S, shield=True) as scope:
                    await trio.to_thread.run_sync(
                        file.write_all, descriptor, lines, abandon_on_cancel=True, limiter=file.writer
                    )
                if scope.cancelled_caught:
                    raise OSError("it takes too long")
            except (OSError, *NO_THREAD) as error:
                told = lost if len(lines) < waiting else 0
                self.lost += len(lines) - bool(lost and not told) - told
                if not self._warned:
                    self._warned = True
                    _log.warning("the audit log cannot be written", extra={"problem": str(error)})
                return
            self.lost -= lost
            self._warned = False

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


class _File:
    """A file that was opened. `torn` says that it ends in a part of a line."""

    def __init__(self, descriptor: int, torn: bool = False) -> None:
        self.descriptor = descriptor
        self.torn = torn
        self.writer = trio.CapacityLimiter(1)
        """The one thread that writes: one that hangs holds up no other file."""

    def write_all(self, descriptor: int, lines: deque[bytes]) -> None:
        """Write lines, and take each from the deque that was written whole. Closes
        `descriptor`, which is another one of this file. Runs in a thread.
        """
        try:
            while lines:
                line = b"\n" + lines[0] if self.torn else lines[0]
                done = os.write(descriptor, line)
                self.torn = done < len(line) and (done > 0 or self.torn)
                if done == len(line):
                    lines.popleft()
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close it here; a thread that writes goes on."""
        if self.descriptor > _STDERR:
            os.close(self.descriptor)


def _open(path: str) -> int:
    if path == "-":
        return _STDERR
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


ORIGIN: Final = "infinistore.origin"
"""Where a request to the management API comes from, in its ASGI scope."""
PRIVATE: Final = "infinistore.private"
"""Whether nobody on the way reads that request; there, too."""
_PEER: Final = struct.Struct("iII")
_SO_PEERGROUPS: Final = 59  # since Linux 4.13; the module socket has no name for it
_MOST_GROUPS_BYTES: Final = 1024  # all that getsockopt takes
_NOBODY: Final = 65534
"""Whom the kernel shows for a user that this process's namespace does not have."""


def present(stream: Stream, token: str) -> Credentials:
    """Return what a connection presents whose handshake is done."""
    if hasattr(stream, "session"):
        found = cast("TlsStream", stream).session.peer_certificate() or {}
        names = tuple(_written(kind, name) for kind, name in found.get("subjectAltName", ()))
        return Credentials(token, names, private=True)
    user = _user_of(stream)
    return Credentials(token, uid=None if user is None else user[0], private=is_private(stream))


def is_private(stream: Stream) -> bool:
    """Whether nobody on the way reads a connection: it has TLS, or is a Unix socket."""
    return hasattr(stream, "session") or stream.passes_descriptors


def origin_of(stream: Stream) -> str:
    """Return the address of a connection, or its user and process on this machine."""
    user = _user_of(stream)
    if user is not None:
        return f"uid {user[0]}, pid {user[1]}"
    try:
        host, port = _socket_of(stream).getpeername()[:2]
    except (OSError, ValueError, AttributeError, TypeError):  # it has gone, or there is no socket
        return "unknown"
    return with_port(host, port)


def check_unix_peer(stream: Stream, access: UnixAccess) -> None:
    """Refuse who has connected to a Unix socket and may not: its mode may have been
    changed since the server began to listen. Other streams are let through.

    What counts is who connected, not who holds the connection by now.

    Raises:
        AuthenticationFailed: this one may not.
    """
    if not stream.passes_descriptors:
        return
    peer = _peer_of(stream)
    if peer is None:
        raise AuthenticationFailed("the kernel does not say who has connected to this Unix socket; connect by TCP")
    _, uid, gid = peer
    groups = array("I")
    with suppress(OSError):  # an old kernel, or more groups than these: the first one counts
        groups.frombytes(_socket_of(stream).getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES))
    access.check(uid, {gid, *groups})


def _user_of(stream: Stream) -> tuple[int, int] | None:
    """Return the user and the process at the other end of a Unix socket."""
    peer = _peer_of(stream) if stream.passes_descriptors else None
    return None if peer is None or peer[1] == _NOBODY else (peer[1], peer[0])


def _peer_of(stream: Stream) -> tuple[int, int, int] | None:
    """Return the process, the user and the group that have connected."""
    try:
        data = _socket_of(stream).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except (OSError, AttributeError):
        return None
    pid, uid, gid = _PEER.unpack(data)
    return pid, uid, gid


def _socket_of(stream: Stream) -> socket.socket:
    found: socket.socket = stream.socket  # type: ignore[attr-defined]  # simulated streams have none
    return found


def _written(kind: str, name: str) -> str:
    return f"DNS:{name.lower()}" if kind == "DNS" else f"{kind}:{name}"


class Renewable(Protocol):
    """What belongs to a tenant and ends with its proof: a session."""

    @property
    def identity(self) -> Identity:
        """Whose it is."""

    def renew(self, identity: Identity | None) -> None:
        """Go on as this, or end."""


class HasTenants(Protocol):
    """A server, as far as this is about it."""

    @property
    def sessions(self) -> Iterable[Renewable]:
        """Those that are open."""

    async def apply_limits(self, limits: list[TenantLimits]) -> None:
        """Let these limits hold.

        Raises:
            ConfigError: they cannot. Nothing has changed.
        """


def _load_tenants(config: "ServerConfig") -> Tenants:
    """Read the tenants file of a configuration. Blocking.

    Raises:
        ConfigError: it cannot be used, or not with these settings.
    """
    assert config.tenants is not None
    tenants = parse_tenants(read_text(config.tenants), str(config.tenants))
    if tenants.by_certificate and config.tls_client_ca is None:
        raise ConfigError(f"{config.tenants}: `certificates:` needs --tls-client-ca FILE, or nobody vouches for them")
    if tenants.by_uid and config.unix_socket == "off":
        raise ConfigError(f"{config.tenants}: `uids:` needs --unix-socket, which is off")
    if tenants.demanding and config.tls_cert is None and config.unix_socket == "off":
        raise ConfigError(
            f"{config.tenants}: `require_tls:` needs --tls-cert FILE, or --unix-socket; else these tenants cannot come"
        )
    return tenants


class TenantsReload:
    """Reads the tenants file again: all of it holds from then on, or nothing of it.

    Sessions whose proof is in it no more end, those of a tenant that has another trust
    group as well, and all others notice nothing.
    """

    def __init__(
        self,
        config: "ServerConfig",
        policy: TenantPolicy,
        server: HasTenants | None = None,
        *,
        load: "Callable[[ServerConfig], Tenants]" = _load_tenants,
        run_in_thread: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        """`load` reads the file in `run_in_thread`, by default a thread of Trio's."""
        self._config = config
        self._policy = policy
        self._server = server
        self._load = load
        self._run_in_thread = run_in_thread or trio.to_thread.run_sync
        self._turn = trio.Lock()  # so that what was read last holds

    async def reload_and_log(self) -> str:
        """Reload, and log what came of it; return the problem, if there is one."""
        async with self._turn:
            try:
                tenants: Tenants = await self._run_in_thread(self._load, self._config)
                if self._server is not None:
                    await self._server.apply_limits(tenants.limits)
            except (ConfigError, *NO_THREAD) as error:
                _log.error("the tenants stay as they were", extra={"problem": str(error)})
                self._policy.audit.note("reload", ok=False, problem=str(error))
                return str(error)
            changes = self._policy.replace(tenants)
            ended = 0 if self._server is None else self._renew(self._server.sessions)
        names = {"added": changes.added, "removed": changes.removed, "changed": changes.changed}
        self._policy.audit.note("reload", ok=True, **names, sessions_ended=ended)
        _log.info(
            "the tenants were loaded again",
            extra={
                "tenants": len(tenants.tenants),
                "added": len(changes.added),
                "removed": len(changes.removed),
                "changed": len(changes.changed),
                "sessions_ended": ended,
            },
        )
        return ""

    def _renew(self, sessions: Iterable[Renewable]) -> int:
        ended = 0
        for session in sessions:
            identity = self._policy.renew(session.identity)
            if identity is not None and identity.limits.group != session.identity.limits.group:
                identity = None
            ended += identity is None
            session.renew(identity)
        return ended


def load_certificates(config: ServerConfig, audit: Audit | None = None) -> "Certificates | None":
    """Load the files that a configuration names; None without TLS. `audit` hears when
    they are loaded again.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.tls_cert is None:
        return None
    from infinistore.server.certificates import Certificates  # late: most servers have no TLS

    return Certificates(config, audit)


def check_files(config: ServerConfig) -> None:
    """Read the tokens, tenants and certificates that a configuration names. Blocking.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for setting in ("token_file", "peer_token_file"):
        if (path := getattr(config, setting)) is not None:
            read_token(path, setting=setting)
    if config.tenants is not None:
        _load_tenants(config)
    load_certificates(config)


def load_policy(config: ServerConfig, token: str) -> OneTenant | TenantPolicy:
    """Return what decides who somebody is: by the tenants file if there is one, else by
    the token, which may be empty. Blocking.

    Raises:
        ConfigError: the tenants file or the audit log cannot be used.
    """
    audit = AuditLog(config.audit_log)
    if config.tenants is None:
        return OneTenant(token, audit)
    return TenantPolicy(_load_tenants(config), audit, os.geteuid())


def add_tenants(reloads: Reloads, config: ServerConfig, policy: Policy, server: HasTenants | None = None) -> None:
    """Let the tenants file be read again with the rest, if there is one, and the audit
    log be opened again. `server` is whose sessions and limits it is about.
    """
    if isinstance(policy.audit, AuditLog) and policy.audit.path is not None:
        reloads.add(policy.audit.reopen)
    if isinstance(policy, TenantPolicy):
        reloads.add(TenantsReload(config, policy, server).reload_and_log)
