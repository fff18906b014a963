"""Engines that a router can be put before, in memory: they speak as OpenAI, tokenize a
character at a time, and compute for as long as they are told.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from trio.testing import memory_stream_pair

from infinistore.client import AsyncStore
from infinistore.routing import Address, HttpLimits, Role, Router, RouterOptions
from infinistore.routing.http import Answer, Asked, ClientConnection, ClientGone, asking

MODEL = "small"
LIMITS = HttpLimits(body_bytes=1024 * 1024)


def template(messages: list[dict[str, str]]) -> str:
    """What a chat's template makes of it."""
    return "".join(f"<{one['role']}>{one['content']}</s>" for one in messages) + "<assistant>"


class FakeEngine:
    """An engine. `seconds_per_token` is what a prompt takes; `pieces` is its answer."""

    def __init__(self, url: str, models: tuple[str, ...] = (MODEL,)) -> None:
        self.url = url
        self.models: list[dict[str, Any]] = [{"id": name, "root": f"/models/{name}"} for name in models]
        self.seconds_per_token = 0.0
        self.pieces = ["one ", "two ", "three"]
        self.waiting = 0
        """What its metrics say of other requests."""
        self.is_down = False
        self.stops_after: int | None = None
        """After so many pieces, its process is killed."""
        self.goes_on = trio.Event()
        """Prompts are answered when it is set."""
        self.goes_on.set()
        self.asked: list[Asked] = []
        """The requests with a prompt, and others that are not the router's own."""
        self.tokenized: list[dict[str, Any]] = []
        self.tokenize_s = 0.0
        self.cancelled = 0
        """How many requests ended because the router hung up."""
        self.status = 200
        self.health = 200
        self.key: bytes | None = None
        """What it wants to be shown."""

    async def serve(self, stream: trio.abc.Stream) -> None:
        """Serve one connection."""
        client = ClientConnection(stream, LIMITS)
        async with stream:
            try:
                while (asked := await client.next_request()) is not None:
                    await self._answer(client, asked)
            except* ClientGone:
                self.cancelled += 1

    async def _answer(self, client: ClientConnection, asked: Asked) -> None:
        try:
            found = json.loads(asked.body)
        except ValueError:
            found = None
        body = found if isinstance(found, dict) else {}
        match asked.path:
            case _ if self.key is not None and asked.header(b"authorization") != self.key:
                await client.answer(401, b"{}")
            case "/health":
                await client.answer(self.health, b"")
            case "/v1/models":
                await client.answer(200, json.dumps({"data": self.models}).encode())
            case "/metrics":
                text = f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} {self.waiting}.0\n'
                await client.answer(200, text.encode(), "text/plain")
            case "/tokenize":
                self.tokenized.append(body)
                await trio.sleep(self.tokenize_s)  # real time: as below
                text = body["prompt"] if "prompt" in body else template(body["messages"])
                await client.answer(200, json.dumps({"tokens": [ord(one) for one in text]}).encode())
            case _:
                self.asked.append(asked)
                await self._compute(client, len(str(body.get("prompt", ""))))

    async def _compute(self, client: ClientConnection, length: int) -> None:
        gone = False
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal gone
                await client.until_gone()
                gone = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self.goes_on.wait()
            await trio.sleep(self.seconds_per_token * length)  # real time: as below
            await self._stream(client)
            nursery.cancel_scope.cancel()
        if gone:
            raise ClientGone

    async def _stream(self, client: ClientConnection) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-engine", self.url.encode())]
        pieces = iter([*self.pieces, ""])
        sent = 0

        async def more() -> bytes:
            nonlocal sent
            if sent == self.stops_after:
                raise ClientGone
            if sent:
                await trio.sleep(0.01)  # real time: tests of these are in virtual time
            sent += 1
            return next(pieces).encode()

        first = await more()
        await client.begin(self.status, headers)
        await client.pass_on(first, more)


class Listener(trio.abc.Listener[trio.abc.Stream]):
    """One where nobody connects: clients of a `World` are given to the router."""

    async def accept(self) -> trio.abc.Stream:
        """Wait."""
        await trio.sleep_forever()
        raise AssertionError("not reached")

    async def aclose(self) -> None:
        """Do nothing."""
        await trio.lowlevel.checkpoint()


LISTENERS: list[trio.abc.Listener[Any]] = [Listener()]


@attrs.define
class World:
    """A router, its engines, and what clients ask it."""

    router: Router
    engines: Mapping[str, FakeEngine]
    nursery: trio.Nursery

    async def connected(self, address: Address | None = None) -> trio.abc.Stream:
        """Connect to the router, as a client."""
        ours, theirs = memory_stream_pair()
        self.nursery.start_soon(self.router.serve_client, theirs)
        return ours

    @asynccontextmanager
    async def asking(self, path: str, body: object = None, **headers: str) -> AsyncIterator[Answer]:
        """Ask the router: POST with a body, GET without."""
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = Asked(b"GET" if body is None else b"POST", path.encode(), given, raw)
        async with asking(Address.of("http://router"), asked, LIMITS, self.connected) as answer:
            yield answer

    async def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, str, dict[str, str]]:
        """Ask the router; return the status, the body and the headers."""
        async with self.asking(path, body, **headers) as answer:
            text = (await answer.rest(1 << 30)).decode()
            return answer.status, text, {name.decode(): value.decode() for name, value in answer.headers}

    async def complete(self, prompt: object = "hello", **more: object) -> tuple[int, str, dict[str, str]]:
        """Ask for a completion, as a stream."""
        return await self.ask("/v1/completions", {"model": MODEL, "prompt": prompt, "stream": True, **more})


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do it here: a clock that jumps does not wait for threads."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)


@asynccontextmanager
async def routed(
    *names: str,
    engines: Mapping[str, FakeEngine] | None = None,
    roles: Mapping[str, Role] | None = None,
    store: AsyncStore | None = None,
    prepare: Callable[[FakeEngine], None] = lambda engine: None,
    **options: Any,
) -> AsyncIterator[World]:
    """Run a router before engines of these names, `http://NAME`. It is told of those in
    `engines` by something else.
    """
    named = {f"http://{name}": FakeEngine(f"http://{name}") for name in names}
    every = {**named, **(engines or {})}
    for engine in every.values():
        prepare(engine)
    async with trio.open_nursery() as nursery:

        async def connect(address: Address) -> trio.abc.Stream:
            engine = every.get(address.url)
            if engine is None or engine.is_down:
                raise ConnectionRefusedError(111, "Connection refused")
            ours, theirs = memory_stream_pair()
            nursery.start_soon(engine.serve, theirs)
            return ours

        given = {url: (Address.of(url), (roles or {}).get(url.removeprefix("http://"), "both")) for url in named}
        chosen = {"limits": LIMITS, "policy": "round-robin", **options}
        router = Router(RouterOptions(engines=given, **chosen), store, connect=connect, in_thread=at_once)
        await nursery.start(router.run)
        yield World(router, every, nursery)
        nursery.cancel_scope.cancel()
