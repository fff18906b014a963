"""The merged management API, when shards do not answer or do not agree."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from infinistore.access.policy import OneTenant
from infinistore.server.management.http import Application, ConnectionSlots, HttpLimits, serve_connection, serve_http
from infinistore.server.management.operations import Access
from infinistore.server.shards.fleet import Fleet, ShardState
from infinistore.server.shards.management import ShardsManagement
from infinistore.transports.sockets.unix_listener import listen_unix
from tests.server.http_client import Answer, ask_over
from tests.transports.memory_network import stream_pair, whole

ALARM = 'infinistore_shard_up{shard="1"} 0.0\n'


def saying(said: object, status: int = 200, asked: list[dict[str, Any]] | None = None) -> Application:
    """A shard that always says this, and notes what it was asked."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if asked is not None:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            asked.append({"path": scope["path"], "query": scope["query_string"], "body": body, **headers})
        text = said if isinstance(said, bytes) else json.dumps(said).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text})

    return application


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """A shard that hangs."""
    await trio.sleep_forever()


class Asked:
    """The merged API of some shards."""

    def __init__(self, application: Application, nursery: trio.Nursery) -> None:
        self._application = application
        self._nursery = nursery

    async def ask(self, method: str, path: str, *, headers: dict[str, str] | None = None, body: bytes = b"") -> Answer:
        ours, theirs = stream_pair(whole)
        self._nursery.start_soon(serve_connection, self._application, theirs, ConnectionSlots(HttpLimits()))
        answer = await ask_over(ours, method, path, headers=headers, body=body)
        ours.close()
        return answer


@asynccontextmanager
async def merged(folder: Path, *shards: Application | None, token: str = "") -> AsyncGenerator[Asked, None]:
    """Serve the API of these shards; None is one without a process."""
    states: Sequence[ShardState] = [ShardState(index, folder / f"{index}.sock") for index in range(len(shards))]
    with ExitStack() as resources:
        async with trio.open_nursery() as nursery:
            for state, application in zip(states, shards, strict=True):
                if application is not None:
                    assert state.management_socket is not None
                    listener = resources.enter_context(listen_unix(state.management_socket))
                    nursery.start_soon(serve_http, application, [listener])
                    state.started(1)
                    state.serving(0.0)
            yield Asked(ShardsManagement(Fleet(states), Access(OneTenant(token))).application(), nursery)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("other", [silent, None, saying({"error": "starting"}, 503)])
async def test_what_a_shard_does_not_tell_is_left_out(
    other: Application | None, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with merged(tmp_path, saying({"len": 3}), other) as api:
        assert (await api.ask("GET", "/kvmap_len")).json == {"len": 3}


@pytest.mark.parametrize("other", [silent, None])
async def test_metrics_tell_of_a_shard_that_does_not_answer_before_a_scraper_gives_up(
    other: Application | None, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with merged(tmp_path, saying(b"# HELP keys k\n# TYPE keys gauge\nkeys 3.0\n"), other) as api:
        with trio.fail_after(5):
            answer = await api.ask("GET", "/metrics")
    assert 'infinistore_shard_up{shard="0"} 1.0\n' in answer.body.decode()
    assert ALARM in answer.body.decode()
    assert answer.body.endswith(b'# HELP keys k\n# TYPE keys gauge\nkeys{shard="0"} 3.0\n')


async def test_without_any_shard_metrics_tell_so_and_numbers_are_refused(tmp_path: Path) -> None:
    async with merged(tmp_path, None, None) as api:
        assert ALARM in (await api.ask("GET", "/metrics")).body.decode()
        answer = await api.ask("GET", "/stats")
        assert (answer.status, answer.json) == (503, {"error": "no shard is serving"})
        assert (await api.ask("GET", "/selftest")).json["status"] == "failed"
        answer = await api.ask("GET", "/readyz")
        assert (answer.status, answer.json) == (503, {"state": "starting"})


async def test_a_purge_that_one_shard_did_not_do_fails_and_tells_what_was_done(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    done = saying({"status": "ok", "num": 4})
    async with merged(tmp_path, done, silent, done, None) as api:
        answer = await api.ask("POST", "/purge")
    assert answer.status == 503
    assert answer.json == {"error": "shard 1, 3 did not do it; it is done to 8 keys of the others"}


async def test_a_request_goes_to_each_shard_as_it_came(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    shard = saying({"status": "ok", "num": 1}, asked=asked)
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json", "X-Other": "no"}
    async with merged(tmp_path, shard, shard, token="secret") as api:
        answer = await api.ask("POST", "/evict?min=0.1", headers=headers, body=b'{"max": 0.5}')
    assert (answer.status, answer.json) == (200, {"status": "ok", "num": 2})
    for one in asked:
        assert (one["path"], one["query"], one["body"]) == ("/evict", b"min=0.1", b'{"max": 0.5}')
        assert (one["authorization"], one["content-type"]) == ("Bearer secret", "application/json")
        assert "x-other" not in one
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer secret", "Origin": "x"}, 403)],
)
async def test_who_may_not_change_the_store_reaches_no_shard(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    asked: list[dict[str, Any]] = []
    async with merged(tmp_path, saying({}, asked=asked), token="secret") as api:
        assert (await api.ask("POST", "/purge", headers=headers)).status == status
    assert asked == []


@pytest.mark.parametrize("path", ["/evict", "/purge"])
async def test_a_refusal_of_one_shard_is_that_of_all(tmp_path: Path, path: str) -> None:
    async with merged(tmp_path, saying({"status": "ok", "num": 1}), saying({"error": "no"}, 400)) as api:
        answer = await api.ask("POST", path)
    assert (answer.status, answer.json) == (400, {"error": "no"})
