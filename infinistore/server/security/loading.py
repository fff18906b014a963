"""Loads what TLS takes, if a configuration wants TLS."""

from typing import TYPE_CHECKING

from infinistore.config import ServerConfig

if TYPE_CHECKING:
    from infinistore.server.security.certificates import Certificates

__all__ = ["load_certificates"]


def load_certificates(config: ServerConfig) -> "Certificates | None":
    """Load the files that a configuration names; None without TLS.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.tls_cert is None:
        return None
    from infinistore.server.security.certificates import Certificates  # late: most servers have no TLS

    return Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
