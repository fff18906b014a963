"""What only an operator wants to see of a server: gathered when asked for, in slices, so that nobody waits long for it.

Every list is bounded, because it travels in one message and is shown on one screen: of the connections those that moved
the most bytes, of the prefixes those that hold the most.
"""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import trio

from infinistore.core.store import StoreCore
from infinistore.server.recorder import Recorder
from infinistore.server.session import Session
from infinistore.statistics import ArenaStatistics, ClientStatistics, PrefixStatistics, ServerDetails

__all__ = ["MAX_ARENAS", "MAX_CLIENTS", "MAX_PREFIXES", "MAX_SAMPLE_KEYS", "arena", "clients", "gather", "prefixes"]

_T = TypeVar("_T")
MAX_ARENAS = 256
MAX_CLIENTS = 256
MAX_PREFIXES = 64
MAX_SAMPLE_KEYS = 4096
MAX_OPERATIONS = 512
ARENA_PARTS = 128
"""Into how many parts the fill of an arena is cut, if it has as many units."""

_SLICE_KEYS = 512
_MAX_CUTS = 16
_SEPARATORS = "/:@#|"
_UP_TO_SEPARATOR = re.compile(r".*[/:@#|]", re.DOTALL)
_UP_TO_SEPARATOR_BEFORE = re.compile(r".*[/:@#|](?=.)", re.DOTALL)


async def gather(core: StoreCore, sessions: Iterable[Session], recorder: Recorder, state: str) -> ServerDetails:
    """Gather the details of a server that is in this state."""
    operations = recorder.statistics()
    if len(operations) > MAX_OPERATIONS:
        operations = heapq.nlargest(MAX_OPERATIONS, operations, key=lambda one: one.count)
    found_clients = clients(sessions)
    await trio.lowlevel.checkpoint()
    found_arenas = []
    for index in range(min(len(core.pool.arenas), MAX_ARENAS)):
        found_arenas.append(arena(core, index))
        await trio.lowlevel.checkpoint()
    return ServerDetails(operations, found_clients, found_arenas, await prefixes(core), state)


def clients(sessions: Iterable[Session]) -> list[ClientStatistics]:
    """The connections that are open, those that moved the most bytes first."""
    now = trio.current_time()

    def moved_bytes(session: Session) -> int:
        return session.traffic.received_bytes + session.traffic.sent_bytes

    return [
        ClientStatistics(
            name=session.name,
            transport=session.transport,
            connected_s=now - session.connected_at,
            requests=session.traffic.requests,
            errors=session.traffic.errors,
            received_bytes=session.traffic.received_bytes,
            sent_bytes=session.traffic.sent_bytes,
            pinned_bytes=session.pinned_bytes,
        )
        for session in heapq.nlargest(MAX_CLIENTS, sessions, key=moved_bytes)
    ]


def arena(core: StoreCore, index: int) -> ArenaStatistics:
    """How full one arena is, and each of its parts."""
    pool = core.pool
    length = pool.arenas[index].length
    parts = max(1, min(ARENA_PARTS, length // pool.allocator.unit_bytes))
    taken = pool.allocator.occupied_bytes(index, parts)
    return ArenaStatistics(
        index=index,
        length_bytes=length,
        used_bytes=sum(taken),
        fill=[min(1.0, part * parts / length) for part in taken],
    )


async def prefixes(core: StoreCore) -> list[PrefixStatistics]:
    """Which beginnings the keys share, and what they hold: the largest first.

    A key's prefix ends with the last of the separators `/ : @ # |` in it; keys without one have the empty prefix. While
    there are too many prefixes, those with the most separators are cut at the one before. Of more than
    `MAX_SAMPLE_KEYS` keys, as many are looked at (`StoreCore.sample`), and the figures are estimates.
    """
    sample = core.sample(MAX_SAMPLE_KEYS)
    scale = len(core) / max(1, len(sample))
    keys: Counter[str] = Counter()
    payload_bytes: Counter[str] = Counter()
    for sampled in _in_slices(sample):
        for key, length in sampled:
            match = _UP_TO_SEPARATOR.match(key)
            prefix = match[0] if match else ""
            keys[prefix] += 1
            payload_bytes[prefix] += length
        await trio.lowlevel.checkpoint()
    if len(keys) > MAX_PREFIXES:
        await _shorten(keys, payload_bytes)
    return [
        PrefixStatistics(prefix, round(keys[prefix] * scale), round(held * scale))
        for prefix, held in payload_bytes.most_common(MAX_PREFIXES)
    ]


async def _shorten(keys: Counter[str], payload_bytes: Counter[str]) -> None:
    """Cut prefixes at the separator before the last, those with the most separators first, until few are left."""
    by_depth: defaultdict[int, set[str]] = defaultdict(set)
    for some in _in_slices(list(keys)):
        for prefix in some:
            by_depth[sum(map(prefix.count, _SEPARATORS))].add(prefix)
        await trio.lowlevel.checkpoint()
    for depth in range(max(by_depth), 1, -1)[:_MAX_CUTS]:
        for some in _in_slices(list(by_depth[depth])):
            for prefix in some:
                match = _UP_TO_SEPARATOR_BEFORE.match(prefix)
                assert match is not None, "it has more than one separator"
                by_depth[depth - 1].add(match[0])
                keys[match[0]] += keys.pop(prefix)
                payload_bytes[match[0]] += payload_bytes.pop(prefix)
            await trio.lowlevel.checkpoint()
        if len(keys) <= MAX_PREFIXES:
            return


def _in_slices(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[first : first + _SLICE_KEYS] for first in range(0, len(items), _SLICE_KEYS))
