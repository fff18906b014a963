"""The tenants of a server: loaded at the start, and again without a restart."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import trio

from infinistore.access.identity import Identity
from infinistore.access.policy import TenantPolicy
from infinistore.access.tenants import Tenants
from infinistore.access.tenants_file import parse_tenants
from infinistore.errors import ConfigError
from infinistore.host import NO_THREAD
from infinistore.secret_files import read_text
from infinistore.tenant_limits import TenantLimits

if TYPE_CHECKING:
    from infinistore.config import ServerConfig

__all__ = ["HasTenants", "Renewable", "TenantsReload", "load_tenants"]

_log = logging.getLogger("infinistore.server")


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


def load_tenants(config: "ServerConfig") -> Tenants:
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
        load: "Callable[[ServerConfig], Tenants]" = load_tenants,
        run_in_thread: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        """`load` reads the file, which `run_in_thread` runs: by default a thread of
        Trio's.
        """
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
