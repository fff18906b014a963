"""The supervisor: starts the shards, restarts those that end, and ends with all.

It serves no client. Each shard is a process at the other end of a `Link`, which carries
its progress, and ends the shard if the supervisor is killed. All shards listen before
any takes memory, so a port in use is found at once. A shard that refuses to start ends
all, and so does one whose settings turn out to be wrong in its first life, such as an
id that another server has. A shard that ends later is restarted at the same port, with
growing pauses; the others go on, and its blocks are missing meanwhile. A shard whose
event loop hangs is killed. No shard serves before all are ready, so that a server whose
place this one takes serves on if one of them fails (`succession`).
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import trio

from infinistore.access.policy import Policy, TenantPolicy
from infinistore.config import ServerConfig
from infinistore.core.arena import check_memory
from infinistore.errors import ConfigError, InfiniStoreException, OutOfMemory, StoreUnavailable
from infinistore.host import available_memory, check_server_runs_here, free_huge_pages
from infinistore.kept_errors import KeptError
from infinistore.secret_files import read_token
from infinistore.server.listeners import NO_DESCRIPTORS_PAUSE_S, ServerAddresses
from infinistore.server.security import AuditLog, Reloads, add_tenants, load_certificates, load_policy, reload_on_signal
from infinistore.server.shards.fleet import (
    Fleet,
    ShardState,
    choose_cores,
    divide,
    has_room,
    prepare_disks,
    siblings_here,
)
from infinistore.server.shards.shard import (
    MOST_KEPT,
    Keep,
    Link,
    Listening,
    Met,
    Refused,
    Signal,
    Silence,
    Start,
    beat_of,
)
from infinistore.server.shards.succession import (
    STEP_S,
    Keeper,
    Succession,
    Wire,
    close_all,
    decide_s,
    hand_over,
    make_room,
    place_of,
    succeed,
)
from infinistore.server.take_over.kept import as_large_as_kept, forget_kept, refuse_to_keep, why_not_kept
from infinistore.server.take_over.memory import make_ownership, take_ownership
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.trio_streams import accept, listen_tcp
from infinistore.transports.sockets.unix_listener import UnixListener, listen_unix, make_private_folder

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates
    from infinistore.server.tenancy import PlannedGroups

_log = logging.getLogger("infinistore.server")
_LAST_STEPS_S: Final = 10.0
"""The time for a shard's disks, between the drain timeout and its end by SIGKILL."""
_END_S: Final = 2.0
"""The time for a shard to end when its link is closed."""
_ASKS_S: Final = 10.0
"""How long a process may take to say that it wants to take over."""
_HANGS_S: Final = 30.0
"""A shard that is silent for this long is killed, without a watchdog's own time."""


async def serve_shards(
    config: ServerConfig,
    command: Sequence[str],
    *,
    handle_signals: bool = False,
    service_manager: ServiceManager | None = None,
    task_status: trio.TaskStatus[ServerAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the shards of a server until it is cancelled; with `handle_signals` (main
    thread only) also until SIGTERM or SIGINT. `service_manager` is told when they
    drain.

    `command` starts the process of a shard; the descriptor of its link follows as an
    argument. Started in a nursery, it gives the addresses of the first shard, and of
    the management API, when all shards serve.

    Raises:
        ConfigError: a shard cannot use an address, a port, a path or a disk.
        OutOfMemory: the machine has no memory for the pool.
        StoreUnavailable: a shard ended before all served.
    """
    check_server_runs_here()
    manager = service_manager or ServiceManager()
    if manager.listeners:
        for sock in manager.listeners:
            sock.close()
        raise ConfigError("--shards: each shard listens by itself; disable the socket unit, or use one process")
    refused: KeptError | None = None
    with ExitStack() as resources:
        taking = await _find_earlier(config, manager, resources) if config.take_over else None
        config = as_large_as_kept(attrs.evolve(config, take_over=False), manager)
        policy = load_policy(config, read_token(config.token_file) if config.token_file else "")
        tls, reloads = load_certificates(config, policy.audit), Reloads()
        if tls is not None:
            reloads.add(tls.reload_and_log)
        add_tenants(reloads, config, policy, _plan_tenants(config, policy))
        listeners = [] if taking is None or config.manage_port is None else taking.management
        if config.manage_port is not None and not listeners:
            found = listen_tcp(
                config.manage_host, config.manage_port, host_flag="--manage-host", port_flag="--manage-port"
            )
            listeners = [resources.enter_context(sock) for sock in found]
        folder = make_private_folder()
        resources.callback(_remove_folder, folder)
        # Each shard checks only what it takes itself.
        new_bytes = 0 if manager.kept else config.prealloc_bytes
        check_memory(new_bytes, config.huge_pages, shards=config.shards)
        await trio.to_thread.run_sync(prepare_disks, config.disks, config.shards)
        if manager.most_kept and (why := why_not_kept(config)):
            refuse_to_keep(why)
        supervisor = _Supervisor(config, command, folder, manager, management=listeners, taking=taking)
        await supervisor.forget_the_rest()
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.keeper.run)
            if isinstance(policy.audit, AuditLog):
                nursery.start_soon(policy.audit.run)
            if listeners:
                supervisor.serve_management(listeners, policy, tls, nursery, reloads)
            if handle_signals:
                at_signal = Reloads()
                if not reloads.empty:
                    at_signal.add(partial(supervisor.reload, reloads))
                await nursery.start(reload_on_signal, at_signal, manager)
            management = tuple(sock.getsockname()[:2] for sock in listeners)
            told = partial(supervisor.tell_when_serving, management, task_status, nursery, handle_signals)
            nursery.start_soon(told)
            nursery.start_soon(supervisor.give_place, resources)
            try:
                await supervisor.run()
            except (ConfigError, OutOfMemory, StoreUnavailable) as error:
                refused = KeptError(error)  # raised outside of the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused.again()


async def _find_earlier(config: ServerConfig, manager: ServiceManager, resources: ExitStack) -> Succession | None:
    """Have the server end whose place this one is to take, if there is one. What its
    shards have kept belongs to the manager now.
    """
    await trio.to_thread.run_sync(forget_kept, manager)
    path = config.socket_path(config.service_port)
    assert path is not None
    taking = await succeed(path, config.shards, STEP_S + 2 * config.drain_timeout_s, resources)
    if taking is not None:
        manager.add(taking.kept)
    return taking


def _plan_tenants(config: ServerConfig, policy: Policy) -> "PlannedGroups | None":
    if not isinstance(policy, TenantPolicy):
        return None
    from infinistore.server.tenancy import PlannedGroups  # late: most servers have no tenants

    return PlannedGroups(config, policy.tenants)


def _remove_folder(folder: Path) -> None:
    for name in os.listdir(folder):  # a shard that was killed has left its socket
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


@attrs.define
class _Giving:
    """The end of all shards whose place another server is to take."""

    _left: set[int]
    """Those that have not ended."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    decided: trio.Event = attrs.field(factory=trio.Event)
    other_serves: bool = False

    async def other_server(self, index: int) -> bool:
        """Note that a shard has ended; return whether another server serves, once that
        is decided.
        """
        self._left.discard(index)
        if not self._left:
            self.ended.set()
        await self.decided.wait()
        return self.other_serves


class _Supervisor:
    def __init__(
        self,
        config: ServerConfig,
        command: Sequence[str],
        folder: Path,
        manager: ServiceManager,
        *,
        management: Sequence[socket.socket],
        taking: Succession | None,
    ) -> None:
        available = frozenset(os.sched_getaffinity(0))
        if config.shards > len(available):
            _log.warning("more shards than cores", extra={"shards": config.shards, "cores": len(available)})
        cores = choose_cores(available, siblings_here(available), config.shards) if config.pin_cores else None
        configs = divide(
            config,
            page_bytes=free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE,
            available_bytes=available_memory().available_bytes,
            spins=has_room(config.shards, len(available)),
        )
        sockets = [folder / f"{index}.sock" if management else None for index in range(config.shards)]
        self._drain_timeout_s = config.drain_timeout_s
        self._allowed_hosts = config.manage_allowed_hosts
        self._command = command
        self._manager = manager
        self._hangs_s = manager.watchdog_s or _HANGS_S
        self.keeper = Keeper(folder, manager)
        self._taking = taking
        self._management = management
        self._why_not_kept = why_not_kept(config)
        most_kept = min(manager.most_kept // config.shards, MOST_KEPT)
        self._at_drain = Keep(most_kept) if most_kept else Signal.DRAIN
        self._how_to_end: Keep | Signal = self._at_drain
        self._end = trio.Event()
        """Set when all shards are to end, in that way."""
        self._parts = [f"shard-{index}-of-{config.shards}" for index in range(config.shards)]
        self._starts = [
            Start(
                index,
                one,
                None if cores is None else cores[index],
                sockets[index],
                beat_of(self._hangs_s),
                manager.of_part(self._parts[index], self.keeper.address),
                must_go_on=taking is not None,
            )
            for index, one in enumerate(configs)
        ]
        self.fleet = Fleet([ShardState(index, place) for index, place in enumerate(sockets)])
        self._links: dict[int, Link] = {}
        self._met = trio.Event()
        self._ready: set[int] = set()
        self._all_ready = trio.Event()
        self._may_serve = trio.Event()
        self._all_serve = trio.Event()
        self._drain = trio.Event()
        self._giving: _Giving | None = None
        self._has_served_on = False
        self._refused: KeptError | None = None

    async def forget_the_rest(self) -> None:
        """Forget what was kept, but is for none of these shards."""
        if self._manager.kept:
            _log.warning("the cache starts empty", extra={"reason": "the last run had another number of shards"})
            await trio.to_thread.run_sync(forget_kept, self._manager)

    def serve_management(
        self,
        listeners: list[socket.socket],
        policy: Policy,
        tls: "Certificates | None",
        nursery: trio.Nursery,
        reloads: Reloads,
    ) -> None:
        """Start the management API."""
        from infinistore.server.management.http import HttpLimits, serve_http
        from infinistore.server.management.operations import PROBES, Access  # late: who has none does not pay for it
        from infinistore.server.shards.management import ShardsManagement

        application = ShardsManagement(self.fleet, Access(policy, self._allowed_hosts), reloads).application()
        secure = None if tls is None else tls.secure_management
        nursery.start_soon(serve_http, application, listeners, HttpLimits(probes=PROBES), secure)

    async def reload(self, own: Reloads) -> str:
        """Read the supervisor's files again, and have all shards do so."""
        problems = await own.run()
        for link in list(self._links.values()):
            with suppress(StoreUnavailable, OSError, trio.BrokenResourceError, trio.ClosedResourceError):  # it has gone
                await link.send(Signal.RELOAD)
        return "; ".join(problems)

    async def tell_when_serving(
        self,
        management: tuple[tuple[str, int], ...],
        task_status: trio.TaskStatus[ServerAddresses],
        nursery: trio.Nursery,
        handle_signals: bool,
    ) -> None:
        """Report the addresses when all shards serve for the first time. Signals drain
        the shards from then on; before, there is nothing to drain.
        """
        await self._all_serve.wait()
        if handle_signals:
            await nursery.start(self.drain_on_signal, nursery.cancel_scope)
        first = self.fleet.shards[0].addresses
        assert first is not None
        task_status.started(attrs.evolve(first, management=management))

    async def give_place(self, resources: ExitStack) -> None:
        """Let other supervisors take the place of this one, once all shards serve."""
        await self._all_serve.wait()
        first = self.fleet.shards[0].addresses
        if first is None or first.unix_socket is None:
            return
        listener: socket.socket
        if self._taking is not None:
            listener = self._taking.listener
        else:
            try:
                listener = resources.enter_context(listen_unix(place_of(first.unix_socket)))
            except ConfigError as error:
                _log.warning("no server can take over from this one", extra={"reason": str(error)})
                return
        assert isinstance(listener, UnixListener)
        while True:
            try:
                stream = await accept(listener)
            except OSError:  # there is no descriptor for it
                await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
                continue
            with closing(Wire(stream)) as wire, suppress(StoreUnavailable, OSError):
                await self._answer(wire, listener)

    async def _answer(self, wire: Wire, listener: UnixListener) -> None:
        if not wire.is_of_this_user:
            return
        with trio.move_on_after(_ASKS_S) as asking:
            asked, descriptors = await wire.receive()
            close_all(descriptors)
        if asking.cancelled_caught:
            return
        await self._all_serve.wait()
        if refusal := self._why_not_now(asked.get("shards")):
            await wire.send(refusal=refusal)
            return
        _log.info("handing over to another process")
        self._giving = giving = _Giving(set(range(len(self._starts))))
        kept: dict[str, int] = {}
        self.keeper.kept = kept
        self._end_all(Keep(make_room(len(self._starts))))
        with ExitStack() as last:
            last.callback(self._go_on, giving, kept)
            await giving.ended.wait()
            self.keeper.kept = None
            if missing := [part for part in self._parts if f"infinistore-{part}-state" not in kept]:
                await wire.send(refusal=f"{', '.join(missing)} could not be kept; see the log of the server")
                return
            last.callback(os.close, ownership := make_ownership())
            given = [*kept.items(), *(("management", sock.fileno()) for sock in self._management)]
            given += [("listener", listener.fileno()), ("ownership", ownership)]
            listener.leave_path()
            with trio.move_on_after(decide_s(kept)):
                await self._hand_over(wire, given)
            giving.other_serves = not take_ownership(ownership)
            if not giving.other_serves:
                with suppress(OSError):  # somebody has removed it
                    listener.own_path()

    async def _hand_over(self, wire: Wire, given: Sequence[tuple[str, int]]) -> None:
        """Hand these descriptors over; wait until the other supervisor serves, or has
        gone, or this one is to end.
        """

        async def until_drained() -> None:
            await self._drain.wait()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_drained)
            with suppress(StoreUnavailable):
                await hand_over(wire, given)
                await wire.over()
            nursery.cancel_scope.cancel()

    def _why_not_now(self, shards: object) -> str:
        """Return why a server with so many shards cannot take over now, or nothing."""
        if shards != len(self._starts):
            return f"the server has {len(self._starts)} shards; start as many (--shards {len(self._starts)})"
        if self._why_not_kept:
            return f"{self._why_not_kept}; stop the server, and start without --take-over"
        if self.fleet.draining or not self.fleet.all_serve:
            return f"the server is {'stopping' if self.fleet.draining else 'starting'}; try again in a moment"
        return ""

    def _end_all(self, how: Keep | Signal) -> None:
        self._how_to_end = how
        self._end.set()

    def _go_on(self, giving: "_Giving", kept: dict[str, int]) -> None:
        """Have the shards started again with what was kept, unless another server has
        their place.
        """
        if giving.other_serves:
            _log.info("another process has taken over")
            close_all(kept.values())
        else:
            _log.warning("the process that was to take over has gone; serving on")
            self._manager.add(kept)
            self._starts = [
                attrs.evolve(one, service_manager=self._manager.of_part(part, self.keeper.address), must_go_on=False)
                for one, part in zip(self._starts, self._parts, strict=True)
            ]
            self._has_served_on, self._all_serve = True, trio.Event()
            if not self.fleet.draining:
                self._end = trio.Event()
        self._giving = None
        giving.decided.set()

    async def drain_on_signal(
        self, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Drain on SIGTERM or SIGINT; end on another one."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self.fleet.draining:
                    _log.info("not waiting for requests under way", extra={"signal": name})
                    everything.cancel()
                _log.info("draining", extra={"signal": name, "at_most_s": self._drain_timeout_s})
                self._manager.stopping()
                self.fleet.draining = True
                self._drain.set()
                if self._giving is None:
                    self._end_all(self._at_drain)

    async def run(self) -> None:
        """Keep all shards running until they are to drain, and until they have.

        Raises:
            InfiniStoreException: one of them cannot run, and all have ended.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._begin, nursery.cancel_scope)
            for shard in self.fleet.shards:
                nursery.start_soon(self._keep, shard, nursery.cancel_scope)
        if self._refused is not None:
            raise self._refused.again()

    async def _begin(self, all_shards: trio.CancelScope) -> None:
        """Once all shards are ready, let them serve, if this server may."""
        await self._all_ready.wait()
        try:
            if self._taking is not None:
                self._taking.take()
            self._may_serve.set()
        except ConfigError as error:
            self._refused = KeptError(error)
            all_shards.cancel()

    async def _keep(self, shard: ShardState, all_shards: trio.CancelScope) -> None:
        """Run one shard again and again."""
        while not self.fleet.draining:
            problem, status = await self._run_once(shard)
            if self._giving is not None:
                shard.gave()
                if await self._giving.other_server(shard.index):
                    return
                continue
            if self.fleet.draining:
                return
            pause_s = shard.ended(trio.current_time())
            is_wrong = isinstance(problem, ConfigError) and shard.restarts == 1
            if not self._has_served_on and (is_wrong or not self._all_serve.is_set()):
                self._refused = self._refused or KeptError(problem or _ended_early(shard.index, status))
                all_shards.cancel()
                return
            _log.error(
                "a shard ended",
                extra={"shard": shard.index, "status": status, "problem": str(problem or ""), "restart_in_s": pause_s},
            )
            with trio.move_on_after(pause_s):
                await self._drain.wait()

    async def _run_once(self, shard: ShardState) -> tuple[InfiniStoreException | None, int]:
        """Run a shard's process to its end; return its refusal and exit status."""
        start = self._starts[shard.index]
        if shard.addresses is not None:  # where clients know it
            start = attrs.evolve(start, config=attrs.evolve(start.config, service_port=shard.addresses.port))
        link, other = Link.pair()
        manager = start.service_manager
        try:
            with other:
                process = await _start(self._command, other, *manager.kept.values())
        except BaseException:  # cancelled, or the machine has no room for a process
            link.close()
            raise
        shard.started(process.pid)
        self._links[shard.index] = link
        refused: list[Refused] = []
        silence = Silence(start.beat_s)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._drain_one, link, process)
                nursery.start_soon(self._watch, shard, silence, process)
                await link.send(start)
                manager.close()  # before all serve no shard is started again, and then they have all gone on with it
                await self._listen_to(shard, link, silence, refused)
                nursery.cancel_scope.cancel()
        finally:
            link.close()
            if not silence.has_begun:  # it may still import its modules, and does not see the end of its link
                process.terminate()
            with trio.CancelScope(shield=True):
                status = await _end(process)
        return refused[0].error(f"shard {shard.index}: {refused[0].problem}") if refused else None, status

    async def _listen_to(self, shard: ShardState, link: Link, silence: Silence, refused: list[Refused]) -> None:
        """Handle the messages of a shard until its end is closed."""
        async with trio.open_nursery() as nursery:
            while (message := await link.receive()) is not None:
                silence.heard()
                if isinstance(message, Listening):
                    shard.addresses = message.addresses
                    if self.fleet.places() is not None:
                        self._met.set()
                    nursery.start_soon(self._introduce, link)
                elif message is Signal.READY:
                    nursery.start_soon(self._let_serve, shard.index, link)
                elif message is Signal.SERVING:
                    shard.serving(trio.current_time())
                    if self.fleet.all_serve:
                        self._all_serve.set()
                elif isinstance(message, Refused):
                    refused.append(message)
            nursery.cancel_scope.cancel()

    async def _watch(self, shard: ShardState, silence: Silence, process: trio.Process) -> None:
        """Kill a shard whose event loop hangs."""
        await silence.wait()
        if not self.fleet.draining:  # then it has its time to end, and no more
            extra = {"shard": shard.index, "pid": process.pid, "silent_s": self._hangs_s}
            _log.error("a shard hangs, and is killed", extra=extra)
            shard.hangs += 1
            process.kill()

    async def _let_serve(self, index: int, link: Link) -> None:
        self._ready.add(index)
        if len(self._ready) == len(self._starts):
            self._all_ready.set()
        await self._may_serve.wait()
        await link.send(Signal.SERVE)

    async def _introduce(self, link: Link) -> None:
        await self._met.wait()
        await link.send(Met(self.fleet.places() or ()))

    async def _drain_one(self, link: Link, process: trio.Process) -> None:
        """Have a shard drain when all do; end it if that takes too long."""
        await self._end.wait()
        await link.send(self._how_to_end)
        await trio.sleep(self._drain_timeout_s + _LAST_STEPS_S)
        process.kill()


def _ended_early(index: int, status: int) -> StoreUnavailable:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
    return StoreUnavailable(f"shard {index} {how} before all served; its log has more")


async def _start(command: Sequence[str], link: socket.socket, *kept: int) -> trio.Process:
    """Start a process with its end of the link, and with what was kept for it, out of
    reach of Ctrl-C.
    """
    descriptor = link.fileno()
    return await trio.lowlevel.open_process(
        [*command, str(descriptor)], stdin=subprocess.DEVNULL, pass_fds=[descriptor, *kept], process_group=0
    )


async def _end(process: trio.Process) -> int:
    """Wait for a process whose link is closed, and kill it if it stays."""
    with trio.move_on_after(_END_S):
        return await process.wait()
    process.kill()
    return await process.wait()
