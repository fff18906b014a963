"""Loads what says who may reach a server, as its configuration names it."""

import os
from typing import TYPE_CHECKING

from infinistore.access.audit import Audit
from infinistore.access.policy import OneTenant, Policy, TenantPolicy
from infinistore.config import ServerConfig
from infinistore.server.security.audit_log import AuditLog
from infinistore.server.security.reloading import Reloads
from infinistore.server.security.tenants import HasTenants, TenantsReload, load_tenants

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates

__all__ = ["add_tenants", "load_certificates", "load_policy"]


def load_certificates(config: ServerConfig, audit: Audit | None = None) -> "Certificates | None":
    """Load the files that a configuration names; None without TLS. `audit` hears when
    they are loaded again.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.tls_cert is None:
        return None
    from infinistore.server.certificates import Certificates  # late: most servers have no TLS

    return Certificates(config.tls_cert, config.tls_key, config.tls_client_ca, config.tls_peer_ca, audit)


def load_policy(config: ServerConfig, token: str) -> OneTenant | TenantPolicy:
    """Return what decides who somebody is: by the tenants file if there is one, else by
    the token, which may be empty. Blocking.

    Raises:
        ConfigError: the tenants file or the audit log cannot be used.
    """
    audit = AuditLog(config.audit_log)
    if config.tenants is None:
        return OneTenant(token, audit)
    return TenantPolicy(load_tenants(config), audit, os.geteuid())


def add_tenants(reloads: Reloads, config: ServerConfig, policy: Policy, server: HasTenants | None = None) -> None:
    """Let the tenants file be read again with the rest, if there is one, and the audit
    log be opened again. `server` is whose sessions and limits it is about.
    """
    if isinstance(policy.audit, AuditLog) and policy.audit.path is not None:
        reloads.add(policy.audit.reopen)
    if isinstance(policy, TenantPolicy):
        reloads.add(TenantsReload(config, policy, server).reload_and_log)
