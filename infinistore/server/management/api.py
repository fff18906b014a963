"""The management API: what operators, probes and scrapers ask of a server over HTTP.

An ASGI application of the operations in `OPERATIONS`, from which it makes the routes
and the OpenAPI document; the summary of each is the docstring of its handler. It starts
before the pool exists, so that `/healthz` and `/readyz` can tell a server that is still
taking its memory from one that is gone. Paths and methods of the original InfiniStore
(`/kvmap_len`, `/purge`, `/selftest`) answer as they did there.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infinistore.access.identity import Role
from infinistore.access.policy import Policy
from infinistore.answers import evict_in_steps
from infinistore.config import ServerConfig, shown_settings
from infinistore.errors import DiskFailed
from infinistore.server.disk import settle
from infinistore.server.management.http import Application
from infinistore.server.management.metrics import METRICS_MEDIA_TYPE, Snapshot, render
from infinistore.server.management.operations import (
    REFUSED,
    Access,
    Operations,
    Schema,
    application_of,
    exactly,
    schema_of,
    token_of,
)
from infinistore.server.management.selftest import DiskCheck, TransportCheck, check_disks, check_transports
from infinistore.server.server import Server
from infinistore.statistics import (
    ClientStatistics,
    DiskTierStatistics,
    MembershipStatistics,
    ServerDetails,
    ServerStatistics,
    StoreStatistics,
    TenantStatistics,
)

COMPONENTS: Final[dict[str, Schema]] = {}
"""The schemas that the operations refer to."""
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_RATIO: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}


_STATE: Final = exactly(state={"enum": ["starting", "serving", "draining"]})
_DONE: Final = exactly(status={"const": "ok"}, num=_COUNT)


_SELFTEST: Final[Schema] = {
    "type": "object",
    "properties": {
        "status": {"enum": ["ok", "failed"]},
        "transports": schema_of(list[TransportCheck], COMPONENTS),
        "disks": schema_of(DiskCheck, COMPONENTS),
    },
    "required": ["status", "transports"],
    "additionalProperties": False,
}
_OR_REFUSED: Final[Schema] = {"anyOf": [_SELFTEST, REFUSED]}
_STATISTICS: Final[Schema] = {
    "type": "object",
    "properties": {
        "server": schema_of(ServerStatistics, COMPONENTS),
        "store": schema_of(StoreStatistics, COMPONENTS),
        "details": schema_of(ServerDetails, COMPONENTS),
        "disk": schema_of(DiskTierStatistics, COMPONENTS),
        "settings": {"type": "object", "description": "By the names of ServerConfig, without secrets"},
    },
    "required": ["server", "store"],
    "additionalProperties": False,
}

OPERATIONS: Final = Operations()


class Management:
    """The management API of one server. `server` is None while its pool is being
    made.
    """

    def __init__(self, config: ServerConfig, policy: Policy) -> None:
        self.server: Server | None = None
        self.config = config
        self._policy = policy
        self._testing = False

    @property
    def state(self) -> str:
        """ "starting", "serving" or "draining"."""
        if self.server is None:
            return "starting"
        return self.server.telemetry.state

    @property
    def there(self) -> Server:
        """The server.

        Raises:
            HTTPException: there is none yet.
        """
        if self.server is None:
            raise HTTPException(503, "the server is starting: its pool is not there yet")
        return self.server

    def check_lasts(self) -> None:
        """Check that no take-over is under way, which would bring blocks back.

        Raises:
            HTTPException: another process goes on with the blocks.
        """
        context = self.there.context
        kept = context.keeping is not None and self.there.draining
        if kept or (context.giving is not None and context.giving.wanted.is_set()):
            raise HTTPException(503, "another process takes the server's place; ask again in a moment")

    def application(self) -> Application:
        """Return the ASGI application."""
        return application_of(self, OPERATIONS, COMPONENTS, Access(self._policy, self.config.manage_allowed_hosts))

    # What the operations do

    @OPERATIONS.add("GET", "/healthz", {200: exactly(status={"const": "ok"})})
    async def healthz(self, request: Request) -> Response:
        """Whether the process is alive."""
        return JSONResponse({"status": "ok"})

    @OPERATIONS.add("GET", "/readyz", {200: _STATE, 503: _STATE})
    async def readyz(self, request: Request) -> Response:
        """Whether the server serves clients: 503 while it takes its memory, and while
        it drains.
        """
        return JSONResponse({"state": self.state}, 200 if self.state == "serving" else 503)

    @OPERATIONS.add("GET", "/kvmap_len", {200: exactly(len=_COUNT)})
    async def kvmap_len(self, request: Request) -> Response:
        """How many keys there are."""
        return JSONResponse({"len": len(self.there.core)})

    @OPERATIONS.add("POST", "/purge", {200: _DONE, 503: REFUSED}, Role.ADMIN)
    async def purge(self, request: Request) -> Response:
        """Delete every key; num is how many there were. 503 if what is gone may be back
        after a restart.
        """
        self.check_lasts()
        try:
            purged = await self.there.purge()
        except DiskFailed as error:
            raise HTTPException(503, str(error)) from None
        return JSONResponse({"status": "ok", "num": purged})

    @OPERATIONS.add(
        "POST",
        "/evict",
        {200: _DONE},
        Role.ADMIN,
        parameters={"min": _RATIO, "max": _RATIO},
        body={"type": "object", "properties": {"min": _RATIO, "max": _RATIO}, "additionalProperties": False},
    )
    async def evict(self, request: Request) -> Response:
        """If more than max of the pool is used, evict cold blocks until at most min of
        it is; num is how many. What is not given is as in --evict-min-threshold and
        --evict-max-threshold.
        """
        core = self.there.core
        low, high = _bounds(await _given(request), self.config)
        return JSONResponse({"status": "ok", "num": await settle(evict_in_steps(core, low, high, "manual"))})

    @OPERATIONS.add("GET", "/stats", {200: _STATISTICS}, parameters={"details": {"type": "boolean"}})
    async def stats(self, request: Request) -> Response:
        """What the server holds and has done, its disks, if it has some, and its
        settings; details take some milliseconds to gather.
        """
        server = self.there
        wanted = request.query_params.get("details", "false")
        if wanted not in ("true", "false"):
            raise HTTPException(400, "details must be true or false")
        tree = await server.telemetry.tree(with_details=wanted == "true")
        return JSONResponse({**tree, "settings": shown_settings(self.config)})

    @OPERATIONS.add("GET", "/clients", {200: exactly(clients=schema_of(list[ClientStatistics], COMPONENTS))})
    async def clients(self, request: Request) -> Response:
        """The connections that are open; of many those that moved the most bytes."""
        return JSONResponse({"clients": [attrs.asdict(client) for client in self.there.telemetry.clients()]})

    @OPERATIONS.add("GET", "/cluster", {200: schema_of(MembershipStatistics, COMPONENTS), 404: REFUSED})
    async def cluster(self, request: Request) -> Response:
        """The cluster as this server sees it, and whether it is registered there; 404
        without a cluster.
        """
        statistics = self.there.telemetry.cluster
        if statistics is None:
            raise HTTPException(404, "this server is in no cluster; start it with --cluster URL")
        return JSONResponse(attrs.asdict(statistics()))

    @OPERATIONS.add(
        "GET", "/tenants", {200: exactly(tenants=schema_of(list[TenantStatistics], COMPONENTS)), 404: REFUSED}
    )
    async def tenants(self, request: Request) -> Response:
        """What each tenant has of the server, and has done; 404 without --tenants."""
        found = await self.there.telemetry.of_tenants()
        if found is None:
            raise HTTPException(404, "this server has no tenants; start it with --tenants FILE")
        return JSONResponse({"tenants": [attrs.asdict(one) for one in found]})

    @OPERATIONS.add("GET", "/metrics", {200: METRICS_MEDIA_TYPE})
    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        server = self.there
        telemetry = server.telemetry
        snapshot = Snapshot(
            *(telemetry.statistics(), server.core.statistics(), telemetry.operations(), telemetry.state),
            disk=telemetry.disk(),
            cluster=None if telemetry.cluster is None else telemetry.cluster(),
            tenants=await telemetry.of_tenants(),
        )
        return Response(await render(snapshot), media_type=METRICS_MEDIA_TYPE)

    @OPERATIONS.add("POST", "/reload", {200: exactly(status={"const": "ok"}), 409: REFUSED}, Role.ADMIN)
    async def reload(self, request: Request) -> Response:
        """Read the tenants file and the files of TLS again, as SIGHUP does; what cannot
        be used changes nothing.
        """
        return reloaded(await self.there.reloads.run())

    @OPERATIONS.add(
        "GET",
        "/selftest",
        {200: _SELFTEST, 503: _OR_REFUSED},
        summary="Look a key up over each transport, and change nothing",
    )
    @OPERATIONS.add("POST", "/selftest", {200: _SELFTEST, 503: _OR_REFUSED}, Role.ADMIN)
    async def selftest(self, request: Request) -> Response:
        """Write, read back and delete a block over each transport, and through the
        disks, if there are some.
        """
        server = self.there
        addresses, token = server.addresses, token_of(request)
        if self._testing:
            raise HTTPException(503, "a self-test is under way; ask again in a moment")
        self._testing = True
        try:
            writes = request.method == "POST"
            checks = await check_transports(addresses, token, tls=server.tls, writes=writes)
            disks = None
            if writes and server.context.tiers.statistics() is not None:
                disks = await check_disks(addresses, token, server.core.evict_keys, tls=server.tls)
        finally:
            self._testing = False
        ok = all(check.ok for check in checks) and (disks is None or disks.ok)
        found: dict[str, Any] = {
            "status": "ok" if ok else "failed",
            "transports": [attrs.asdict(check) for check in checks],
        }
        if disks is not None:
            found["disks"] = attrs.asdict(disks)
        return JSONResponse(found, 200 if ok else 503)


def reloaded(problems: Sequence[str]) -> Response:
    """Answer a reload.

    Raises:
        HTTPException: a file could not be used.
    """
    if problems:
        raise HTTPException(409, "; ".join(problems))
    return JSONResponse({"status": "ok"})


async def _given(request: Request) -> dict[str, Any]:
    """Return the parameters of a request, from its query and its body, which wins."""
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
