"""Asks the management API of a server, or a router, on behalf of a command."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from infinistore.errors import AuthenticationFailed, ConfigError, PermissionDenied, StoreUnavailable

_MOST_BYTES: Final = 64 * 1024 * 1024
_REFUSALS: Final = {401: AuthenticationFailed, 403: PermissionDenied}


@attrs.frozen
class Service:
    """Who is asked, in the words of errors. `setting` is what names its URL, and
    `remedy` is said if something else answers, or nobody.
    """

    name: str
    setting: str
    example: str
    remedy: str = ""


MANAGEMENT_API: Final = Service("the management API", "--manage-url ", "http://127.0.0.1:18080")
ROUTER: Final = Service(
    "the router", "", "http://127.0.0.1:8000", "; give the URL that `infinistore route` printed, and see that it runs"
)


def ask_server(
    url: str,
    path: str,
    *,
    token: str | None = None,
    ca: Path | None = None,
    within_s: float = 10.0,
    service: Service = MANAGEMENT_API,
) -> Any:
    """Return what `GET path` answers. `url` is where the service is; over HTTPS, `ca`
    is a file with the authorities to trust instead of the system's. Blocking.

    Raises:
        ConfigError: the URL cannot be used, or the service has nothing there.
        AuthenticationFailed: the token is missing or wrong.
        PermissionDenied: the token is of somebody who may not ask this.
        StoreUnavailable: nobody answers, or not in this time, or no service of ours.
    """
    connection = _connection_to(url, ca, within_s, service)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        said = json.loads(answer.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise StoreUnavailable(f"{url}: {service.name} does not answer: {_plain(error)}{service.remedy}") from None
    finally:
        connection.close()
    if answer.status == 200:
        return said
    problem = said.get("error", said) if isinstance(said, dict) else said
    if isinstance(problem, dict):  # as OpenAI has it
        problem = problem.get("message", problem)
    if answer.status in _REFUSALS:
        raise _REFUSALS[answer.status](f"{url}: {_plain(problem)}")
    kind = StoreUnavailable if answer.status >= 500 else ConfigError
    raise kind(f"{url}: {_plain(problem)}{service.remedy}")


def _plain(said: object) -> str:
    """What may be shown of it: anything may speak there."""
    return "".join(one if one.isprintable() else "?" for one in str(said)[:200])


def _connection_to(url: str, ca: Path | None, within_s: float, service: Service) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _unlike_a_url(url, service) from None
    if not host or " " in host or not host.isprintable() or parts.scheme not in ("http", "https"):
        raise _unlike_a_url(url, service)
    if parts.path.strip("/") or parts.query or parts.username:
        raise _unlike_a_url(url, service)
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=within_s)
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:
        raise ConfigError(f"--ca {ca}: {error.strerror or error}; give a file with certificates in PEM") from None
    return http.client.HTTPSConnection(host, port, timeout=within_s, context=context)


def _unlike_a_url(url: str, service: Service) -> ConfigError:
    return ConfigError(f"{service.setting}{url}: must look like {service.example}")
