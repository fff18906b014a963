"""A server as a node of a cluster; only a server with `--cluster` imports this. It
registers, stays registered, purges when the cluster was purged, drains on request, says
how far it is, and leaves.

A server that has blocks of an earlier process, on disk, serves as soon as it knows that
it missed no purge of the cluster. Any other serves at once, and goes on whatever
becomes of etcd. A drain passes the hottest blocks on to the nodes that own them now:
groups, that is keys with one hash tag, as wholes, the hottest first, the head of a
prefix before its tail. One batch is under way at a time, so that requests hardly
notice. Cancelled, it lets go of everything at once.
"""

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Unpack

import attrs
import trio
from xxhash import xxh3_64_intdigest

from infinistore.access.identity import Credentials
from infinistore.access.policy import Policy
from infinistore.addresses import host_and_port, with_port
from infinistore.client import StoreOptions, open_store
from infinistore.client.api.arguments import ttl_in_us
from infinistore.client.drivers.trio_driver import ClusterTrioStore
from infinistore.client.extension import Environment as ClientEnvironment
from infinistore.client.requests import Batch, Copy, Marks
from infinistore.cluster.documents import ClusterConfig, Drain
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration
from infinistore.cluster.locate import EtcdPlace, FilePlace, StaticPlace, parse_cluster_url
from infinistore.cluster.membership import Listener, Node, NodeState, StaticMembership, View
from infinistore.cluster.placement import Placement
from infinistore.cluster_io.etcd import EtcdConnections, FlowRunner
from infinistore.cluster_io.memberships import RunningMembership, make_membership, make_session
from infinistore.cluster_io.probing import ClusterEnvironment, Token, instance_asker
from infinistore.config import ServerConfig
from infinistore.core.clients import Client, Lease
from infinistore.core.index import NO_CHECKSUM, length_of
from infinistore.core.store import StoreCore
from infinistore.errors import (
    AuthenticationFailed,
    ConfigError,
    DeadlineExceeded,
    DiskFailed,
    InfiniStoreException,
    PartialPut,
    PermissionDenied,
)
from infinistore.kept_errors import KeptError
from infinistore.keys import hash_tag
from infinistore.protocol.versions import MINOR
from infinistore.secret_files import read_token
from infinistore.server.environment import Environment
from infinistore.server.server import Server
from infinistore.statistics import DrainStatistics, ListedNode, MembershipStatistics

_log = logging.getLogger("infinistore.cluster")


class _PeerToken:
    """The token that is in the file of --peer-token-file, for a server with tenants.

    Every node has the same tenants. So it must be good here, too.
    """

    def __init__(self, file: Path, policy: Policy) -> None:
        """Raises ConfigError if the file cannot be used."""
        self._file = file
        self._policy = policy
        self.token = self._read()

    async def reload_and_log(self) -> str:
        """Read the file again, and log the outcome; return the problem, if any."""
        try:
            self.token = self._read()
        except ConfigError as error:
            _log.error("the token for other nodes stays as it was", extra={"problem": str(error)})
            return str(error)
        return ""

    def _read(self) -> str:
        token = read_token(self._file, setting="peer_token_file")
        try:
            # What matters is whose it is: the other nodes see how this one connects.
            self._policy.identify(Credentials(token, private=True))
        except AuthenticationFailed:
            raise ConfigError(
                f"peer_token_file: the token in {self._file} is that of no tenant of this server; make one with"
                " `infinistore tenant add nodes --role monitor`, and give every node the same tenants file"
            ) from None
        return token


class Refusals:
    """Logs which nodes refuse this one, once each until they do not."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def note(self, node: Node, error: InfiniStoreException | None) -> None:
        """Take note of a node that answers, and why it refused, if it did."""
        if not isinstance(error, AuthenticationFailed | PermissionDenied):
            self._refused.discard(node.id)
        elif node.id not in self._refused:
            self._refused.add(node.id)
            _log.warning("another node refuses this one", extra={"node": node.id, "problem": str(error)})


class Others:
    """The nodes of a membership that stay, without one. It owns nothing."""

    def __init__(self, membership: StaticMembership | RunningMembership, node_id: str) -> None:
        self._membership = membership
        self._node_id = node_id
        self._of = self._view = View(-1)
        self._placement: tuple[View, Placement] | None = None

    @property
    def view(self) -> View:
        """The newest view; the same object until there is another one."""
        whole = self._membership.view
        if whole is not self._of:
            staying = tuple(
                node for node in whole.nodes if node.state is not NodeState.DRAINING and node.id != self._node_id
            )
            self._of, self._view = whole, attrs.evolve(whole, nodes=staying)
        return self._view

    @property
    def age_s(self) -> float:
        """For how long nothing has confirmed the view."""
        return self._membership.age_s

    def has_place(self, keys: Sequence[str]) -> list[bool]:
        """Tell for each key whether the one node may have it by the newest view, if it
        does not drain. What else it has is from before: no deletion has reached it.
        Nobody knows of a node that is not in the view: it may have any key.
        """
        whole = self._membership.view
        ids = [node.id for node in whole.nodes]
        if self._node_id not in ids:
            return [True] * len(keys)
        if self._placement is None or self._placement[0] is not whole:
            nodes = [
                attrs.evolve(node, state=NodeState.SERVING) if node.id == self._node_id else node
                for node in whole.nodes
            ]
            self._placement = whole, Placement(attrs.evolve(whole, nodes=tuple(nodes)))
        index = ids.index(self._node_id)
        return [index in places for places in self._placement[1].places(keys)]

    def wait_known(self, timeout_s: float) -> None:
        """Wait until there is a view."""
        self._membership.wait_known(timeout_s)

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Have a listener called with each new view."""
        return self._membership.add_listener(lambda view: listener(self.view))

    def close(self) -> None:
        """There is nothing to end."""


_SLICE_KEYS: Final = 512
_BATCH_KEYS: Final = 256
_TRIES: Final = 3
_BATCH_BYTES: Final = 4 * 1024 * 1024


@attrs.frozen
class PushLimits:
    """How much is passed on, in all and in a second."""

    most_bytes: int
    bytes_per_s: int
    settle_s: float = 1.0
    """How long clients that do not know of the drain may still write here."""


class OtherNodes:
    """Where blocks are passed on to: all nodes that this `store` knows."""

    def __init__(self, store: ClusterTrioStore) -> None:
        self._store = store

    async def marks(self, keys: Sequence[str]) -> Mapping[str, int | KeptError]:
        """Return the marks of the nodes that own these keys, by their ids."""
        return await self._store.drive(self._store.calls.call(Marks(keys)))

    async def missing(self, keys: Collection[str]) -> list[str]:
        """Return those of the keys that are not there."""
        there = await self._store.exists_many(keys) if keys else ()
        return [key for key, is_there in zip(keys, there, strict=True) if not is_there]

    async def copy(
        self, blocks: Mapping[str, memoryview], marks: Mapping[str, int | KeptError], ttl_s: float | None
    ) -> Collection[str]:
        """Put blocks that were read after the nodes had made these marks; return the
        keys that were there, or were deleted since.

        Raises:
            PartialPut: some were not stored.
            InfiniStoreException: none was.
        """
        batch = Batch(list(blocks), list(blocks.values()))
        return await self._store.drive(self._store.calls.call(Copy(batch, marks, ttl_in_us(ttl_s))))


@asynccontextmanager
async def open_nodes(
    url: str | None, environment: ClientEnvironment, **options: Unpack[StoreOptions]
) -> AsyncGenerator[OtherNodes, None]:
    """Open a store of a cluster, to pass blocks on to its nodes."""
    async with open_store(url, environment=environment, **options) as store:
        assert isinstance(store, ClusterTrioStore)
        yield OtherNodes(store)


@attrs.define(eq=False)
class _Group:
    keys: list[tuple[str, int]] = attrs.field(factory=list)
    """Its keys, with the lengths of their blocks."""
    size_bytes: int = 0
    left: int = 0
    """How many of its keys are not done yet."""
    moved: bool = False
    failed: bool = False


async def push(
    core: StoreCore,
    open_others: Callable[[], AbstractAsyncContextManager[OtherNodes]],
    has_place: Callable[[Sequence[str]], Sequence[bool]],
    limits: PushLimits,
    on_progress: Callable[[Drain], None],
) -> None:
    """Pass blocks on to the other nodes, until there are none that came
    meanwhile: those whose place this node is, as `has_place` says. What could not be
    moved is counted, and logged at the end.

    What fails is tried again, with new marks: the owner may have changed. So is what a
    node refuses because something was deleted meanwhile, and does not have, as it may
    be another key that was deleted.
    """
    drain = Drain()
    problem = ""
    client = core.open_client("drain", counted=False)
    try:
        async with open_others() as others:
            tried: set[str] = set()
            again: list[_Key] = []
            due = began = trio.current_time()
            while True:
                left_bytes = limits.most_bytes - drain.moved_bytes - sum(one.length_bytes for one in again)
                groups = await _hottest(core, has_place, left_bytes, tried)
                if not groups and not again:
                    break
                size_bytes = drain.size_bytes + sum(group.size_bytes for group in groups)
                drain = attrs.evolve(drain, groups=drain.groups + len(groups), size_bytes=size_bytes)
                on_progress(drain)
                keys = again + [_Key(group, key, length) for group in groups for key, length in group.keys]
                again = []
                tried.update(one.key for one in keys)
                done = 0
                while done < len(keys):
                    batch = await _put_next(core, client, others, keys[done : done + _BATCH_KEYS])
                    done += len(batch.keys) + len(batch.again)
                    again += batch.again
                    problem = batch.problem if batch.failed else problem
                    drain = attrs.evolve(_counted(drain, batch), elapsed_s=int(trio.current_time() - began))
                    on_progress(drain)
                    # What a slow node has not taken is not made up for.
                    due = max(due, trio.current_time() - 1.0) + sum(batch.moved.values()) / limits.bytes_per_s
                    await trio.sleep_until(due)
                await trio.sleep(limits.settle_s)
    except InfiniStoreException as error:  # of the store as a whole, when it is opened
        problem = str(error)
    finally:
        core.close_client(client)
    if problem:
        _log.warning("blocks were not passed on", extra={"groups": drain.failed_groups, "problem": problem})


async def _hottest(
    core: StoreCore, has_place: Callable[[Sequence[str]], Sequence[bool]], most_bytes: int, without: Container[str]
) -> list[_Group]:
    """Return the hottest groups that have `most_bytes` together, hottest keys first."""
    groups: dict[str, _Group] = {}
    keys = core.all_keys()
    keys.reverse()
    for first in range(0, len(keys), _SLICE_KEYS):
        part = keys[first : first + _SLICE_KEYS]
        for key, entry, is_ours in zip(part, core.index.get_many(part), has_place(part), strict=True):
            if entry is not None and is_ours and key not in without:
                tag = hash_tag(key)
                group = groups.get(tag)
                if group is None:
                    group = groups[tag] = _Group()
                length = length_of(entry)
                group.keys.append((key, length))
                group.left += 1
                group.size_bytes += length
        await trio.lowlevel.checkpoint()
    left_bytes = most_bytes
    chosen = []
    for group in groups.values():
        if group.size_bytes <= left_bytes:
            left_bytes -= group.size_bytes
            chosen.append(group)
    return chosen


@attrs.frozen
class _Key:
    """One block to be moved."""

    group: _Group
    key: str
    length_bytes: int
    tries: int = 1


@attrs.frozen
class _Batch:
    """What became of some keys that are done: the lengths of the blocks that were
    moved, and those that could not be. The others were there, or are gone.
    """

    keys: Sequence[_Key]
    moved: Mapping[str, int] = {}
    failed: Collection[str] = ()
    again: Sequence[_Key] = ()
    """Further keys that failed, and are to be tried again."""
    problem: str = ""


async def _put_next(core: StoreCore, client: Client, others: OtherNodes, keys: Sequence[_Key]) -> _Batch:
    """Put the first of these keys, as many as go at once."""
    keys = keys[: core.limits.max_batch_keys]
    marks = await others.marks([one.key for one in keys])
    lease = core.lease(client, [one.key for one in keys], max_bytes=_BATCH_BYTES, touch=False)
    try:
        keys = keys[: len(lease.entries)]
        items = _sound(core, [one.key for one in keys], lease)
        if not items:
            await trio.lowlevel.checkpoint()
            return _Batch(keys)
        problem = ""
        moved: dict[str, int] = {}
        failed: set[str] = set()
        for ttl_s, part in _by_time_left(core, items):
            there: Collection[str] = ()
            answered: Collection[str] = ()
            try:
                there = answered = await others.copy(part, marks, ttl_s)
            except PartialPut as error:
                answered = error.stored  # or skipped
                failed.update(error.failed, error.unknown)
                problem = str(error)
            except InfiniStoreException as error:
                failed.update(part)
                problem = str(error)
            try:
                refused = await others.missing(answered)
            except InfiniStoreException as error:
                refused = list(answered)
                problem = str(error)
            if refused:
                failed.update(refused)
                problem = problem or "they were deleted meanwhile, or a key that shares their slot"
            skipped = failed.union(there)
            moved |= {key: len(view) for key, view in part.items() if key not in skipped}
        again = {one.key for one in keys if one.key in failed and one.tries < _TRIES}
        return _Batch(
            [one for one in keys if one.key not in again],
            moved,
            failed - again,
            [attrs.evolve(one, tries=one.tries + 1) for one in keys if one.key in again],
            problem,
        )
    finally:
        core.release(lease)


def _by_time_left(core: StoreCore, items: Mapping[str, memoryview]) -> list[tuple[float | None, dict[str, memoryview]]]:
    """Return blocks by the seconds they have left (None: for good), if any."""
    parts: dict[float | None, dict[str, memoryview]] = {}
    for (key, view), left_s in zip(items.items(), core.retention.times_left(list(items)), strict=True):
        if left_s != 0:
            parts.setdefault(left_s, {})[key] = view
    return list(parts.items())


def _sound(core: StoreCore, keys: Sequence[str], lease: Lease) -> dict[str, memoryview]:
    """Return the sound blocks of a lease; drop those that are damaged."""
    found: dict[str, memoryview] = {}
    for key, view, checksum in zip(keys, lease.views, lease.checksums, strict=True):
        if view is None:
            continue
        if checksum in (NO_CHECKSUM, xxh3_64_intdigest(view)):
            found[key] = view
        else:
            core.verify(key)
    return found


def _counted(drain: Drain, batch: _Batch) -> Drain:
    """Count a batch, and the groups that it ends."""
    ended: list[_Group] = []
    for one in batch.keys:
        group = one.group
        group.left -= 1
        group.moved |= one.key in batch.moved
        group.failed |= one.key in batch.failed
        if not group.left:
            ended.append(group)
    return attrs.evolve(
        drain,
        moved_groups=drain.moved_groups + sum(group.moved and not group.failed for group in ended),
        skipped_groups=drain.skipped_groups + sum(not group.moved and not group.failed for group in ended),
        failed_groups=drain.failed_groups + sum(group.failed for group in ended),
        moved_blocks=drain.moved_blocks + len(batch.moved),
        moved_bytes=drain.moved_bytes + sum(batch.moved.values()),
        done_bytes=drain.done_bytes + sum(one.length_bytes for one in batch.keys),
    )


_TELL_S: Final = 2.0
"""How often others are told how far it is."""


class Drainer:
    """Drains one node whenever that is wanted.

    `push` passes blocks on, and calls what it is called with each time that it is
    further. `tell` hears now and then how far it is, and once that it is done.
    """

    def __init__(
        self, push: Callable[[Callable[[Drain], None]], Awaitable[None]], tell: Callable[[Drain], None]
    ) -> None:
        self._push = push
        self._tell = tell
        self._wanted = trio.Event()
        self._undisturbed = trio.Event()
        self._undisturbed.set()
        self._scope = trio.CancelScope()
        self._drain = Drain()
        self._before = Drain()
        """What earlier drains of this process have moved."""
        self._told_at = -math.inf

    def want(self, wanted: bool) -> None:
        """Drain from now on, or no longer."""
        self._scope.cancel()
        self._next()
        if wanted:
            self._wanted.set()
        else:
            self._unset()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Pass nothing on within the block; then begin again, if that was under way."""
        self._undisturbed = trio.Event()
        self._scope.cancel()
        try:
            yield
        finally:
            self._undisturbed.set()

    async def run(self) -> None:
        """Drain whenever it is wanted, until cancelled."""
        while True:
            await self._wanted.wait()
            await self._undisturbed.wait()
            self._next()
            with trio.CancelScope() as self._scope:
                try:
                    await self._push(self._note)
                except Exception:  # noqa: BLE001  # a fault of ours here must not end the server
                    _log.exception("internal error; what is left is not passed on")
            if not self._scope.cancel_called:
                self._unset()
                self._drain = attrs.evolve(self._drain, done=True)
                self._tell(self._drain)

    def statistics(self) -> DrainStatistics:
        """How far it is, and what it has moved since the process began."""
        drain, before = self._drain, self._before
        state = "drained" if drain.done else "draining" if self._wanted.is_set() else "none"
        return DrainStatistics(
            state=state,
            groups=drain.groups,
            moved_groups=drain.moved_groups,
            skipped_groups=drain.skipped_groups,
            failed_groups=drain.failed_groups,
            moved_groups_total=before.moved_groups + drain.moved_groups,
            moved_bytes_total=before.moved_bytes + drain.moved_bytes,
            size_bytes=drain.size_bytes,
            done_bytes=drain.done_bytes,
            elapsed_s=drain.elapsed_s,
            left_s=None if drain.done else drain.left_s,
        )

    def _unset(self) -> None:
        if self._wanted.is_set():  # else `run` may be waiting for it
            self._wanted = trio.Event()

    def _next(self) -> None:
        """Begin to count anew."""
        drain, before = self._drain, self._before
        self._before = Drain(
            moved_groups=before.moved_groups + drain.moved_groups, moved_bytes=before.moved_bytes + drain.moved_bytes
        )
        self._drain = Drain()

    def _note(self, drain: Drain) -> None:
        self._drain = drain
        if trio.current_time() >= self._told_at + _TELL_S:
            self._told_at = trio.current_time()
            self._tell(drain)


_LEAVE_S = 2.0
"""How long a server that ends tries to give its lease up."""
_PUT_S = 5.0
"""How long another node may take for what it is passed."""
_ORIGIN = "cluster"
"""Where something comes from, in the audit log, that whoever may write to etcd, or to
the file of the cluster, has asked for: who that was is not known here."""


@attrs.frozen
class _Registrar:
    """The registration of this server, and what runs it."""

    registration: Registration
    runner: FlowRunner
    may_serve: trio.Event

    def look(self, view: View) -> None:
        if self.registration.seen(view):
            self.runner.wake()

    def drain(self) -> None:
        self.registration.drain()
        self.may_serve.set()
        self.runner.wake()


class ClusterService:
    """What one server does in its cluster. `token` is that of its clients, with which
    it asks other nodes who they are. `has_old_blocks`: the memory of the server has
    blocks of an earlier process.
    """

    def __init__(
        self,
        config: ServerConfig,
        server: Server,
        environment: Environment,
        token: str,
        *,
        has_old_blocks: bool = False,
    ) -> None:
        """Raises ConfigError if a file that it needs cannot be used."""
        self._server = server
        machine = environment.cluster or ClusterEnvironment()
        self._client = environment.client or ClientEnvironment()
        self._node = _node_of(config, server, machine.host_name())
        self._drainer = Drainer(partial(self._push, config, token), self._tell_drain)
        self._waits = bool(config.disks) or (has_old_blocks and not config.take_over)
        self._url = parse_cluster_url(config.cluster or "")
        self._membership: StaticMembership | RunningMembership
        self._registrar: _Registrar | None = None
        self._listed_as_draining = False
        place = self._url.place
        if isinstance(place, StaticPlace):
            self._membership = StaticMembership(place.nodes, copies=place.copies)
            return
        tls = None
        if server.tls is not None:
            server.tls.peer_context()  # so that a file that cannot be used is known at once
            tls = server.tls.peer_context
        ask_instance = instance_asker(
            self._peer_token(config, token), tls, connect=machine.connect_node, on_answer=Refusals().note
        )
        self._membership = make_membership(
            place,
            clock=environment.clock,
            random=environment.random,
            connect_etcd=machine.connect_etcd,
            ask_instance=ask_instance,
        )
        if isinstance(place, EtcdPlace):
            may_serve = trio.Event()
            registration = Registration(
                make_session(place, environment.random),
                Layout(place.cluster),
                self._node,
                clock=environment.clock,
                random=environment.random,
                config=ClusterConfig(place.copies),
                has_old_blocks=bool(config.disks) or has_old_blocks,
                on_registered=may_serve.set,
                on_drain=self._want_drain,
                on_purge=lambda: self._tasks.start_soon(self._purge, registration, runner),
                warm_up_s=config.node_warm_up_s,
            )
            connections = EtcdConnections(place, machine.connect_etcd)
            runner = FlowRunner(connections, ask_instance=ask_instance)
            self._registrar = _Registrar(registration, runner, may_serve)

    def _peer_token(self, config: ServerConfig, token: str) -> Token:
        """Return what other nodes are asked with."""
        if config.peer_token_file is None:
            return token
        peer_token = _PeerToken(config.peer_token_file, self._server.policy)
        self._server.reloads.add(peer_token.reload_and_log)
        return lambda: peer_token.token

    async def run(self, serve: Callable[[], Awaitable[None]]) -> KeptError | None:
        """Run the server in its cluster; return the error that ended it, if any."""
        refused: KeptError | None = None
        async with trio.open_nursery() as nursery:
            if isinstance(self._membership, RunningMembership):
                nursery.start_soon(self._membership.run)
                nursery.start_soon(self._drain_on_request)
            if self._registrar is None:
                await serve()
            else:
                refused = await self._serve_registered(serve, self._registrar)
            nursery.cancel_scope.cancel()
        return refused

    async def may_serve(self) -> None:
        """Wait until the server may serve."""
        if self._waits and self._registrar is not None:
            await self._registrar.may_serve.wait()

    async def _serve_registered(self, serve: Callable[[], Awaitable[None]], registrar: _Registrar) -> KeptError | None:
        refused: KeptError | None = None
        remove = self._membership.add_listener(registrar.look)
        async with trio.open_nursery() as nursery:
            self._tasks = nursery

            async def register() -> None:
                nonlocal refused
                try:
                    await registrar.runner.run(registrar.registration.run())
                except ConfigError as error:
                    refused = KeptError(error)
                    nursery.cancel_scope.cancel()

            async def drain() -> None:
                await self._server.drain_begun()
                registrar.drain()

            nursery.start_soon(register)
            nursery.start_soon(drain)
            await serve()
            nursery.cancel_scope.cancel()
        remove()
        with trio.move_on_after(_LEAVE_S):
            await registrar.runner.run(registrar.registration.leave())
        return refused

    async def _purge(self, registration: Registration, runner: FlowRunner) -> None:
        self._server.policy.audit.note("purge", origin=_ORIGIN, count=len(self._server.core))
        lasting = True
        with self._drainer.suspended():
            try:
                await self._server.purge()
            except (DiskFailed, DeadlineExceeded) as error:
                lasting = False
                _log.warning("a purge of the cluster is not done on disk", extra={"problem": str(error)})
        registration.purged(lasting=lasting)
        runner.wake()

    async def _drain_on_request(self) -> None:
        """Drain whenever somebody asks for it, until the server is told to stop."""
        with ExitStack() as resources:
            if self._registrar is None:
                resources.callback(self._membership.add_listener(self._look))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drainer.run)
                await self._server.drain_begun()
                nursery.cancel_scope.cancel()

    def _look(self, view: View) -> None:
        """Look what a file says of this node, and warn if it says nothing."""
        if problem := self._not_listed(view):
            _log.warning("this node is not in the file of its cluster", extra={"problem": problem})
        wanted = any(node.id == self._node.id and node.state is NodeState.DRAINING for node in view.nodes)
        if wanted != self._listed_as_draining:
            self._listed_as_draining = wanted
            self._want_drain(wanted)

    def _not_listed(self, view: View) -> str:
        """Why the cluster does not know this node, if a file that lists it does not."""
        ids = [node.id for node in view.nodes]
        place = self._url.place
        if not isinstance(place, FilePlace) or self._node.id in ids:
            return ""
        return f"{place.path} does not list {self._node.id} (--node-id), but {', '.join(ids) or 'nobody'}"

    def _want_drain(self, wanted: bool) -> None:
        self._server.policy.audit.note("node-drain", origin=_ORIGIN, wanted=wanted)
        self._drainer.want(wanted)

    async def _push(self, config: ServerConfig, token: str, on_progress: Callable[[Drain], None]) -> None:
        """Pass blocks on, as a client of the other nodes. Those of tenants stay."""
        if self._server.tenancy is not None:
            if keys := len(self._server.core):
                _log.warning("blocks of tenants are not passed on", extra={"keys": keys})
            return
        core = self._server.core
        most_bytes = config.node_drain_bytes
        limits = PushLimits(
            most_bytes=core.pool.capacity_bytes // 2 if most_bytes is None else most_bytes,
            bytes_per_s=config.node_drain_bytes_per_s,
        )
        others = Others(self._membership, self._node.id)
        environment = attrs.evolve(self._client, membership=lambda url: others)
        options: StoreOptions = {"name": f"drain of {self._node.id}", "lazy": True, "deadline_s": _PUT_S}
        if token:
            options["token"] = token
        if self._server.tls is not None:
            options["tls"] = self._server.tls.peer_context()
        open_others = partial(open_nodes, config.cluster, environment, **options)
        await push(core, open_others, others.has_place, limits, on_progress)

    def _tell_drain(self, drain: Drain) -> None:
        if self._registrar is not None:
            self._registrar.registration.drained(drain)
            self._registrar.runner.wake()

    def statistics(self) -> MembershipStatistics:
        """What the server knows of its cluster."""
        view, age_s = self._membership.view, self._membership.age_s
        registration = None if self._registrar is None else self._registrar.registration
        if registration is not None:
            state, problem = registration.state.value, registration.problem
        else:
            problem = self._not_listed(view)
            state = "not listed" if problem else "listed"
            if isinstance(self._membership, RunningMembership) and self._membership.problem:
                problem = self._membership.problem  # of the file itself
        return MembershipStatistics(
            cluster=str(self._url),
            node=self._node.id,
            registration=state,
            registrations=0 if registration is None else registration.registrations,
            problem=problem,
            view_age_s=-1.0 if math.isinf(age_s) else age_s,
            epoch=view.epoch,
            copies=view.copies,
            purged_revision=view.purged_revision,
            nodes=[_statistics_of(node) for node in view.nodes],
            drains=list(view.drains),
            drain=self._drainer.statistics(),
        )


def _node_of(config: ServerConfig, server: Server, host_name: str) -> Node:
    host, port = config.host, server.addresses.port
    address = with_port(host, port) if config.advertise is None else with_port(*host_and_port(config.advertise, port))
    return Node(
        id=config.node_id or address,
        address=f"{'infinistore' if config.tls_cert is None else 'infinistores'}://{address}",
        instance=server.telemetry.instance,
        weight=config.node_weight,
        capacity_bytes=server.core.pool.capacity_bytes,
        zone=config.node_zone or "",
        host=host_name,
        protocol=MINOR,
    )


def _statistics_of(node: Node) -> ListedNode:
    return ListedNode(
        id=node.id,
        address=node.address,
        instance=node.instance,
        generation=node.generation,
        weight=node.weight,
        state=node.state.value,
        zone=node.zone,
        host=node.host,
    )
