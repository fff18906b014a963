"""The memory and the blocks of a server whose service is over, as the process that goes
on with it gets and adopts them; `OneStore` is about a server without tenants.

Where they come from is for others: from the server itself (`taking`), or from the
service manager that kept them (`kept`). With tenants, a group goes on with the memory
of the group of its name, if those who may have mapped it may have it now. Each tenant
goes on with its blocks, in its group. Nobody else gets them: a tenant that is not in
the file any more, or is in another group now, loses them, and what its clients still
use stays in quarantine.
"""

import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import attrs
import trio

from infinistore.allocators import Allocator, allocator_class
from infinistore.config import ServerConfig
from infinistore.core import hand_over
from infinistore.core.arena import Arena, adopt_arena
from infinistore.core.clients import Client
from infinistore.core.pool import Pool
from infinistore.core.pool_state import (
    GroupLayout,
    GroupStates,
    PoolState,
    decode_groups,
    decode_state,
    encode_state,
    is_of_groups,
)
from infinistore.core.store import StoreCore
from infinistore.host import free_huge_pages
from infinistore.sizes import DefaultSize, in_units

_log = logging.getLogger("infinistore.server")


@attrs.frozen
class Ended:
    """A connection that the server has ended: a copy of its socket, and its client, if
    that may still touch the pool. Without a copy (there was no descriptor), nobody will
    see when it no longer does."""

    descriptor: int | None
    client: Client | None


@attrs.frozen
class StandIn:
    """A client that stands in for one of the earlier server, until that has ended."""

    client: Client
    core: StoreCore
    on_close: Callable[[], object] | None = None
    """Called when it has been closed."""

    def close(self) -> None:
        """Give back what it has."""
        self.core.close_client(self.client)
        if self.on_close is not None:
            self.on_close()


@attrs.frozen
class Taken:
    """What became of the blocks of an earlier server."""

    kept: int
    dropped: int
    """Blocks that had no checksum, or no place in this pool."""
    stand_ins: list[list[StandIn]]
    """Who stands in for each connection, in their order; at last for the process."""


class ServerMemory(Protocol):
    """All that a server has in memory."""

    def __len__(self) -> int:
        """Return the number of keys."""

    @property
    def arenas(self) -> Sequence[Arena]:
        """All arenas, in an order that stays."""

    def describe(self) -> list[bytes]:
        """Return what describes the arenas, as bytes; none for a single pool."""

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """Return the connections to be watched, and the state of an ended service."""

    def adopt(self, state: Any) -> Taken:
        """Take over the blocks that `export` told of, of which nothing is here yet.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
        """

    def verify_some(self, most_bytes: int) -> bool:
        """Hash about so many bytes that were taken over; whether any is left."""

    @property
    def checksum_drops(self) -> int:
        """How many blocks were not what their checksum says."""


class OneStore:
    """The store of a server without tenants."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core

    def __len__(self) -> int:
        return len(self._core)

    @property
    def arenas(self) -> Sequence[Arena]:
        """Those of its pool."""
        return self._core.pool.arenas

    def describe(self) -> list[bytes]:
        """Nothing: all arenas are one pool."""
        return []

    def export(self, instance: str, ended: Sequence[Ended]) -> tuple[list[Ended], list[bytes]]:
        """See `ServerMemory`. `PoolState.pins` has a group for each connection."""
        watched, pins = watched_of(self._core, ended)
        return watched, encode_state(hand_over.export(self._core, instance, pins))

    def adopt(self, state: PoolState) -> Taken:
        """See `ServerMemory`."""
        adopted = hand_over.adopt(self._core, state)
        return Taken(adopted.kept, adopted.dropped, [[StandIn(one, self._core)] for one in adopted.stand_ins])

    def verify_some(self, most_bytes: int) -> bool:
        """See `ServerMemory`."""
        return hand_over.verify_some(self._core, most_bytes)

    @property
    def checksum_drops(self) -> int:
        """See `ServerMemory`."""
        return self._core.statistics().checksum_drops


def watched_of(core: StoreCore, ended: Sequence[Ended]) -> tuple[list[Ended], list[list[Client]]]:
    """Return those of a store that have to be watched: `ended`, and clients of which
    nobody can tell when they touch the pool no more. And the clients of each of them,
    with those of this process at last."""
    clients = {one.client for one in ended}
    others = [client for client in core.clients if client not in clients]
    watched = [*ended, *(Ended(None, client) for client in others if client.state == "quarantined")]
    own = [client for client in others if client.state != "quarantined"]
    return watched, [*([one.client] if one.client is not None else [] for one in watched), own]


def write_state(pieces: Sequence[bytes]) -> int:
    """Write the state to a file in memory, and return its descriptor.

    Raises:
        OSError: there is no descriptor left, or no memory.
    """
    descriptor = os.memfd_create("infinistore-state", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.writelines(pieces)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_ownership() -> int:
    """Return the descriptor of what decides who serves a pool that two processes map: a
    pipe with one byte in it. The kernel gives the byte to one of all that ever read.

    Raises:
        OSError: there is no descriptor left.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with open(writer, "wb", buffering=0) as file:
        file.write(b"\0")
    return reader


def take_ownership(descriptor: int) -> bool:
    """Become the one that serves; False if another process did before."""
    return bool(os.read(descriptor, 1))


_SLICE_BYTES = 8 * 1024 * 1024
"""How much is hashed before others get their turn: about a millisecond."""
_QUIET_S = 10.0
"""How long a connection that touches nothing is kept, for its client to read why."""


def can_adopt(config: ServerConfig) -> bool:
    """Whether the allocator can go on with what another process has placed."""
    return allocator_class(config.allocator).adopt is not Allocator.adopt


class PoolLost(Exception):
    """The earlier server has ended, and its memory cannot be used: start empty."""


class Adopting:
    """What there is of an earlier server, until it belongs to the store of this one.

    `arenas` are descriptors of its memory, each with its length, by trust group (an
    empty name without tenants); `lifeline` hangs up when its process has ended, and
    each of the `streams` when that client has; None stands for one that nobody can
    watch. Whoever uses some of `arenas` takes them out.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        """The settings of this server; with the size of the earlier pool if they name
        none."""
        self.lifeline = -1
        self.arenas: dict[str, list[tuple[int, int]]] = {}
        self.groups: list[GroupLayout] = []
        """The trust groups of the earlier server."""
        self.streams: list[int | None] = []
        self.open: set[int] = set()
        """Of the streams and the lifeline, those to be closed."""
        self._stand_ins: list[list[StandIn]] = []

    def accept(self, lengths: Sequence[int], described: bytes | None) -> str:
        """Hear of what arenas the earlier server has; `described` is what it says of
        its groups, if it has any. Return why this server cannot go on with them; empty
        if it can, at least with some."""
        if not can_adopt(self.config):
            return f"the allocator {self.config.allocator} cannot take over what another process has placed"
        if (self.config.tenants is None) != (described is None):
            return f"it was kept by a server with{'out' if described is None else ''} tenants"
        if isinstance(self.config.prealloc_bytes, DefaultSize):
            most_bytes = self.config.max_pool_bytes or sum(lengths)
            self.config = attrs.evolve(self.config, prealloc_bytes=min(sum(lengths), most_bytes))
        if described is None:
            return self.why_not(lengths, self.config.prealloc_bytes)
        try:
            self.groups = decode_groups(described).groups
        except ValueError as error:
            return f"what it says of its groups cannot be read: {error}"
        if [length for group in self.groups for length in group.arenas] != list(lengths):
            return "what it says of its groups is not what they have"
        return ""

    def give_arenas(self, arenas: Sequence[tuple[int, int]]) -> None:
        """Give it the arenas, in their order."""
        found = iter(arenas)
        if self.config.tenants is None:
            self.arenas = {"": list(found)}
        else:
            self.arenas = {group.name: list(islice(found, len(group.arenas))) for group in self.groups}

    def why_not(self, lengths: Sequence[int], size_bytes: int) -> str:
        """Return why arenas do not fit a pool of `size_bytes`; empty if they do."""
        config, most_bytes = self.config, size_bytes
        if config.auto_increase:
            most_bytes = max(most_bytes, config.max_pool_bytes or sum(lengths))
        page_bytes = free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE
        if sum(lengths) >= most_bytes + len(lengths) * page_bytes:
            return f"its pool has {in_units(sum(lengths))}, and this one is to have {in_units(most_bytes)}"
        return ""

    def unusable(self, problem: str) -> Exception:
        """Return what to raise where an arena cannot be used."""
        return PoolLost(problem)

    async def add_arenas(
        self,
        pool: Pool,
        make_arena: Callable[[int, int], Arena],
        run_in_thread: Callable[..., Awaitable[Any]],
        *,
        size_bytes: int,
        group: str = "",
    ) -> None:
        """Add the arenas of a group to a pool, and another one for what is missing of
        its `size_bytes`.

        Raises:
            ValueError: one cannot be used. None was added.
        """
        arenas = self.arenas.pop(group)
        adopted: list[Arena] = []
        threads = os.cpu_count() or 1
        for index, (descriptor, length) in enumerate(arenas):
            adopt = partial(adopt_arena, index, descriptor, length, prefault_threads=threads)
            try:
                adopted.append(await run_in_thread(adopt))
            except BaseException:
                self.arenas[group] = arenas[index + 1 :]
                for arena in adopted:
                    arena.close()
                raise
        for arena in adopted:
            pool.add_arena(arena)
        if self.config.numa_node is not None:
            _log.info("what is taken over stays on its NUMA nodes", extra={"numa_node": self.config.numa_node})
        missing = size_bytes - sum(arena.length for arena in pool.arenas)
        if missing > 0:
            pool.add_arena(await run_in_thread(make_arena, len(pool.arenas), missing))

    def leave(self, group: str) -> None:
        """Do without the memory of a group."""
        for descriptor, _ in self.arenas.pop(group, ()):
            os.close(descriptor)

    def adopt(self, whole: ServerMemory, state: PoolState | GroupStates) -> list[Callable[[], Awaitable[None]]]:
        """Take the blocks over; return what is to run in the background from now on.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
        """
        taken = whole.adopt(state)
        self._stand_ins = taken.stand_ins
        _log.info("took over", extra={"keys": taken.kept, "dropped": taken.dropped, "connections": len(self.streams)})
        return [self._watch, partial(_verify, whole)]

    def still_open(self) -> list[Ended]:
        """Return what has not ended of the earlier server, for the next process."""
        streams = [*self.streams, self.lifeline]
        return [
            Ended(_copy_of(descriptor), one.client)
            for descriptor, stand_ins in zip(streams, self._stand_ins, strict=True)
            for one in stand_ins
            if one.client.state != "closed"
        ]

    async def _watch(self) -> None:
        """Give back what clients of the earlier server held, each when it is gone."""
        async with trio.open_nursery() as nursery:
            for descriptor, stand_ins in zip([*self.streams, self.lifeline], self._stand_ins, strict=True):
                if descriptor is not None:
                    nursery.start_soon(self._close_after, stand_ins, descriptor)

    async def _close_after(self, stand_ins: Sequence[StandIn], descriptor: int) -> None:
        """Close the clients once the other end of their connection has ended."""
        with trio.CancelScope() as scope:
            if not any(one.client.pinned_bytes for one in stand_ins):
                scope.deadline = trio.current_time() + _QUIET_S
            while await has_more(descriptor):
                pass
        for one in stand_ins:
            one.close()
        self._close(descriptor)

    def close(self) -> None:
        """Close what nobody uses."""
        for descriptor in list(self.open):
            self._close(descriptor)
        for group in list(self.arenas):
            self.leave(group)

    def _close(self, descriptor: int) -> None:
        if descriptor in self.open:
            self.open.remove(descriptor)
            os.close(descriptor)


async def has_more(descriptor: int) -> bool:
    """Throw away what comes; False at the end."""
    await trio.lowlevel.wait_readable(descriptor)
    try:
        return bool(os.read(descriptor, 64 * 1024))
    except BlockingIOError:  # somebody else has read it
        return True
    except OSError:
        return False


def decode(data: bytes) -> PoolState | GroupStates:
    """Return the state of a server, with tenants or without.

    Raises:
        ValueError: these bytes describe none.
    """
    return decode_groups(data) if is_of_groups(data) else decode_state(data)


def read_all(descriptor: int) -> bytes:
    """Read a file from its beginning, and close it."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _copy_of(descriptor: int | None) -> int | None:
    """Copy a descriptor; None if there is none left."""
    try:
        return None if descriptor is None else os.dup(descriptor)
    except OSError:
        return None


async def _verify(whole: ServerMemory) -> None:
    """Hash what was taken over, in slices."""
    before = whole.checksum_drops
    while whole.verify_some(_SLICE_BYTES):
        await trio.lowlevel.checkpoint()
    dropped = whole.checksum_drops - before
    _log.info("verified what was taken over", extra={"dropped": dropped})
