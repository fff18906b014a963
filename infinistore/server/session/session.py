"""The sessions of a server: each is one client's connection, from the reply to its
hello until the end. What all of them share, who may make which request, those that are
open, and what the earlier moved. `infinistore.answers` has the answers of any store.

A session gives back what its client holds when the connection is over. It answers
requests one after the other, so a slow reader delays only its own. A pipelined request
waits in the socket. With tenants, half of the places are divided among them, and each
tenant's share, at least one place, is kept for it. The rest is for whoever comes first.
So no tenant can take all places.
"""

import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from infinistore.access.audit import Audit
from infinistore.access.identity import ALL_ROLES, DEFAULT_IDENTITY, Identity, Proof, Role
from infinistore.answers import ANSWERS, removals
from infinistore.core.clients import Client
from infinistore.core.store import StoreCore
from infinistore.disk.tiers import Tiers
from infinistore.errors import (
    AuthenticationFailed,
    InfiniStoreException,
    InvalidRequest,
    LimitExceeded,
    PermissionDenied,
    ProtocolError,
    ServerReplaced,
    StoreUnavailable,
    TransferFailed,
)
from infinistore.kept_errors import KeptError
from infinistore.protocol import messages
from infinistore.protocol.messages import (
    ONE_WAY,
    ErrorReply,
    Evict,
    FollowRemovals,
    HelloReply,
    Message,
    Purge,
    Reply,
    Statistics,
    StatisticsReply,
    TakeOver,
    Tree,
)
from infinistore.protocol.server_connection import Received, ServerConnection, TooManyKeys
from infinistore.protocol.states import State
from infinistore.protocol.versions import Capability
from infinistore.server.budgets import BodyBudget, LogBudget
from infinistore.server.connection import (
    INTERNAL_ERROR,
    LINGER_S,
    Conversation,
    Holdings,
    SessionLimits,
    Traffic,
    linger_if_unread,
    send_fatal_error,
)
from infinistore.server.disk import ServerDisks, settle, time_for_disks_s
from infinistore.server.maintenance import PoolGrowth
from infinistore.server.movers.base import ConnectionMover, Handler, Mover, QuickHandler
from infinistore.server.recorder import CANCELLED, OK, Recorder, outcome_of
from infinistore.server.session.receiving import AnswersAtOnce, Receiving
from infinistore.server.take_over.giving import HandoverServer, refuse_take_over, socket_of
from infinistore.server.take_over.kept import Keeping
from infinistore.statistics import ClientStatistics
from infinistore.tenant_limits import TenantLimits
from infinistore.transports.base import Stream, drive

if TYPE_CHECKING:
    from infinistore.server.budgets import Rates

_log = logging.getLogger("infinistore.server")


@attrs.frozen
class ServerContext:
    """The store, and the limits and counters that belong to the server as a whole."""

    tiers: Tiers
    """The store that a session uses."""
    hello: HelloReply
    """The answer to every Hello."""
    limits: SessionLimits
    statistics: Callable[[bool], Awaitable[Tree]]
    """The answer to a Statistics request, without or with details."""
    movers: Sequence[Mover]
    """The movers of the server; the first with a handler for a request answers it."""
    growth: PoolGrowth | None
    """What makes the pool larger, if it may grow."""
    disks: ServerDisks
    """All disks of the server."""
    recorder: Recorder
    log_budget: LogBudget
    body_budget: BodyBudget
    giving: HandoverServer | None = None
    """What lets another process take the server's place, if one may."""
    keeping: Keeping | None = None
    """What keeps the pool for the next run of the service, if anything does."""
    rates: "Rates | None" = None
    """How fast requests are read, if that is limited."""

    @property
    def core(self) -> StoreCore:
        """The memory of the store."""
        return self.tiers.core


MAX_WAIT_S = 10.0
"""How long one request waits at most. A client that has left is noticed then."""
_DEADLINE_SHARE = 0.5
"""The part of the caller's time that a wait may take."""


class RemovalWaits:
    """The answers to `FollowRemovals` on one connection."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._core: StoreCore = conversation.core
        self._event: trio.Event | None = None
        self._hurried = False

    def hurry(self) -> None:
        """Wait no longer, now and later: the session is to end."""
        self._hurried = True
        if self._event is not None:
            self._event.set()

    async def answer(self, request: FollowRemovals, received: Received) -> None:
        """Reply with what was removed, as soon as something was or the wait is over."""
        wait_s = min(request.wait_us / 1e6, MAX_WAIT_S)
        if received.deadline_us:
            wait_s = min(wait_s, _DEADLINE_SHARE * received.deadline_us / 1e6)
        until = trio.current_time() + wait_s
        reply = removals(request, self._conversation.tiers)
        while not reply.keys and not reply.missed and reply.log == request.log and not self._hurried:
            if reply.number == request.number and not await self._wait(until):
                break
            request = FollowRemovals(reply.log, reply.number, request.limit, request.wait_us)
            reply = removals(request, self._conversation.tiers)
        await self._conversation.reply(reply)

    async def _wait(self, until: float) -> bool:
        """Wait for a removal, or for the end of a key; False if the time is over."""
        now = trio.current_time()
        if now >= until:
            return False
        retention = self._core.retention
        ends_s = retention.ends[0][0] - retention.clock() if retention.ends else until - now
        self._event = event = trio.Event()
        self._core.removal_log.waiting.append(event.set)
        try:
            with trio.move_on_at(min(until, now + max(ends_s, 0.001))):
                await event.wait()
        finally:
            self._event = None
            self._core.removal_log.stop_waiting(event.set)
        return True


_READ: Final = frozenset((Role.READ,))
_WRITE: Final = frozenset((Role.WRITE,))
_EITHER: Final = _READ | _WRITE
_MONITOR: Final = frozenset((Role.MONITOR,))
_ADMIN: Final = frozenset((Role.ADMIN,))

ROLES: Final[Mapping[type[Message], frozenset[Role]]] = {
    messages.Hello: ALL_ROLES,
    messages.Put: _WRITE,
    messages.Get: _READ,
    messages.Exists: _READ,
    messages.MatchPrefix: _READ,
    messages.ReleaseHold: _READ,
    messages.Delete: _WRITE,
    messages.ListKeys: _READ,
    messages.Purge: _ADMIN,
    messages.Evict: _ADMIN,
    messages.Statistics: _MONITOR,
    messages.Verify: _READ,
    messages.Flush: _WRITE,
    messages.Prefetch: _READ,
    messages.Pin: _WRITE,  # it takes room from everybody
    messages.TimesLeft: _READ,
    messages.FollowRemovals: _READ,
    messages.Mark: _WRITE,
    messages.MapArenas: ALL_ROLES,  # for writing only with WRITE, and none without READ
    messages.MapTables: _EITHER,
    messages.Reserve: _WRITE,
    messages.Commit: _WRITE,
    messages.Prepare: _WRITE,
    messages.Lease: _READ,
    messages.Release: ALL_ROLES,  # giving back needs no role: one may have been taken away meanwhile
    messages.Abort: ALL_ROLES,
    messages.Touch: _READ,
    messages.TakeOver: _ADMIN,
    messages.RdmaConnect: _EITHER,
    messages.RdmaPut: _WRITE,
    messages.RdmaGet: _READ,
    messages.RdmaFill: _WRITE,
    messages.RdmaFetch: _READ,
}
"""The roles for each request; one of them suffices."""


OF_OPERATORS: Final = frozenset((messages.TakeOver,))
"""The requests that concern the whole server, whatever the role: for operators only."""
_OF_SUCCESSORS: Final = frozenset((messages.Hello, messages.TakeOver))


def refusals(identity: Identity) -> dict[type[Message], Handler]:
    """Return a handler for each request that somebody may not make."""
    if identity.proof is Proof.SUCCESSOR:
        refused = ROLES.keys() - _OF_SUCCESSORS
    else:
        refused = {
            kind
            for kind, roles in ROLES.items()
            if not roles & identity.roles or (kind in OF_OPERATORS and not identity.operator)
        }
    return {kind: _ignore if kind in ONE_WAY else _refusal(identity, kind) for kind in refused}


def _refusal(identity: Identity, kind: type[Message]) -> Handler:
    role = min(ROLES[kind], key=lambda role: role.value)

    async def refuse(message: Message, received: Received) -> None:
        identity.check(role, kind.__name__)
        raise PermissionDenied(
            f"{kind.__name__} is for operators, and tenant {identity.tenant} is none; the operator of the server adds "
            "operator: true in the tenants file"
        )

    return refuse


async def _ignore(message: Message, received: Received) -> None:
    """What has no reply can be refused only by doing nothing."""


async def refuse_too_many_keys(message: Any, received: Received) -> None:
    """Handle `TooManyKeys`."""
    raise LimitExceeded(message.why)


async def _refuse(error: type[InfiniStoreException], why: str, message: Message, received: Received) -> None:
    raise error(f"{type(message).__name__}: {why}")


def open_movers(
    movers: Sequence[Mover], conversation: Conversation, holdings: Holdings
) -> tuple[list[ConnectionMover], dict[type[Message], Handler], dict[type[Message], QuickHandler]]:
    """Open the movers that are available on a connection; return them, and what handles
    each request, and at once.

    The first mover in order that handles a request gets it. A request that none of them
    handles is refused with the reason of the first mover that knows it.
    """
    opened: list[ConnectionMover] = []
    handlers: dict[type[Message], Handler] = {}
    quick: dict[type[Message], QuickHandler] = {}
    refused: dict[type[Message], Handler] = {}
    try:
        for mover in movers:
            why = mover.unavailable(conversation)
            if why:
                for kind in mover.requests:
                    refused.setdefault(kind, partial(_refuse, mover.refusal, why))
                continue
            one = mover.open(conversation, holdings)
            opened.append(one)
            taken = handlers.keys() | quick.keys()
            handlers |= {kind: handler for kind, handler in one.handlers.items() if kind not in taken}
            quick |= {kind: handler for kind, handler in one.quick.items() if kind not in taken}
    except BaseException:
        for one in opened:
            one.close()
        raise
    return opened, {**refused, **handlers}, quick


DISCARDED_BYTES = 16 * 1024 * 1024
"""Up to this length, the rest of a refused payload is discarded, not the connection."""
_REVOKED = (
    "the token of this connection was revoked, or its tenant removed; ask for a new token (infinistore tenant rotate)"
)
_ADMINISTRATIVE = frozenset((Purge, Evict))
SHARED_MEMORY: Final = "shm"
"""What the statistics call the transport of clients that have mapped memory of the
server."""


class Session:
    """Serves a client until its stream ends. `run` returns when the session is over,
    whatever the client did.

    `connection` has received the client's hello, which the session answers. `transport`
    is what the payload travels over at first. No other session of the server has the
    `number`. `identity` is what the handshake proved.
    """

    def __init__(
        self,
        stream: Stream,
        connection: ServerConnection,
        context: ServerContext,
        name: str,
        transport: str,
        *,
        number: int,
        identity: Identity = DEFAULT_IDENTITY,
        audit: Audit | None = None,
    ) -> None:
        self.name = name
        self.number = number
        self.connected_at = trio.current_time()
        self._stream = stream
        self._context = context
        self._limits = context.limits
        self._conversation = conversation = Conversation(
            stream,
            connection,
            context.tiers,
            context.core.open_client(name),
            transport=transport,
            limits=context.limits,
            growth=context.growth,
            identity=identity,
        )
        self._connection = connection
        self.traffic = conversation.traffic
        self.over = trio.Event()
        """Set when the conversation is over; the client may still hold space."""
        self._scope = trio.CancelScope()
        budget, stall_s, end = context.body_budget, context.limits.grace_s, self._scope.cancel
        self._receiving = Receiving(connection, stream, budget, stall_s, end, tenant=identity.tenant)
        self._finishing = False
        self._audit = audit or Audit()
        self._revoked = False
        self._replaced = ""
        self._holdings = Holdings(conversation)
        self._removed = RemovalWaits(conversation)
        try:
            self._movers, handlers, quick = open_movers(context.movers, conversation, self._holdings)
        except BaseException:
            self._holdings.give_back()
            raise
        self._handlers: dict[type[Any], Handler] = {
            TooManyKeys: refuse_too_many_keys,
            Statistics: self._statistics,
            FollowRemovals: self._removed.answer,
            **handlers,
        }
        giving = context.giving
        self._handlers[TakeOver] = refuse_take_over if giving is None else partial(giving.answer, conversation)
        self._answers = ANSWERS
        self._at_once = AnswersAtOnce(conversation, self._holdings, context.recorder)
        self._permitted = self._handlers, self._answers, quick | self._at_once.own
        self._permit(identity)

    @property
    def requests(self) -> frozenset[type[Message]]:
        """The requests with a handler on this connection, which may refuse."""
        return frozenset((*ANSWERS, *self._handlers, *self._at_once.handlers)) - {TooManyKeys}

    @property
    def transport(self) -> str:
        """What the payload travels over."""
        return self._conversation.transport

    def statistics(self, now: float) -> ClientStatistics:
        """Return what `stats` and the management API show of this connection. `now` is
        that of Trio's clock, the same for all connections that are shown together.
        """
        conversation = self._conversation
        shared = conversation.shares_memory and self.transport == "unix"
        return ClientStatistics(
            name=self.name,
            transport=SHARED_MEMORY if shared else self.transport,
            connected_s=now - self.connected_at,
            **self.traffic.figures(),
            pinned_bytes=conversation.client.pinned_bytes,
            id=f"{self._context.hello.instance}-{self.number}",
        )

    @property
    def identity(self) -> Identity:
        """Whose session it is, and what it may do."""
        return self._conversation.identity

    def renew(self, identity: Identity | None) -> None:
        """Go on with these roles and limits; None ends the session at once, whatever is
        under way. So does the loss of a role by which the client has memory of the
        server: what it does there, nobody is asked for.
        """
        before = self.identity
        if identity is not None and identity.can_follow(before, maps=self._conversation.shares_memory):
            self._permit(identity)
            return
        self._holdings.withdraw_tables()
        self._revoked = identity is None
        self._replaced = f"what tenant {before.tenant} may do has changed, connect again" if identity else ""
        self._scope.cancel()

    def _permit(self, identity: Identity) -> None:
        self._conversation.identity = identity
        handlers, answers, quick = self._permitted
        if identity.roles != ALL_ROLES or not identity.operator:
            refused = refusals(identity)
            handlers = handlers | refused
            answers = {kind: answer for kind, answer in answers.items() if kind not in refused}
            quick = {kind: answer for kind, answer in quick.items() if kind not in refused}
        self._handlers, self._answers, self._at_once.handlers = handlers, answers, quick

    def finish(self) -> None:
        """End the session after the current request, or at once if there is none."""
        self._finishing = self._at_once.ended = True
        self._removed.hurry()
        if self._connection.state is State.READY:
            self._scope.cancel()

    def replace(self) -> None:
        """As `finish`; the client is told that another process takes this place."""
        self._replaced = "another process takes the server's place"
        self.finish()

    def cut(self) -> None:
        """End the session, whatever it does."""
        self._scope.cancel()

    @property
    def socket(self) -> socket.socket | None:
        """The socket of the connection, if it has one."""
        return socket_of(self._stream)

    @property
    def takes_over(self) -> bool:
        """Whether its client takes the server's place."""
        return self._context.giving is not None and self._context.giving.taker is self._conversation

    @property
    def touching(self) -> Client | None:
        """The client in the core, if it may still touch the pool."""
        client = self._conversation.client
        return client if client.state != "closed" else None

    async def run(self) -> None:
        """Serve the stream until the client leaves, breaks the protocol, or `finish` is
        called.

        Anything else that it raises, except for cancellation, is a bug in the server.
        It is then unknown whether the client can still write to what it holds, so that
        space is never used again.
        """
        try:
            try:
                await self._until_over()
                if self._replaced:
                    await self._say_replaced()
                self.over.set()
                await self._until_quiet()
            except trio.Cancelled:
                self._give_back()  # the server is going, and the memory with it
                raise
            self._give_back()
        except Exception:
            self._holdings.quarantine()
            raise
        finally:
            if self._context.giving is not None:
                self._context.giving.left(self._conversation)
            self.over.set()
            self._stream.close()
            self._receiving.free()

    def _give_back(self) -> None:
        """End what the client holds, which nobody can touch any more."""
        for mover in self._movers:
            mover.close()
        self._holdings.give_back()

    async def _until_over(self) -> None:
        try:
            with self._scope:
                await self._converse()
            ended = self._receiving.ended
            self._receiving.free()
            if self._finishing and not self._replaced:
                await linger_if_unread(self._stream, self.socket, read_ahead=self._connection.room is None)
            if self._revoked:
                raise AuthenticationFailed(_REVOKED)
            if ended:
                raise LimitExceeded("others wait for room for their long requests, and this one did not come")
        except StoreUnavailable as error:
            _log.debug("connection lost", extra={"client": self.name, "error": str(error)})
        except InfiniStoreException as error:
            # What an invalid request names may be a key, and keys are nobody's business
            # above debug.
            why = type(error).__name__ if isinstance(error, InvalidRequest) else f"{type(error).__name__}: {error}"
            where = {"client": self.name, "tenant": self.identity.tenant, "transport": self.transport}
            self._context.log_budget.log(logging.INFO, "connection closed", **where, error=why)
            self.traffic.errors += 1
            await send_fatal_error(self._connection, self._stream, error)
        except Exception:  # noqa: BLE001  # a fault of ours in one session must not end all the others
            _log.exception("internal error", extra={"client": self.name, "transport": self.transport})
            self.traffic.errors += 1
            await send_fatal_error(self._connection, self._stream, InfiniStoreException(INTERNAL_ERROR))

    async def _say_replaced(self) -> None:
        """Tell the client that its next request was not done."""
        self._holdings.revoke_tables()
        connection = self._connection
        if (
            connection.state not in (State.READY, State.PAYLOAD)
            or Capability.TAKE_OVER not in connection.peer.capabilities
        ):
            return
        replaced = ServerReplaced(f"{self._replaced}; nothing of this was done")
        with trio.move_on_after(LINGER_S), suppress(StoreUnavailable):
            await drive(connection.reply_fatal(replaced), self._stream)
            await self._stream.send_eof()

    async def _until_quiet(self) -> None:
        """Wait until a client that still holds space or leases in mapped memory cannot
        touch them any more.

        The end of its side of the stream proves that. Until then its space stays in
        quarantine, without a timeout.
        """
        self._holdings.revoke_tables()
        if not self._conversation.client.pinned_bytes or not any(mover.client_touches_pool for mover in self._movers):
            return
        self._holdings.quarantine()
        with suppress(StoreUnavailable):
            await self._stream.send_eof()
            buffer = [memoryview(bytearray(64 * 1024))]
            while await self._stream.receive_into(buffer):
                pass

    async def _converse(self) -> None:
        await self._conversation.reply(self._context.hello)
        traffic = self.traffic
        recorder = self._context.recorder
        rates = self._context.rates
        logs_requests = _log.isEnabledFor(logging.DEBUG)
        if rates is not None and not await rates.rest_first(self.socket):
            return
        if rates is None and not logs_requests:
            self._receiving.answer_at_once(self._at_once.answer)
        while not self._finishing:
            if (received := await self._receiving.next()) is None:
                return
            start = recorder.clock()
            traffic.requests += 1
            self._holdings.listen()
            bytes_before = traffic.received_bytes + traffic.sent_bytes
            traffic.received_bytes += received.payload_bytes
            outcome = CANCELLED
            try:
                outcome = await self._serve(received)
            except Exception as error:
                outcome = outcome_of(error)
                raise
            finally:
                moved_bytes = traffic.received_bytes + traffic.sent_bytes - bytes_before
                elapsed_s = recorder.clock() - start
                recorder.record(type(received.message), self._conversation.transport, outcome, moved_bytes, elapsed_s)
                if logs_requests:
                    self._log_request(received, outcome, moved_bytes, elapsed_s)
            if rates is not None and not await rates.rest(moved_bytes, self.socket):
                return

    def _log_request(self, received: Received, outcome: str, moved_bytes: int, elapsed_s: float) -> None:
        fields = {
            "client": self.name,
            "request": type(received.message).__name__,
            "outcome": outcome,
            "payload_bytes": moved_bytes,
            "elapsed_us": round(elapsed_s * 1e6),
        }
        _log.debug("request", extra=fields)

    async def _serve(self, received: Received) -> str:
        """Answer a request, and return its outcome."""
        message = received.message
        try:
            begun = self._at_once.begin(received)
            self._receiving.reacts = self._at_once.likely
            if begun is not None:
                await self._conversation.send_answer(begun)
            elif (answer := self._answers.get(type(message))) is not None:
                conversation = self._conversation
                within_s = time_for_disks_s(received.deadline_us)
                answered = answer(message, conversation.tiers, conversation.client, within_s)
                reply = answered if isinstance(answered, Reply) else await settle(answered)
                if type(message) in _ADMINISTRATIVE:
                    self._note(message, attrs.asdict(reply))
                await conversation.reply(reply)
            else:
                outcome = await self._handlers[type(message)](message, received)
                if type(message) in _ADMINISTRATIVE:
                    self._note(message, {})
                return outcome or OK
        except (InvalidRequest, TransferFailed) as error:
            return await self._refuse(error, received)
        except (ProtocolError, StoreUnavailable):
            raise
        except ValueError as error:  # how the core refuses arguments
            return await self._refuse(InvalidRequest(str(error)), received)
        except InfiniStoreException as error:
            return await self._refuse(error, received)
        return OK

    async def _refuse(self, error: InfiniStoreException, received: Received) -> str:
        """Answer with an error; discard a short payload to keep the connection."""
        if self._connection.state is State.PAYLOAD and self._connection.payload_left <= DISCARDED_BYTES:
            within_s = self._limits.transfer_s(received.payload_bytes, received.deadline_us)
            with suppress(TimeoutError):
                await self._conversation.drive(self._connection.discard_payload(), within_s)
        if self._connection.state is not State.REPLYING:
            raise KeptError(error).again()
        self.traffic.errors += 1
        if isinstance(error, PermissionDenied):
            self._note(received.message, {"denied": True})
        _log.debug("request refused", extra={"client": self.name, "error": f"{type(error).__name__}: {error}"})
        await self._conversation.reply(ErrorReply(error.code, str(error)[:1000]))
        return outcome_of(error)

    def _note(self, message: Message, outcome: Mapping[str, object]) -> None:
        what = type(message).__name__
        event = "denied" if outcome.get("denied") else what.lower()
        self._audit.note(event, tenant=self.identity.tenant, says=self.name, request=what, **outcome)

    async def _statistics(self, request: Statistics, received: Received) -> None:
        await self._conversation.reply(StatisticsReply(await self._context.statistics(request.details)))


class SessionRegistry:
    """The open sessions, at most `most`; `advice` ends the refusal of one more."""

    def __init__(self, most: int, advice: str) -> None:
        self.most = most
        self._advice = advice
        self._open: dict[Session, None] = {}  # a set, in the order in which they came
        self._of_tenants: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()  # requests of sessions that are over, and connections, by tenant
        self._past = Traffic()
        self.refused = 0
        """How many connections were refused because the server had its most."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are open now."""
        return iter(list(self._open))

    def check_free(self, limits: TenantLimits, tenants: int = 1) -> None:
        """Count a refusal if there is no place for another session of the tenant with
        these limits, one of so many.

        Raises:
            LimitExceeded: the server, or the tenant, has its most.
        """
        try:
            if len(self._open) >= self.most:
                raise LimitExceeded(f"the server has its {self.most} connections; {self._advice}")
            self._check_share(limits, tenants)
        except LimitExceeded:
            self.refused += 1
            self._refused[limits.tenant] += 1
            raise

    def _check_share(self, limits: TenantLimits, tenants: int) -> None:
        has, most = self._of_tenants[limits.tenant], limits.max_connections
        if most is not None and has >= most:
            raise LimitExceeded(
                f"tenant {limits.tenant!r} has its max_connections={most} connections; close some, or raise "
                "max_connections in the tenants file"
            )
        share = max(1, self.most // 2 // max(1, tenants))
        if tenants > 1 and has >= share:
            kept = share * tenants - sum(min(share, one) for one in self._of_tenants.values())
            if len(self._open) + kept >= self.most:
                raise LimitExceeded(
                    f"tenant {limits.tenant!r} has {has} of the server's {self.most} connections, and the {kept} that "
                    f"are left are kept for other tenants; {self._advice}"
                )

    def add(self, session: Session) -> None:
        """Note that a session has begun."""
        self._open[session] = None
        self._of_tenants[session.identity.tenant] += 1

    def remove(self, session: Session) -> None:
        """Note that a session is over."""
        del self._open[session]
        tenant = session.identity.tenant
        self._of_tenants[tenant] -= 1
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
        self._refused[tenant] += session.traffic.errors
        self._past.add(session.traffic)

    def of_tenants(self) -> tuple[Counter[str], Counter[str]]:
        """Return the open connections, and the refusals, by tenant."""
        refused = self._refused.copy()
        for session in self._open:
            refused[session.identity.tenant] += session.traffic.errors
        return self._of_tenants.copy(), refused

    def traffic(self) -> Traffic:
        """What all sessions have moved so far."""
        total = attrs.evolve(self._past)
        for session in self._open:
            total.add(session.traffic)
        return total

    def statistics(self) -> Iterator[ClientStatistics]:
        """The figures of each open session."""
        now = trio.current_time()
        return (session.statistics(now) for session in self)
