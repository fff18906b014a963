"""The settings of TLS at each end, from files in PEM.

TLS 1.2 or newer, with the ciphers of Python and OpenSSL. There is no resumption: a
store keeps its connections. Renegotiation is off, so that reading never needs to write.
"""

import ssl
from pathlib import Path

from infinistore.errors import ConfigError

__all__ = ["client_context", "server_context", "trust"]


def client_context(ca: Path | None = None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts the authorities in `ca`, or those of
    the system, and shows the certificate `cert`. Without `key`, that has its key, too.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ca: {_cannot_trust(ca, error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    if cert is not None:
        _load_pair(context, cert, key, ("cert", "key"))
    return context


def server_context(cert: Path, key: Path | None = None, client_ca: Path | None = None) -> ssl.SSLContext:
    """Return the context of a server. With `client_ca`, a client must show a
    certificate that one of these authorities has signed.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_pair(context, cert, key, ("--tls-cert", "--tls-key"))
    if client_ca is not None:
        trust(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def trust(context: ssl.SSLContext, authorities: Path, name: str) -> None:
    """Trust these authorities, too. `name` is that of the setting.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        context.load_verify_locations(str(authorities))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {_cannot_trust(authorities, error)}") from None


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path | None, names: tuple[str, str]) -> None:
    cert_name, key_name = names
    for name, file in ((cert_name, cert), (key_name, key)):
        if file is not None:
            _check_readable(name, file)

    def refuse() -> str:
        raise ConfigError(f"{key_name}: the key in {key or cert} has a passphrase; store it without one")

    try:
        context.load_cert_chain(str(cert), None if key is None else str(key), password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{cert_name}: the certificate in {cert} does not fit the key in {key or cert}; give the pair"
        elif error.reason is None:  # no PEM, or another thing in PEM
            problem = f"{cert_name}: {cert} must hold a certificate, and {key or cert} its key, both in PEM"
        else:
            problem = f"{cert_name}: {cert} cannot be used: {error.reason.replace('_', ' ').lower()}"
        raise ConfigError(problem) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{cert_name}: {cert} cannot be used: {error}") from None


def _check_readable(name: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {file}: {error.strerror}") from None


def _cannot_trust(file: Path | None, error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return f"cannot read {file}: {error.strerror}"
    return f"{file} must hold the certificates of authorities in PEM"
