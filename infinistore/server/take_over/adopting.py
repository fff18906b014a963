"""The memory and the blocks of an earlier server become those of this one.

Where they come from is for others: from the server itself (`taking`), or from the
service manager that kept them (`kept`).
"""

import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import trio

from infinistore.allocators import Allocator, allocator_class
from infinistore.config import ServerConfig
from infinistore.core.arena import Arena, adopt_arena
from infinistore.core.group_states import GroupLayout, GroupStates, decode_groups, is_of_groups
from infinistore.core.pool import Pool
from infinistore.core.pool_state import PoolState, decode_state
from infinistore.host import free_huge_pages
from infinistore.server.take_over.exporting import Ended, StandIn, Whole
from infinistore.sizes import in_units

__all__ = ["Adopting", "PoolLost", "can_adopt", "decode", "has_more", "read_all"]

_log = logging.getLogger("infinistore.server")
_SLICE_BYTES = 8 * 1024 * 1024
"""How much is hashed before others get their turn: about a millisecond."""
_QUIET_S = 10.0
"""How long a connection is kept that can touch nothing, so that its client can read why
it ended."""


def can_adopt(config: ServerConfig) -> bool:
    """Whether the allocator can go on with what another process has placed."""
    return allocator_class(config.allocator).adopt is not Allocator.adopt


class PoolLost(Exception):
    """The memory of the earlier server cannot be used: start with an empty pool. The
    earlier server has ended."""


class Adopting:
    """What there is of an earlier server, until it belongs to the store of this one.

    `arenas` are descriptors of its memory, each with its length, by trust group (an
    empty name without tenants); `lifeline` hangs up when its process has ended, and
    each of the `streams` when that client has; None stands for one that nobody can
    watch. Whoever uses some of `arenas` takes them out.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
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
        """Return why a pool of such arenas cannot go on as one of `size_bytes`; empty
        if it can."""
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
    ) -> None:
        """Add the arenas of a server without tenants to a pool, and another one for
        what is missing of its `size_bytes`. Raises what `unusable` returns.
        """
        try:
            await self._add_arenas(pool, make_arena, run_in_thread, size_bytes, "")
        except ValueError as error:
            raise self.unusable(str(error)) from None

    async def _add_arenas(
        self,
        pool: Pool,
        make_arena: Callable[[int, int], Arena],
        run_in_thread: Callable[..., Awaitable[Any]],
        size_bytes: int,
        group: str,
    ) -> None:
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

    async def add_group(
        self,
        pool: Pool,
        make_arena: Callable[[int, int], Arena],
        run_in_thread: Callable[..., Awaitable[Any]],
        group: str,
        size_bytes: int,
    ) -> str:
        """Add the arenas of a group to a pool of `size_bytes`, which has none; return
        why they cannot be used, and nothing was added, or an empty text."""
        why = self.why_not([length for _, length in self.arenas[group]], size_bytes)
        if why:
            return why
        try:
            await self._add_arenas(pool, make_arena, run_in_thread, size_bytes, group)
        except ValueError as error:
            return str(error)
        return ""

    def leave(self, group: str) -> None:
        """Do without the memory of a group."""
        for descriptor, _ in self.arenas.pop(group, ()):
            os.close(descriptor)

    def adopt(self, whole: Whole, state: PoolState | GroupStates) -> list[Callable[[], Awaitable[None]]]:
        """Take the blocks over; return what is to run in the background from now on.

        Raises:
            ConfigError: something that is still in use has no place in this pool.
        """
        taken = whole.adopt(state)
        self._stand_ins = taken.stand_ins
        _log.info("took over", extra={"keys": taken.kept, "dropped": taken.dropped, "connections": len(self.streams)})
        return [self._watch, partial(_verify, whole)]

    def still_open(self) -> list[Ended]:
        """Return the connections and clients of the earlier server that have not ended,
        for the process that takes this one's place."""
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


async def _verify(whole: Whole) -> None:
    """Hash what was taken over, in slices."""
    before = whole.checksum_drops
    while whole.verify_some(_SLICE_BYTES):
        await trio.lowlevel.checkpoint()
    dropped = whole.checksum_drops - before
    _log.info("verified what was taken over", extra={"dropped": dropped})
