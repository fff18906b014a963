"""The details of a server's state, gathered in slices when an operator asks for them.

Every list is bounded, because it travels in one message and is shown on one screen: the
connections that moved the most bytes, and the prefixes that hold the most.
"""

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import attrs
import trio

from infinistore.core.store import StoreCore
from infinistore.server.recorder import Recorder
from infinistore.statistics import ArenaStatistics, ClientStatistics, PrefixStatistics, ServerDetails

__all__ = ["MAX_ARENAS", "MAX_CLIENTS", "MAX_PREFIXES", "MAX_SAMPLE_KEYS", "arena", "busiest", "gather", "prefixes"]

_T = TypeVar("_T")
MAX_ARENAS = 256
MAX_CLIENTS = 256
MAX_PREFIXES = 64
MAX_SAMPLE_KEYS = 4096
MAX_OPERATIONS = 512
ARENA_PARTS = 128
"""The number of parts that an arena's fill is reported in, if it has as many units."""

_SLICE_KEYS = 512
_MAX_CUTS = 16
_SEPARATORS = "/:@#|"
_UP_TO_SEPARATOR = re.compile(r".*[/:@#|]", re.DOTALL)
_UP_TO_SEPARATOR_BEFORE = re.compile(r".*[/:@#|](?=.)", re.DOTALL)


async def gather(core: StoreCore, clients: Iterable[ClientStatistics], recorder: Recorder, state: str) -> ServerDetails:
    """Gather the details of a server with these clients and in this state."""
    operations = recorder.statistics()
    if len(operations) > MAX_OPERATIONS:
        operations = heapq.nlargest(MAX_OPERATIONS, operations, key=lambda one: one.count)
    found_clients = busiest(clients)
    await trio.lowlevel.checkpoint()
    found_arenas = []
    for index in range(min(len(core.pool.arenas), MAX_ARENAS)):
        found_arenas.append(arena(core, index))
        await trio.lowlevel.checkpoint()
    return ServerDetails(operations, found_clients, found_arenas, await prefixes(core), state)


def busiest(clients: Iterable[ClientStatistics]) -> list[ClientStatistics]:
    """Return the connections that moved the most bytes, the busiest first."""
    return heapq.nlargest(MAX_CLIENTS, clients, key=lambda client: client.received_bytes + client.sent_bytes)


def arena(core: StoreCore, index: int) -> ArenaStatistics:
    """Return how full an arena is, and each of its parts."""
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
    """Return the prefixes that keys share, and what they hold, the largest first.

    A key's prefix ends with its last separator, one of `/ : @ # |`; keys without one
    have the empty prefix. While there are too many prefixes, those with the most
    separators are cut at the previous one. Of more than `MAX_SAMPLE_KEYS` keys, a
    sample of at most that many is read (`StoreCore.sample`), and the figures are
    estimates.
    """
    sample = core.sample(MAX_SAMPLE_KEYS)
    known = len(core)
    tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
    for sampled in _in_slices(sample):
        for key, length in sampled:
            match = _UP_TO_SEPARATOR.match(key)
            tally = tallies[match[0] if match else ""]
            tally.keys += 1
            tally.payload_bytes += length
            tally.squares += length * length
        await trio.lowlevel.checkpoint()
    if len(tallies) > MAX_PREFIXES:
        await _shorten(tallies)
    largest = heapq.nlargest(MAX_PREFIXES, tallies.items(), key=lambda item: item[1].payload_bytes)
    return [_estimate(prefix, tally, len(sample), known) for prefix, tally in largest]


@attrs.define
class _Tally:
    """The counts of one prefix. `squares` is the sum of the squared lengths."""

    keys: int = 0
    payload_bytes: int = 0
    squares: int = 0

    def add(self, other: "_Tally") -> None:
        self.keys += other.keys
        self.payload_bytes += other.payload_bytes
        self.squares += other.squares


def _estimate(prefix: str, tally: _Tally, sampled: int, known: int) -> PrefixStatistics:
    """Estimate the figures for all keys from a sample, with an error of two standard
    errors.

    The error of a share is that of Agresti and Coull (The American Statistician 52,
    1998), which also holds for shares close to 0 and 1. It is smaller if the sample is
    a large part of all keys.
    """
    scale = known / sampled
    whole = math.sqrt(1 - sampled / known)
    share = (tally.keys + 2) / (sampled + 4)
    keys_error = 2 * whole * known * math.sqrt(share * (1 - share) / (sampled + 4))
    mean = tally.payload_bytes / tally.keys
    variance = max(0.0, tally.squares / tally.keys - mean * mean)
    payload_error = math.hypot(keys_error * mean, 2 * whole * scale * math.sqrt(tally.keys * variance))
    return PrefixStatistics(
        prefix,
        keys=round(tally.keys * scale),
        payload_bytes=round(tally.payload_bytes * scale),
        keys_error=math.ceil(keys_error),
        payload_error_bytes=math.ceil(payload_error),
    )


async def _shorten(tallies: defaultdict[str, _Tally]) -> None:
    """Cut prefixes at the separator before the last, those with the most separators
    first, until few are left.
    """
    by_depth: defaultdict[int, set[str]] = defaultdict(set)
    for some in _in_slices(list(tallies)):
        for prefix in some:
            by_depth[sum(map(prefix.count, _SEPARATORS))].add(prefix)
        await trio.lowlevel.checkpoint()
    for depth in range(max(by_depth), 1, -1)[:_MAX_CUTS]:
        for some in _in_slices(list(by_depth[depth])):
            for prefix in some:
                match = _UP_TO_SEPARATOR_BEFORE.match(prefix)
                assert match is not None, "it has more than one separator"
                by_depth[depth - 1].add(match[0])
                tallies[match[0]].add(tallies.pop(prefix))
            await trio.lowlevel.checkpoint()
        if len(tallies) <= MAX_PREFIXES:
            return


def _in_slices(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    return (items[first : first + _SLICE_KEYS] for first in range(0, len(items), _SLICE_KEYS))
