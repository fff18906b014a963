"""Whether a store is to use TLS, and with what."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from infinistore.client.options.url import StoreUrl
from infinistore.errors import ConfigError
from infinistore.settings import Kind

if TYPE_CHECKING:
    import ssl

__all__ = ["tls_context", "tls_kind", "tls_of_node"]

_FILES: Final = ("ca", "cert", "key")


def tls_kind() -> Kind:
    """A context for TLS of a client."""

    def check(value: Any) -> None:
        import ssl  # late, here and below: few clients need it

        if not isinstance(value, ssl.SSLContext) or value.protocol is ssl.PROTOCOL_TLS_SERVER:
            raise ValueError("must be an ssl.SSLContext for a client, such as that of ssl.create_default_context()")

    return Kind("CONTEXT", lambda raw: raw, check)


def tls_context(url: str, *, by_socket: bool, found: Mapping[str, Any]) -> "ssl.SSLContext | None":
    """Return what the options `found` and the scheme of the URL ask for; None if they
    ask for no TLS. `by_socket` says that the URL names a Unix socket.

    Raises:
        ConfigError: they contradict each other, or a file cannot be used.
    """
    files = {name: found[name] for name in _FILES if found.get(name) is not None}
    given: ssl.SSLContext | None = found.get("tls")
    if given is None and not files and not url.startswith("infinistores"):
        return None
    if by_socket:
        raise ConfigError(f"a Unix socket has no TLS, and needs none; leave {', '.join(files) or 'tls'} out of {url}")
    if given is not None:
        if files:
            raise ConfigError(f"give either tls or {', '.join(files)}")
        return given
    if "key" in files and "cert" not in files:
        raise ConfigError("key is that of cert, which is missing; give both")
    from infinistore.transports.tls.session import client_context

    return client_context(**files)


def tls_of_node(address: StoreUrl, given: "ssl.SSLContext | None") -> "ssl.SSLContext | None":
    """Return what connections to one server use, which may be a node that says itself
    that it speaks TLS.
    """
    if given is None and address.scheme == "infinistores":
        from infinistore.transports.tls.session import client_context

        return client_context()
    return given
