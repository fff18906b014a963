"""The management API: what operators, probes and scrapers ask of a server over HTTP.

An ASGI application of the few operations in `_OPERATIONS`, from which the routes and the OpenAPI document are made. It
is there before the pool is, so that `/healthz` and `/readyz` can tell a server that takes its memory from one that is
gone. Paths and methods of the original InfiniStore (`/kvmap_len`, `/purge`, `/selftest`) answer as they did.

Operations that change the store want the server's token if it has one, and refuse what a web page sends: a browser on
the same machine reaches loopback, too, whatever page it shows.
"""

import functools
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infinistore.config import ServerConfig
from infinistore.core.statistics import StoreStatistics
from infinistore.server.http import Application
from infinistore.server.metrics import METRICS_MEDIA_TYPE, render
from infinistore.server.openapi import Schema, document, schema_of
from infinistore.server.selftest import TransportCheck, check_transports
from infinistore.server.slices import evict_in_slices, purge_in_slices
from infinistore.statistics import ClientStatistics, ServerDetails, ServerStatistics, statistics_to_tree

if TYPE_CHECKING:
    from infinistore.server.service import Server

__all__ = ["Management"]

_Handler: TypeAlias = Callable[["Management", Request], Awaitable[Response]]

_components: Final[dict[str, Schema]] = {}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_RATIO: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}


def _exactly(**properties: Schema) -> Schema:
    """The schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_STATE: Final = _exactly(state={"enum": ["starting", "serving", "draining"]})
_DONE: Final = _exactly(status={"const": "ok"}, num=_COUNT)


@attrs.frozen
class _Operation:
    """One path and method. `answers` are by status; see `infinistore.server.openapi.Described`."""

    method: str
    path: str
    summary: str
    handler: _Handler
    answers: dict[int, Schema | str]
    parameters: dict[str, Schema] = attrs.field(factory=dict)
    body: Schema | None = None


class Management:
    """The management API of one server. `server` is None until there is one: while its pool is made."""

    def __init__(self, config: ServerConfig, token: str) -> None:
        self.server: Server | None = None
        self.config = config
        self.token = token
        self._testing = False

    @property
    def state(self) -> str:
        """ "starting", "serving" or "draining"."""
        if self.server is None:
            return "starting"
        return "draining" if self.server.draining else "serving"

    @property
    def there(self) -> "Server":
        """The server.

        Raises:
            HTTPException: there is none yet.
        """
        if self.server is None:
            raise HTTPException(503, "the server is starting: its pool is not there yet")
        return self.server

    def application(self) -> Application:
        """Return the ASGI application."""
        routes = [
            Route(operation.path, functools.partial(self._answer, operation), methods=[operation.method])
            for operation in _OPERATIONS
        ]
        described = document(_OPERATIONS, _components, wants_token=bool(self.token))

        async def openapi(request: Request) -> Response:
            return JSONResponse(described)

        routes.append(Route("/openapi.json", openapi))
        application = Starlette(routes=routes, exception_handlers={HTTPException: _error})
        application.router.redirect_slashes = False
        return application

    async def _answer(self, operation: _Operation, request: Request) -> Response:
        if operation.method == "POST":
            self._check_may_change(request)
        return await operation.handler(self, request)

    def _check_may_change(self, request: Request) -> None:
        if "origin" in request.headers:
            raise HTTPException(403, "a web page may not change the store; send the request without Origin")
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if self.token and not (scheme.lower() == "bearer" and _equal(given.strip(), self.token)):
            raise HTTPException(
                401,
                "this needs the server's token: send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": 'Bearer realm="infinistore"'},
            )

    # What the operations do

    async def healthz(self, request: Request) -> Response:
        """Alive, whatever it does."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Ready for clients, or not."""
        return JSONResponse({"state": self.state}, 200 if self.state == "serving" else 503)

    async def kvmap_len(self, request: Request) -> Response:
        """How many keys there are."""
        return JSONResponse({"len": len(self.there.core)})

    async def purge(self, request: Request) -> Response:
        """Delete all keys."""
        return JSONResponse({"status": "ok", "num": await purge_in_slices(self.there.core)})

    async def evict(self, request: Request) -> Response:
        """Evict between two bounds."""
        core = self.there.core
        low, high = _bounds(await _given(request), self.config)
        return JSONResponse({"status": "ok", "num": await evict_in_slices(core, low, high, "manual")})

    async def stats(self, request: Request) -> Response:
        """The statistics, with details if asked for."""
        server = self.there
        wanted = request.query_params.get("details", "false")
        if wanted not in ("true", "false"):
            raise HTTPException(400, "details must be true or false")
        details = await server.details() if wanted == "true" else None
        return JSONResponse(statistics_to_tree(server.statistics(), server.core.statistics(), details))

    async def clients(self, request: Request) -> Response:
        """The connections."""
        return JSONResponse({"clients": [attrs.asdict(client) for client in self.there.clients()]})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        server = self.there
        text = await render(server.statistics(), server.core.statistics(), server.operations(), self.state)
        return Response(text, media_type=METRICS_MEDIA_TYPE)

    async def selftest(self, request: Request) -> Response:
        """A block over each transport. One at a time, since anybody may ask for it."""
        addresses = self.there.addresses
        if self._testing:
            raise HTTPException(503, "a self-test is under way; ask again in a moment")
        self._testing = True
        try:
            unix_socket = None if addresses.unix_socket is None else str(addresses.unix_socket)
            checks = await check_transports(addresses.tcp, unix_socket, self.token)
        finally:
            self._testing = False
        ok = all(check.ok for check in checks)
        found = {"status": "ok" if ok else "failed", "transports": [attrs.asdict(check) for check in checks]}
        return JSONResponse(found, 200 if ok else 503)


_SELFTEST: Final = _exactly(status={"enum": ["ok", "failed"]}, transports=schema_of(list[TransportCheck], _components))
_OPERATIONS: Final = (
    _Operation(
        "GET", "/healthz", "Whether the process is alive", Management.healthz, {200: _exactly(status={"const": "ok"})}
    ),
    _Operation(
        "GET",
        "/readyz",
        "Whether the server serves clients: 503 while it takes its memory, and while it drains",
        Management.readyz,
        {200: _STATE, 503: _STATE},
    ),
    _Operation("GET", "/kvmap_len", "How many keys there are", Management.kvmap_len, {200: _exactly(len=_COUNT)}),
    _Operation("POST", "/purge", "Delete every key; num is how many there were", Management.purge, {200: _DONE}),
    _Operation(
        "POST",
        "/evict",
        "If more than max of the pool is used, evict cold blocks until at most min of it is; num is how many. What is "
        "not given is as in --evict-min-threshold and --evict-max-threshold",
        Management.evict,
        {200: _DONE},
        parameters={"min": _RATIO, "max": _RATIO},
        body={"type": "object", "properties": {"min": _RATIO, "max": _RATIO}, "additionalProperties": False},
    ),
    _Operation(
        "GET",
        "/stats",
        "What the server holds and has done; details take some milliseconds to gather",
        Management.stats,
        {
            200: {
                "type": "object",
                "properties": {
                    "server": schema_of(ServerStatistics, _components),
                    "store": schema_of(StoreStatistics, _components),
                    "details": schema_of(ServerDetails, _components),
                },
                "required": ["server", "store"],
                "additionalProperties": False,
            }
        },
        parameters={"details": {"type": "boolean"}},
    ),
    _Operation(
        "GET",
        "/clients",
        "The connections that are open; of many those that moved the most bytes",
        Management.clients,
        {200: _exactly(clients=schema_of(list[ClientStatistics], _components))},
    ),
    _Operation("GET", "/metrics", "Metrics for Prometheus", Management.metrics, {200: METRICS_MEDIA_TYPE}),
    _Operation(
        "GET",
        "/selftest",
        "Write, read back and delete a block over each transport",
        Management.selftest,
        {200: _SELFTEST, 503: {"anyOf": [_SELFTEST, {"$ref": "#/components/schemas/Error"}]}},
    ),
)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), token.encode())


async def _given(request: Request) -> dict[str, Any]:
    """Return what the request says in its query and in its body, which is the stronger."""
    given: dict[str, Any] = {}
    for name, written in request.query_params.multi_items():
        try:
            given[name] = json.loads(written)
        except (ValueError, RecursionError):
            given[name] = written
    body = await request.body()
    if body:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is not JSON") from None
        if not isinstance(said, dict):
            raise HTTPException(400, 'the body must be an object, such as {"min": 0.6, "max": 0.8}')
        given |= said
    return given


def _bounds(given: dict[str, Any], config: ServerConfig) -> tuple[float, float]:
    bounds = {"min": config.evict_min_threshold, "max": config.evict_max_threshold}
    for name, value in given.items():
        if name not in bounds:
            raise HTTPException(400, f"there is no parameter {name[:50]!r}; there are min and max")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise HTTPException(400, f"{name} must be a number between 0 and 1")
        bounds[name] = float(value)
    if bounds["min"] > bounds["max"]:
        raise HTTPException(400, f"min ({bounds['min']:g}) must not be above max ({bounds['max']:g})")
    return bounds["min"], bounds["max"]
