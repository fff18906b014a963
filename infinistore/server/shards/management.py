"""The management API of all shards: each is asked over its Unix socket, and the answers
are merged: metrics, statistics, numbers, lists.

It has the paths of a plain server's API, which answer in the same form, and `GET
/shards`. Merged answers leave out a shard that does not answer within a few seconds. A
request that changes the store fails unless all shards have carried it out.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs
import h11
import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infinistore.errors import StoreUnavailable
from infinistore.protocol.codec import statistics_from_tree, statistics_to_tree
from infinistore.protocol.messages import Tree
from infinistore.server.management import api
from infinistore.server.management.http import Application
from infinistore.server.management.metrics import METRICS_MEDIA_TYPE, Described, text_of
from infinistore.server.management.operations import Access, Operation, Schema, application_of, exactly
from infinistore.server.security import Reloads
from infinistore.server.shards.fleet import Fleet, ShardState
from infinistore.statistics import ClientStatistics, Stats, TenantStatistics, busiest, merged, merged_by
from infinistore.transports.sockets.trio_streams import connect_unix

_RECEIVE_BYTES: Final = 64 * 1024


@attrs.frozen
class _Answer:
    """An answer to a request."""

    status: int
    body: bytes


async def _ask(path: Path, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> _Answer:
    """Send a request to the server at this socket, and return its answer.

    Raises:
        StoreUnavailable: nobody listens there, or the connection broke.
    """
    connection = h11.Connection(h11.CLIENT)
    given = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **headers}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    events: list[Any] = [
        h11.Request(method=method, target=target, headers=fields),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ]
    stream = await connect_unix(str(path))
    try:
        await stream.send_all([memoryview(b"".join(connection.send(event) or b"" for event in events))])
        answered, parts = 0, list[bytes]()
        buffer = memoryview(bytearray(_RECEIVE_BYTES))
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                count = await stream.receive_into([buffer])
                connection.receive_data(bytes(buffer[:count]))
            elif isinstance(event, h11.Response):
                answered = event.status_code
            elif isinstance(event, h11.Data):
                parts.append(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return _Answer(answered, b"".join(parts))
    except h11.RemoteProtocolError as error:
        raise StoreUnavailable(f"no answer from {path}: {error}") from None
    finally:
        stream.close()


_SAMPLE: Final = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")


def merge_metrics(texts: Mapping[int, bytes]) -> bytes:
    """Put scrapes together, with the label `shard`; describe each metric once."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # by name: what describes it, its samples
    for shard, text in texts.items():
        described, samples = list[bytes](), list[bytes]()
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                described, samples = families.setdefault(line.split(b" ", 3)[2], ([], []))
            if not line.startswith(b"#"):
                samples.append(_labelled(line, b'shard="%d"' % shard))
            elif line not in described:
                described.append(line)
    return b"".join(line + b"\n" for found in families.values() for lines in found for line in lines)


def _labelled(line: bytes, label: bytes) -> bytes:
    match = _SAMPLE.match(line)
    assert match is not None, "a line of a scrape is a sample"
    end = match.end()
    if match[2] is None:
        return line[:end] + b"{" + label + b"}" + line[end:]
    return line[:end] + label + b"," + line[end:]


def merge_statistics(trees: Mapping[int, Tree]) -> Tree:
    """Add the statistics of the shards up, and append those of each, without its
    details, and its settings. None of them: an empty map.
    """
    found = {shard: statistics_from_tree(tree) for shard, tree in trees.items()}
    if not found:
        return Tree({"shards": []})
    both = merged([Stats("", "", one.store, one.server, one.details, one.disk) for one in found.values()])
    assert both.server is not None
    tree = statistics_to_tree(both.server, both.store, both.details, both.disk)
    return Tree(
        {
            **tree,
            "shards": [
                {
                    "shard": shard,
                    **statistics_to_tree(one.server, one.store, None, one.disk),
                    "settings": trees[shard]["settings"],
                }
                for shard, one in found.items()
            ],
        }
    )


def merge_numbers(answers: Mapping[int, Mapping[str, Any]], name: str) -> int:
    """Add up one number of each answer."""
    return sum(answer[name] for answer in answers.values())


def merge_clients(answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the connections to all shards that moved the most bytes."""
    clients = busiest(ClientStatistics(**client) for answer in answers.values() for client in answer["clients"])
    return list(map(attrs.asdict, clients))


def merge_tenants(answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tenants of all shards, their figures and limits added up."""
    told = [[TenantStatistics(**tenant) for tenant in answer["tenants"]] for answer in answers.values()]
    return list(map(attrs.asdict, merged_by("tenant")(told)))


def merge_clusters(answers: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the cluster as the first shard sees it that answers, and as each does."""
    each = [{"shard": shard, **statistics} for shard, statistics in answers.items()]
    return {**next(iter(answers.values())), "shards": each}


_MERGED: Final[Mapping[str, Callable[[Any], Mapping[str, Any]]]] = {
    "/kvmap_len": lambda told: {"len": merge_numbers(told, "len")},
    "/stats": merge_statistics,
    "/clients": lambda told: {"clients": merge_clients(told)},
    "/tenants": lambda told: {"tenants": merge_tenants(told)},
    "/cluster": merge_clusters,
}
"""Makes one answer of those of the shards, by path."""


def merge_selftests(answers: Mapping[int, Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Return the checks of all `count` shards as one; a silent shard has failed."""
    missing = [shard for shard in range(count) if shard not in answers]
    checks = [check for answer in answers.values() for check in answer["transports"]]
    checks += [
        {"transport": "shard", "address": str(shard), "ok": False, "error": "it does not answer", "elapsed_s": 0.0}
        for shard in missing
    ]
    merged: dict[str, Any] = {"status": "ok" if all(check["ok"] for check in checks) else "failed"}
    merged["transports"] = checks
    disks = {shard: answer["disks"] for shard, answer in answers.items() if "disks" in answer}
    if disks:
        merged["disks"] = {
            "ok": all(disk["ok"] for disk in disks.values()),
            "error": "; ".join(f"shard {shard}: {disk['error']}" for shard, disk in disks.items() if disk["error"]),
            "elapsed_s": max(disk["elapsed_s"] for disk in disks.values()),
        }
        if not merged["disks"]["ok"]:
            merged["status"] = "failed"
    return merged


_ANSWER_S: Final = 3.0
"""The time for an answer from a shard: less than a scraper waits."""
_DONE_S: Final = 25.0
"""The time for a purge, an eviction, a reload or a self-test."""
_FORWARDED: Final = ("authorization", "content-type")


_Number: TypeAlias = Callable[[ShardState, bool], int]
"""Reads a number of a shard, which has answered or not."""


def _metric(name: str, kind: Literal["counter", "gauge"], help_text: str, number: _Number) -> Described:
    return Described(
        f"infinistore_shard_{name}", kind, help_text, ("shard",),
        lambda shards: [((str(shard.index),), number(shard, answered)) for shard, answered in shards],
    )  # fmt: skip


SHARD_METRICS: Final = (
    _metric(
        "up", "gauge", "1 while the shard serves, 0 while it does not",
        lambda shard, answered: int(shard.serves and answered),
    ),
    _metric(
        "restarts_total", "counter", "How often the shard was started again after it had ended",
        lambda shard, _: shard.restarts,
    ),
    _metric(
        "hangs_total", "counter", "How often the shard was killed because its event loop hung",
        lambda shard, _: shard.hangs,
    ),
)  # fmt: skip
"""The metrics of the supervisor."""


class ShardsManagement:
    """The management API of a server with shards."""

    def __init__(self, fleet: Fleet, access: Access, reloads: Reloads | None = None) -> None:
        self._fleet = fleet
        self._reloads = reloads or Reloads()
        self._access = access

    def application(self) -> Application:
        """Return the ASGI application."""
        return application_of(self, OPERATIONS, api.COMPONENTS, self._access)

    async def healthz(self, request: Request) -> Response:
        """Alive, whatever it does."""
        return JSONResponse({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Ready for clients, or not."""
        state = self._fleet.state
        return JSONResponse({"state": state}, 200 if state == "serving" else 503)

    async def shards(self, request: Request) -> Response:
        """The shards, in order."""
        return JSONResponse({"shards": [shard.described() for shard in self._fleet.shards]})

    async def tell(self, request: Request) -> Response:
        """The merged answers of the shards."""
        return JSONResponse(_MERGED[request.scope["path"]](await self._told(request)))

    async def metrics(self, request: Request) -> Response:
        """A scrape. Without any shard, it says that all are down."""
        answers = await self._ask(request, _ANSWER_S)
        found = {shard: answer.body for shard, answer in answers.items() if answer.status == 200}
        shards = [(shard, shard.index in found) for shard in self._fleet.shards]
        own = text_of([metric.family(metric.read(shards)) for metric in SHARD_METRICS])
        return Response(own + merge_metrics(found), media_type=METRICS_MEDIA_TYPE)

    async def selftest(self, request: Request) -> Response:
        """The self-test of each shard, at once."""
        answers = await self._ask(request, _DONE_S)
        found = {shard: json.loads(answer.body) for shard, answer in answers.items() if answer.status in (200, 503)}
        tested = {shard: answer for shard, answer in found.items() if "transports" in answer}
        merged = merge_selftests(tested, len(self._fleet.shards))
        return JSONResponse(merged, 200 if merged["status"] == "ok" else 503)

    async def reload(self, request: Request) -> Response:
        """Read the supervisor's files again, and those of each shard."""
        problems = dict.fromkeys(await self._reloads.run())  # in all of them the same
        answers = await self._ask(request, _DONE_S)
        for shard in self._fleet.shards:
            answer = answers.get(shard.index)
            if answer is None or answer.status == 503:
                problems[f"shard {shard.index} did not do it"] = None
            elif answer.status != 200:
                problems[json.loads(answer.body)["error"]] = None
        return api.reloaded(list(problems))

    async def _told(self, request: Request) -> dict[int, Any]:
        """Return the answers of the shards that serve."""
        answers = await self._ask(request, _ANSWER_S)
        found = {}
        for shard, answer in answers.items():
            if answer.status == 200:
                found[shard] = json.loads(answer.body)
            elif answer.status != 503:  # it says the same in all of them
                raise _refusal(answer)
        if not found:
            raise HTTPException(503, "no shard is serving")
        return found

    async def do(self, request: Request) -> Response:
        """Have all shards purge, or evict, each from its own part of the pool."""
        answers = await self._ask(request, _DONE_S)
        done = {shard: json.loads(answer.body) for shard, answer in answers.items() if answer.status == 200}
        count = merge_numbers(done, "num")
        refused = next((answer for answer in answers.values() if answer.status not in (200, 503)), None)
        if refused is not None:
            raise _refusal(refused)
        missing = [str(shard.index) for shard in self._fleet.shards if shard.index not in done]
        if missing:
            names = ", ".join(missing)
            raise HTTPException(503, f"shard {names} did not do it; it is done to {count} keys of the others")
        return JSONResponse({"status": "ok", "num": count})

    async def _ask(self, request: Request, within_s: float) -> dict[int, _Answer]:
        """Ask all shards at once; return the answers that come in time, in order."""
        query = request.scope["query_string"].decode()
        target = request.scope["path"] + (f"?{query}" if query else "")
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        body = await request.body()
        answers: dict[int, _Answer] = {}

        async def one(shard: ShardState) -> None:
            assert shard.management_socket is not None
            try:
                answers[shard.index] = await _ask(shard.management_socket, request.method, target, headers, body)
            except StoreUnavailable:
                return

        with trio.move_on_after(within_s):
            async with trio.open_nursery() as nursery:
                for shard in self._fleet.shards:
                    nursery.start_soon(one, shard)
        return dict(sorted(answers.items()))


def _refusal(answer: _Answer) -> HTTPException:
    said: Mapping[str, str] = json.loads(answer.body)
    return HTTPException(answer.status, said["error"])


_HANDLERS: Final = {
    **dict.fromkeys(_MERGED, ShardsManagement.tell),
    "/purge": ShardsManagement.do,
    "/evict": ShardsManagement.do,
    "/healthz": ShardsManagement.healthz,
    "/readyz": ShardsManagement.readyz,
    "/metrics": ShardsManagement.metrics,
    "/reload": ShardsManagement.reload,
    "/selftest": ShardsManagement.selftest,
}
_SHARD: Final[Schema] = exactly(
    shard={"type": "integer"},
    state={"enum": ["starting", "serving", "down"]},
    pid={"type": ["integer", "null"]},
    port={"type": ["integer", "null"]},
    unix_socket={"type": ["string", "null"]},
    restarts={"type": "integer"},
    hangs={"type": "integer"},
)


def _of_shards(operation: Operation) -> Operation:
    """Return an operation of a plain server as one of all shards."""
    answers = operation.answers
    if operation.path in ("/stats", "/cluster"):
        of_one = answers[200]
        assert isinstance(of_one, dict)
        if "$ref" in of_one:
            of_one = api.COMPONENTS[of_one["$ref"].rpartition("/")[2]]
        each = {**of_one["properties"], "shard": {"type": "integer"}}
        shards = {"type": "array", "items": {"type": "object", "properties": each}}
        answers = {**answers, 200: {**of_one, "properties": {**of_one["properties"], "shards": shards}}}
    return attrs.evolve(operation, handler=_HANDLERS[operation.path], answers=answers)


OPERATIONS: Final = (
    *map(_of_shards, api.OPERATIONS),
    Operation(
        "GET",
        "/shards",
        "The shards: their states, processes and addresses, and how often each was restarted, and hung",
        ShardsManagement.shards,
        {200: exactly(shards={"type": "array", "items": _SHARD})},
    ),
)
