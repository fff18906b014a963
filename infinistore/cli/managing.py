"""Asks the management API of a server, or a router, on behalf of a command."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from infinistore.errors import AuthenticationFailed, ConfigError, PermissionDenied, StoreUnavailable

_MOST_BYTES: Final = 64 * 1024 * 1024
_REFUSALS: Final = {401: AuthenticationFailed, 403: PermissionDenied}


def ask_server(
    url: str,
    path: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    within_s: float = 10.0,
    whom: str = "the management API",
    setting: str = "--manage-url",
) -> Any:
    """Return what `GET path` answers. `url` is where it is asked; over HTTPS, `ca` is a
    file with the authorities to trust instead of the system's. Errors say `whom` it is
    asked, and which `setting` has the URL. Blocking.

    Raises:
        ConfigError: the URL cannot be used, or the server has nothing there.
        AuthenticationFailed: the token is missing or wrong.
        PermissionDenied: the token is of somebody who may not ask this.
        StoreUnavailable: nobody answers, or not in this time, or no server of ours.
    """
    connection = _connection_to(url, ca, within_s, setting)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        said = json.loads(answer.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = "".join(one if one.isprintable() else "?" for one in str(error)[:200])  # whatever speaks there
        raise StoreUnavailable(f"{url}: {whom} does not answer: {said}") from None
    finally:
        connection.close()
    if answer.status == 200:
        return said
    problem = f"{url}: {said.get('error', said) if isinstance(said, dict) else said}"
    raise _REFUSALS.get(answer.status, StoreUnavailable if answer.status >= 500 else ConfigError)(problem)


def _connection_to(url: str, ca: Path | None, within_s: float, setting: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _unlike_a_url(url, setting) from None
    if not host or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
        raise _unlike_a_url(url, setting)
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=within_s)
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:
        raise ConfigError(f"--ca {ca}: {error.strerror or error}; give a file with certificates in PEM") from None
    return http.client.HTTPSConnection(host, port, timeout=within_s, context=context)


def _unlike_a_url(url: str, setting: str) -> ConfigError:
    return ConfigError(f"{setting} {url}: must look like http://127.0.0.1:18080")
