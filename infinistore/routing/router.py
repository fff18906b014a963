"""The router: takes requests of clients, sends each to the engine that answers first,
and passes the answer on as it comes.

A client's request is one task, which belongs to its connection. Nothing of an answer is
sent before its first byte has come, so that until then another engine can take over. If
the client leaves, the connection to the engine is closed, and the engine drops the
request.
"""

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import trio

from infinistore.addresses import ROUTER_STATUS_PATH
from infinistore.client import AsyncStore
from infinistore.kept_errors import KeptError
from infinistore.routing.fleet import Member, Role
from infinistore.routing.http import (
    BROKEN,
    Address,
    Asked,
    ClientConnection,
    ClientGone,
    Connect,
    EngineFailed,
    HttpLimits,
    InThread,
    Refused,
    asking,
)
from infinistore.routing.lookups import Lookups
from infinistore.routing.metrics import MEDIA_TYPE, Metrics
from infinistore.routing.prompts import GENERATING, Prompt, are_tokens, read_prompt
from infinistore.routing.recording import AnswerLength, Recording
from infinistore.routing.watcher import Watcher
from infinistore.scheduling import LeastWork, Plan, Policy, Request, create_policy

_log = logging.getLogger("infinistore.router")
_T = TypeVar("_T")
_MOST_SAID_BYTES: Final = 16 * 1024 * 1024
"""The answer to a prompt that is only computed."""
_MOST_TRIES: Final = 3
"""How many engines a request is sent to, if none answers."""
_FOR_PROBES: Final = 64
"""Connections beyond `most_connections` that may ask for the router's health."""
_MOST_LONG_BODIES: Final = 16
_LARGE_BYTES: Final = 1024 * 1024
"""A body from this length on is decoded beside the loop."""
_NOT_FOR_PREFILL: Final = frozenset(("stream_options", "max_completion_tokens", "n", "best_of", "min_tokens"))
_ENGINE, _PREDICTED = b"x-infinistore-engine", b"x-infinistore-predicted-ms"


@attrs.frozen(kw_only=True)
class RouterOptions:
    """What a router is to do. Times are in seconds.

    Engines are those of `engines`, of the lines of `engines_file`, which is read again
    when it changes, and if `announced`, those that have announced a URL in the store.
    """

    engines: Mapping[str, tuple[Address, Role]] = attrs.field(factory=dict)
    engines_file: Path | None = None
    announced: bool = False
    policy: str = "soonest"
    token: str | None = None
    """What clients have to show; None: nothing."""
    engine_key: str | None = None
    """What engines want to be shown; None: what the client shows, without a `token`."""
    split_above_tokens: int = 512
    """With engines for prompts alone: shorter uncached rests go straight to decode."""
    tokenize_s: float = 0.05
    """How long to wait for the tokens of a short prompt, and for the store."""
    drain_s: float = 30.0
    record: Path | None = None
    """Where to write a trace of the prompts."""
    record_bytes: int = 1 << 30
    """The most that it may have."""
    most_connections: int = 2048
    limits: HttpLimits = attrs.field(factory=HttpLimits)


@attrs.frozen
class _Job:
    """A request of a client, with what is known of its prompt."""

    client: ClientConnection
    asked: Asked
    prompt: Prompt
    request: Request
    arrived: float
    """When it came, on the router's clock."""
    length: AnswerLength | None = None
    """Counts the answer, if that is recorded."""


class Router:
    """Serves clients, until it is cancelled or drained.

    `connect` opens a stream to an engine. `store`, if there is one, says how much of a
    prompt is stored, and which engines there are.
    """

    def __init__(
        self,
        options: RouterOptions,
        store: AsyncStore | None = None,
        *,
        connect: Connect = Address.connect,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        """Raises ConfigError for a policy that cannot be used."""
        self._options = options
        self._connect = connect
        self._in_thread = in_thread
        self._policy: Policy = create_policy(options.policy)
        self._simple = LeastWork()
        self._policy_failed = False
        # A client that shows the router's token shows engines nothing of their own.
        self._key = "" if options.engine_key is None and options.token is not None else options.engine_key
        self._watcher = Watcher(
            options.engines,
            file=options.engines_file,
            store=store,
            announced=options.announced,
            key=self._key,
            connect=connect,
            in_thread=in_thread,
        )
        self.fleet = self._watcher.fleet
        self.metrics = Metrics(self.fleet, trio.current_time)
        self._lookups = Lookups(store, self._tokenize, self.metrics, within_s=options.tokenize_s, in_thread=in_thread)
        self._recording = None
        if options.record is not None:
            self._recording = Recording(options.record, options.record_bytes, in_thread)
        self._clients: set[ClientConnection] = set()
        self._long_bodies = trio.CapacityLimiter(_MOST_LONG_BODIES)
        self._left = trio.Event()
        """Set when a client has left."""
        self._count = 0
        self._draining = False
        self._tasks: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines until cancelled. It has started when each was asked once.

        Raises:
            ConfigError: the file of the engines, or of the trace, cannot be used.
        """
        async with trio.open_nursery() as nursery:
            self._tasks = nursery
            if self._recording is not None:
                await nursery.start(self._recording.run)
            await nursery.start(self._watcher.run)
            task_status.started()

    async def serve(
        self,
        listeners: list[trio.abc.Listener[Any]],
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve clients until `stop`; then finish the requests that are under way."""
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, self.serve_client, listeners, handler_nursery=connections)
                )
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel()
            self._draining = True
            for client in self._clients:
                client.finish()
            with trio.move_on_after(self._options.drain_s):
                while self._clients:
                    self._left = trio.Event()
                    await self._left.wait()
            connections.cancel_scope.cancel()

    async def serve_client(self, stream: trio.abc.Stream) -> None:
        """Serve one connection until its client leaves or breaks a rule."""
        client = ClientConnection(stream, self._options.limits, self._long_bodies)
        self._clients.add(client)
        try:
            async with stream:
                await self._serve(client)
        except (ClientGone, *BROKEN):
            pass
        except Exception:  # noqa: BLE001  # a fault of ours in one connection must not end all the others
            _log.exception("a connection ended by an internal error")
        finally:
            client.release()
            self._clients.discard(client)
            self._left.set()

    async def _serve(self, client: ClientConnection) -> None:
        try:
            over = len(self._clients) - self._options.most_connections
            while over <= _FOR_PROBES and (asked := await client.next_request()) is not None:
                if over > 0 and asked.path != "/health":
                    raise Refused(503, f"{self._options.most_connections} clients are connected; try again in a moment")
                if self._draining:
                    client.is_last = True
                try:
                    self._check_token(asked)
                    await self._answer(client, asked)
                except Refused as refused:
                    self.metrics.refused.labels(refused.status).inc()
                    await client.answer(refused.status, refused.body())
                except ClientGone:
                    self.metrics.clients_gone.inc()
                    raise
        except Refused as refused:
            self.metrics.refused.labels(refused.status).inc()
            await client.refuse(refused)

    def _check_token(self, asked: Asked) -> None:
        if self._options.token is None or asked.path == "/health":
            return
        shown = asked.header(b"authorization").removeprefix(b"Bearer ").strip()
        if not hmac.compare_digest(shown, self._options.token.encode()):
            raise Refused(401, "the token is missing or wrong: send it as the API key")

    async def _answer(self, client: ClientConnection, asked: Asked) -> None:
        match asked.method, asked.path:
            case b"GET", "/health":
                if self._draining or not any(member.is_up for member in self.fleet):
                    raise Refused(503, "the router stops" if self._draining else self._nobody())
                await client.answer(200, b"{}")
            case b"GET", "/metrics":
                await client.answer(200, self.metrics.text(), MEDIA_TYPE)
            case b"GET", "/v1/models":
                await client.answer(200, json.dumps(self._models()).encode())
            case b"GET", path if path == ROUTER_STATUS_PATH:
                await client.answer(200, json.dumps(self.status()).encode())
            case b"POST", path if path in GENERATING:
                await self._while_there(client, partial(self._generate, client, asked))
            case _:
                await self._while_there(client, partial(self._pass_on, client, asked))

    async def _while_there(self, client: ClientConnection, work: Callable[[], Awaitable[None]]) -> None:
        """Do it, and stop if the client leaves."""
        problem: KeptError | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal problem
                await client.until_gone()
                problem = KeptError(ClientGone())
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                await work()
            except (Refused, ClientGone) as error:
                problem = KeptError(error)
            nursery.cancel_scope.cancel()
        if problem is not None:
            raise problem.again()

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [card for _, card in sorted(self.fleet.cards().items())]}

    def status(self) -> dict[str, Any]:
        """Return what the monitor shows."""
        now = trio.current_time()
        return {"policy": self._options.policy, "engines": [member.status(now) for member in self.fleet]}

    def _nobody(self) -> str:
        """Return why no engine can take a request."""
        problems = [f"{member.address.url}: {member.problem}" for member in self.fleet][:4]
        return f"no engine is up ({'; '.join(problems)})" if problems else "there is no engine yet"

    # Requests

    async def _generate(self, client: ClientConnection, asked: Asked) -> None:
        """Answer a request with a prompt."""
        arrived = trio.current_time()
        body = await self._decoded(asked.body)
        prompt = read_prompt(asked.path, body)
        members = self._able(prompt.model)
        request = await self._lookups.request_of(prompt, members)
        prefills = [member for member in members if member.role == "prefill"]
        others = [member for member in members if member.role != "prefill"]
        reason = self._options.policy if request.hashes else "length"
        if prefills and others and isinstance(body, dict):
            uncached = request.tokens - request.tokens_of(request.stored_blocks)
            if uncached <= self._options.split_above_tokens:
                reason = "short rest"
            elif await self._prefill(asked, body, request, prefills):
                request = attrs.evolve(request, stored_blocks=len(request.hashes))
                reason = "decode"
        job = _Job(client, asked, prompt, request, arrived)
        if self._recording is None:
            await self._send(job, others or prefills, reason)
            return
        length = AnswerLength()
        try:
            await self._send(attrs.evolve(job, length=length), others or prefills, reason)
        finally:
            self._recording.note(request, prompt.model, arrived, length.tokens)

    async def _decoded(self, body: bytes) -> object:
        """Return what a body says; None if it is no JSON, which the engine will say."""
        try:
            return json.loads(body) if len(body) < _LARGE_BYTES else await self._in_thread(json.loads, body)
        except (ValueError, RecursionError):
            return None

    async def _pass_on(self, client: ClientConnection, asked: Asked) -> None:
        """Send a request without a prompt to an engine as it is."""
        body = await self._decoded(asked.body) if asked.body else None
        model = body.get("model") if isinstance(body, dict) else None
        members = self._able(model if isinstance(model, str) else "")
        others = [member for member in members if member.role != "prefill"]
        job = _Job(client, asked, Prompt(), Request(1), trio.current_time())
        await self._send(job, others or members, "other path")

    def _able(self, model: str) -> list[Member]:
        """Return the engines that can take a request for this model."""
        if not any(member.is_up for member in self.fleet):
            raise Refused(503, self._nobody())
        if members := self.fleet.able(model):
            return members
        raise Refused(404, f"no engine serves the model {model!r}, but {', '.join(sorted(self.fleet.cards()))}")

    async def _send(self, job: _Job, members: Sequence[Member], reason: str) -> None:
        """Have one of these engines answer a request."""
        try:
            await self._try_each(job.request, members, reason, partial(self._forward, job))
        except EngineFailed as error:
            raise Refused(502, f"no engine has answered: {error}") from None

    async def _try_each(
        self, request: Request, members: Sequence[Member], reason: str, attempt: Callable[[Member], Awaitable[_T]]
    ) -> _T:
        """Do it with the engine that the policy picks, and while no byte of an answer
        has come, with the next one: not with all, for the request may be the cause.

        Raises:
            EngineFailed: none has answered. Says why of each.
        """
        left, problems = list(members), list[str]()
        while left and len(problems) < _MOST_TRIES:
            member = self._pick(request, left)
            left.remove(member)
            member.picked[reason] += 1
            try:
                return await attempt(member)
            except EngineFailed as error:
                problems.append(str(error))
                self._note_failure(member, error)
        raise EngineFailed("; ".join(problems))

    def _note_failure(self, member: Member, error: EngineFailed) -> None:
        member.failed_requests += 1
        self._watcher.note_failure(member, error)

    def _pick(self, request: Request, members: Sequence[Member]) -> Member:
        """Return the policy's choice; if it fails, that of a simple one."""
        by_engine = {id(member.engine): member for member in members}
        engines, now = [member.engine for member in members], trio.current_time()
        try:
            return by_engine[id(self._policy.pick(request, engines, now))]
        except Exception:  # noqa: BLE001  # a policy is somebody else's code
            if not self._policy_failed:
                self._policy_failed = True
                _log.exception("the policy failed; least-work takes its place where it does (told once)")
        return by_engine[id(self._simple.pick(request, engines, now))]

    async def _forward(self, job: _Job, member: Member) -> None:
        """Send a request to this engine, and pass the answer on.

        Raises:
            EngineFailed: it did not answer by a single byte.
            ClientGone: the client left, or the engine stopped in between.
        """
        client, prompt = job.client, job.prompt
        limits, began = self._options.limits, trio.current_time()
        if not prompt.streams:  # the first byte comes with the last token
            limits = attrs.evolve(limits, first_byte_s=limits.answer_s)
        with self._sent(member, job.request, followed=prompt.streams) as (plan, answered):
            async with asking(member.address, job.asked, limits, self._connect, key=self._key) as answer:
                now = trio.current_time()
                member.answered()
                if prompt.streams and answer.status == 200:
                    answered()
                    member.first_tokens.append((plan.first_token_s, now - began))
                    self.metrics.first_token.observe(now - job.arrived)
                    self.metrics.predicted.observe(plan.first_token_s)
                about = [(_ENGINE, member.address.url.encode()), (_PREDICTED, b"%d" % (1e3 * plan.first_token_s))]
                await client.begin(answer.status, [*answer.headers, *about])
                more = answer.piece if job.length is None else job.length.counting(answer.piece)
                with trio.move_on_after(limits.answer_s) as scope:
                    try:
                        await client.pass_on(await more(), more)
                    except EngineFailed as error:  # too late for another one
                        self._note_failure(member, error)
                        raise ClientGone from None
                if scope.cancelled_caught:
                    _log.warning("an answer took too long, and was ended", extra={"engine": member.address.url})
                    raise ClientGone

    async def _prefill(
        self, asked: Asked, body: Mapping[str, Any], request: Request, members: Sequence[Member]
    ) -> bool:
        """Have a prompt computed and stored. Return whether that was done."""
        short = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
        first = attrs.evolve(asked, body=json.dumps({**short, "stream": False, "max_tokens": 1}).encode())

        async def compute(member: Member) -> bool:
            with self._sent(member, request, followed=True) as (_, answered):
                limits = self._options.limits
                async with asking(member.address, first, limits, self._connect, key=self._key) as answer:
                    await answer.rest(_MOST_SAID_BYTES)
                    if answer.status != 200:
                        return False  # the other engine will say why
                    answered()
            member.answered()
            return True

        try:
            return await self._try_each(request, members, "prefill", compute)
        except EngineFailed:
            return False

    @contextmanager
    def _sent(self, member: Member, request: Request, *, followed: bool) -> Iterator[tuple[Plan, Callable[[], None]]]:
        """Count a request at an engine within the block. The function that comes with
        its plan notes the first token; without `followed`, nobody sees that, and it
        counts as come when it was expected.
        """
        self._count += 1
        name, engine = self._count, member.engine
        plan = engine.send(name, request, trio.current_time())
        for source, tokens in (
            ("engine", plan.cached_tokens),
            ("store", plan.reused_tokens - plan.cached_tokens),
            ("computed", request.tokens - plan.reused_tokens),
        ):
            self.metrics.prompt_tokens.labels(source).inc(tokens)

        async def presume() -> None:
            await trio.sleep(plan.first_token_s)
            engine.lost(name, trio.current_time())

        if not followed:
            self._tasks.start_soon(presume)
        member.under_way += 1
        try:
            yield plan, lambda: engine.answered(name, trio.current_time())
        finally:
            member.under_way -= 1
            engine.lost(name, trio.current_time())

    async def _tokenize(self, member: Member, question: Mapping[str, Any]) -> list[int] | None:
        """Return the tokens of a prompt, by an engine; None if it does not tell."""
        try:
            status, said = await self._watcher.ask(member, b"POST", b"/tokenize", json.dumps(question).encode())
            tokens = json.loads(said)["tokens"] if status == 200 else None
        except (EngineFailed, ValueError, LookupError, TypeError):
            return None
        return tokens if are_tokens(tokens) else None
