"""The operations of the management API: from a table of them to an application, its
routes and its OpenAPI document; and who may ask for which.

If the server has a token, or tenants, everything wants a token except the probes. A
tenant must be an operator, because what is here concerns the whole server, and have the
role that the operation needs. Without a token, the API is for this machine, or for a
network that is trusted; but a browser there reaches it, whatever page it shows. So
nothing that a page sends changes the store, and a name that the page's owner may have
led here (DNS rebinding) is not answered.
"""

import base64
import hashlib
import ipaddress
import socket
import types
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infinistore.access.identity import Credentials, Identity, Role
from infinistore.access.policy import OneTenant, Policy, TenantPolicy
from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.server.management.http import Application
from infinistore.server.security import ORIGIN, PRIVATE
from infinistore.version import __version__

PROBES: Final = frozenset(("/healthz", "/readyz"))
"""The probes, which an orchestrator asks before it restarts a server or sends clients
to it. They are answered to anybody, however busy the API is.
"""
_MISDIRECTED: Final = 421


@attrs.frozen
class Access:
    """Who may ask. `hosts` are names of the server, besides addresses, localhost and
    what the machine calls itself. They matter without a token.
    """

    policy: Policy = attrs.field(factory=OneTenant)
    hosts: Collection[str] = ()

    def check(self, request: Request, role: Role) -> None:
        """Refuse a request that may not be answered. The state of the request has the
        `identity` of who made it, except for probes.

        Raises:
            HTTPException: it may not.
        """
        path = request.scope["path"]  # that of `request.url` may be made of the Host header
        if path in PROBES:
            return
        if request.method == "POST" and "origin" in request.headers:
            raise HTTPException(403, "a web page may not change the store; send the request without Origin")
        if not self.policy.wants_token:
            self._check_host(request.headers.get("host", ""))
        request.state.identity = identity = self._identify(request)
        try:
            if not identity.operator:
                raise PermissionDenied(
                    f"the management API is for operators, and tenant {identity.tenant} is none; the operator of the "
                    "server adds operator: true in the tenants file"
                )
            identity.check(role, f"{request.method} {path}")
            if role is Role.ADMIN:
                self._note("administration", request, tenant=identity.tenant)
        except PermissionDenied as error:
            self._note("denied", request, tenant=identity.tenant)
            raise HTTPException(403, str(error)) from None

    def _identify(self, request: Request) -> Identity:
        try:
            return self.policy.identify(Credentials(token_of(request), private=request.scope.get(PRIVATE, False)))
        except PermissionDenied as error:
            self._note("refused", request, reason=f"PermissionDenied: {error}")
            raise HTTPException(403, f"{error}; here, ask with https://") from None
        except AuthenticationFailed as error:
            self._note("refused", request, reason=f"AuthenticationFailed: {error}")
            given = request.headers.get("authorization", "").partition(" ")[2]
            wanted = "of an operator" if isinstance(self.policy, TenantPolicy) else "of the server"
            problem = "the token given is wrong" if given else f"this needs the token {wanted}"
            raise HTTPException(
                401,
                f"{problem}: send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": 'Bearer realm="infinistore"'},
            ) from None

    def _note(self, event: str, request: Request, **fields: object) -> None:
        what = f"{request.method} {request.scope['path']}"
        origin = request.scope.get(ORIGIN, "unknown")
        self.policy.audit.note(event, **fields, origin=origin, transport="management", request=what)

    def _check_host(self, written: str) -> None:
        try:
            host = urlsplit(f"//{written}").hostname or ""
        except ValueError:
            host = "?"
        if not host or _is_address(host) or host == "localhost" or host.endswith(".localhost"):
            return
        if host not in {name.lower() for name in (*self.hosts, *_own_names())}:
            raise HTTPException(
                _MISDIRECTED,
                "the Host of this request is no name of this server; ask by its address, or add the name to "
                "--manage-allowed-hosts",
            )


def token_of(request: Request) -> str:
    """Return the token that a request bears; empty if it has none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ""
    # Headers come as Latin-1; tokens are UTF-8.
    return given.strip().encode("latin-1").decode("utf-8", "surrogateescape")


def _own_names() -> tuple[str, str]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


Schema: TypeAlias = dict[str, Any]
"""A JSON Schema, as nested maps."""

_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}
REFUSED: Final[Schema] = {"$ref": "#/components/schemas/Error"}
"""The schema of an error."""
_ERROR: Schema = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
    "additionalProperties": False,
}


Handler: TypeAlias = Callable[[Any, Request], Awaitable[Response]]
"""Answers a request for an API, which comes first."""


@attrs.frozen
class Operation:
    """One path and method."""

    method: str
    path: str
    summary: str
    """One sentence."""
    handler: Handler
    answers: dict[int, Schema | str]
    """By status: the JSON schema of the answer, or its media type."""
    role: Role = Role.MONITOR
    """The role that it needs."""
    parameters: dict[str, Schema] = attrs.field(factory=dict)
    """The query parameters, all optional."""
    body: Schema | None = None
    """The schema of the JSON body, which may be left out."""


class Operations(list[Operation]):
    """The operations of an API, each declared where it is implemented."""

    def add(
        self, method: str, path: str, answers: dict[int, Schema | str], *more: Any, **others: Any
    ) -> Callable[[Handler], Handler]:
        """Return a decorator for a handler, whose docstring is the summary."""

        def declare(handler: Handler) -> Handler:
            summary = others.pop("summary", None) or " ".join((handler.__doc__ or "").split()).removesuffix(".")
            self.append(Operation(method, path, summary, handler, answers, *more, **others))
            return handler

        return declare


def schema_of(kind: Any, components: dict[str, Schema]) -> Schema:
    """Return the schema of a type: plain, a list, optional, or an attrs class."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if get_origin(kind) is list:
        return {"type": "array", "items": schema_of(get_args(kind)[0], components)}
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (one for one in get_args(kind) if one is not types.NoneType)
        return {"anyOf": [schema_of(inner, components), {"type": "null"}]}
    if kind.__name__ not in components:
        hints = get_type_hints(kind)
        names = [field.name for field in attrs.fields(kind)]
        components[kind.__name__] = {}  # named before it is made, in case it holds itself
        components[kind.__name__] = {
            "type": "object",
            "properties": {name: schema_of(hints[name], components) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def document(operations: Sequence[Operation], components: dict[str, Schema], *, wants_token: bool) -> Schema:
    """Return the OpenAPI document; the operations refer to `components`."""
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, wants_token)
    return {
        "openapi": "3.1.0",
        "info": {"title": "InfiniStore management", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation, wants_token: bool) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}_{operation.path.strip('/')}",
        "responses": {str(status): _described_answer(status, answer) for status, answer in operation.answers.items()},
    }
    for status in _refusals(operation, wants_token):
        described["responses"].setdefault(str(status), _described_answer(status, REFUSED))
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in operation.parameters.items()
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": False, "content": {"application/json": {"schema": operation.body}}}
    if wants_token and operation.path not in PROBES:
        described["security"] = [{"token": []}]
    return described


def _refusals(operation: Operation, wants_token: bool) -> list[int]:
    """Return the error statuses that an operation may answer with."""
    refusals = [408, 413, 500, 503]
    if operation.parameters or operation.body is not None:
        refusals.append(400)
    if operation.method == "POST" or (wants_token and operation.path not in PROBES):
        refusals.append(403)
    if operation.path not in PROBES:
        refusals.append(401 if wants_token else 421)
    return sorted(refusals)


def _described_answer(status: int, answer: Schema | str) -> Schema:
    content = {answer: {}} if isinstance(answer, str) else {"application/json": {"schema": answer}}
    return {"description": _DESCRIPTIONS[status], "content": content}


_DESCRIPTIONS = {
    200: "Done.",
    400: "A parameter, or the body, is wrong.",
    401: "The token is missing or wrong.",
    403: "The request comes from a web page, or from a tenant that may not make it.",
    409: "A file cannot be used; what was read before stays.",
    421: "The Host is no name of this server.",
    404: "There is no such thing here.",
    408: "The request did not come in time.",
    413: "The body is too long.",
    500: "An error inside the server.",
    503: "Not now: the server starts, drains, or is not well.",
}


def exactly(**properties: Schema) -> Schema:
    """Return the schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def application_of(
    api: object, operations: Sequence[Operation], components: dict[str, Schema], access: Access
) -> Application:
    """Return the ASGI application of an API; `operations` refer to `components`."""
    routes = [
        Route(operation.path, partial(_answer, api, operation, access), methods=[operation.method])
        for operation in operations
    ]
    described = document(operations, components, wants_token=access.policy.wants_token)

    async def openapi(request: Request) -> Response:
        access.check(request, Role.MONITOR)
        return JSONResponse(described)

    routes += [Route("/openapi.json", openapi), Route("/", _home)]
    application = Starlette(routes=routes, exception_handlers={HTTPException: _error})
    application.router.redirect_slashes = False
    return application


async def _home(request: Request) -> Response:
    """The page for people. It has no figures: its script asks the API for them, with
    the token that its reader types.
    """
    return Response(_HOME, media_type="text/html", headers={"Content-Security-Policy": _ONLY_ITSELF})


_HOME: Final = Path(__file__).with_name("home.html").read_text("utf-8")
_SCRIPT: Final = _HOME.partition("<script>")[2].partition("</script>")[0]
_ONLY_ITSELF: Final = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'; "
    f"base-uri 'none'; script-src 'sha256-{base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()}'"
)


async def _answer(api: object, operation: Operation, access: Access, request: Request) -> Response:
    access.check(request, operation.role)
    return await operation.handler(api, request)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
