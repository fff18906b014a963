"""The supervisor: starts the shards, restarts those that end, and ends with all.

It serves no client. Each shard is a process at the other end of a `Link`, which carries
its progress, and ends the shard if the supervisor is killed. All shards listen before
any takes memory, so a port in use is found at once. A shard that refuses to start ends
all, and so does one whose settings turn out to be wrong in its first life, such as an
id that another server has. A shard that ends later is restarted at the same port, with
growing pauses; the others go on, and its blocks are missing meanwhile. A shard whose
event loop hangs is killed.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
from infinistore.server.listeners import ServerAddresses
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
    Link,
    Listening,
    Met,
    Refused,
    Signal,
    Silence,
    Start,
    beat_of,
)
from infinistore.server.take_over.kept import as_large_as_kept, forget_kept
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.trio_streams import listen_tcp
from infinistore.transports.sockets.unix_listener import make_private_folder

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates
    from infinistore.server.tenancy import PlannedGroups

_log = logging.getLogger("infinistore.server")
_LAST_STEPS_S: Final = 10.0
"""The time for a shard's disks, between the drain timeout and its end by SIGKILL."""
_END_S: Final = 2.0
"""The time for a shard to end when its link is closed."""
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
    config = as_large_as_kept(config, manager)
    refused: KeptError | None = None
    with ExitStack() as resources:
        policy = load_policy(config, read_token(config.token_file) if config.token_file else "")
        tls, reloads = load_certificates(config, policy.audit), Reloads()
        if tls is not None:
            reloads.add(tls.reload_and_log)
        add_tenants(reloads, config, policy, _plan_tenants(config, policy))
        listeners: list[socket.socket] = []
        folder: Path | None = None
        if config.manage_port is not None:
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
        supervisor = _Supervisor(config, command, folder, manager)
        await supervisor.forget_the_rest()
        async with trio.open_nursery() as nursery:
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
            try:
                await supervisor.run()
            except (ConfigError, OutOfMemory, StoreUnavailable) as error:
                refused = KeptError(error)  # raised outside of the nursery, which would wrap it in a group
            nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused.again()


def _plan_tenants(config: ServerConfig, policy: Policy) -> "PlannedGroups | None":
    if not isinstance(policy, TenantPolicy):
        return None
    from infinistore.server.tenancy import PlannedGroups  # late: most servers have no tenants

    return PlannedGroups(config, policy.tenants)


def _remove_folder(folder: Path) -> None:
    for name in os.listdir(folder):  # a shard that was killed has left its socket
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


class _Supervisor:
    def __init__(
        self, config: ServerConfig, command: Sequence[str], folder: Path | None, manager: ServiceManager
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
        sockets = [None if folder is None else folder / f"{index}.sock" for index in range(config.shards)]
        self._drain_timeout_s = config.drain_timeout_s
        self._allowed_hosts = config.manage_allowed_hosts
        self._command = command
        self._manager = manager
        self._hangs_s = manager.watchdog_s or _HANGS_S
        most_kept = min(manager.most_kept // config.shards, MOST_KEPT)
        self._starts = [
            Start(
                index,
                one,
                None if cores is None else cores[index],
                sockets[index],
                beat_of(self._hangs_s),
                manager.of_part(f"shard-{index}-of-{config.shards}", most_kept),
            )
            for index, one in enumerate(configs)
        ]
        self.fleet = Fleet([ShardState(index, place) for index, place in enumerate(sockets)])
        self._links: dict[int, Link] = {}
        self._met = trio.Event()
        self._all_serve = trio.Event()
        self._drain = trio.Event()
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

    async def run(self) -> None:
        """Keep all shards running until they are to drain, and until they have.

        Raises:
            InfiniStoreException: one of them cannot run, and all have ended.
        """
        async with trio.open_nursery() as nursery:
            for shard in self.fleet.shards:
                nursery.start_soon(self._keep, shard, nursery.cancel_scope)
        if self._refused is not None:
            raise self._refused.again()

    async def _keep(self, shard: ShardState, all_shards: trio.CancelScope) -> None:
        """Run one shard again and again."""
        while not self.fleet.draining:
            problem, status = await self._run_once(shard)
            if self.fleet.draining:
                return
            pause_s = shard.ended(trio.current_time())
            if not self._all_serve.is_set() or (isinstance(problem, ConfigError) and shard.restarts == 1):
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

    async def _introduce(self, link: Link) -> None:
        await self._met.wait()
        await link.send(Met(self.fleet.places() or ()))

    async def _drain_one(self, link: Link, process: trio.Process) -> None:
        """Have a shard drain when all do; end it if that takes too long."""
        await self._drain.wait()
        await link.send(Signal.DRAIN)
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
