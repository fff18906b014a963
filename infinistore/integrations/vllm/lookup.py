"""Finds out how much of a prompt the store has, for models with any groups of layers.

The scheduler waits for a look-up, and a model of many layers has thousands of keys for
a prompt. So of long prompts it asks for some keys of each block, a bounded number in
all. A block of which others are missing is found out by the read, and computed. One
group that attends to all tokens takes one request.

With other groups, a prompt can be used up to n tokens if each group has what it needs
there. A second request asks which windows and states are stored; the longest n that
they allow is used.

What is on disk only is read ahead, as long as the request waits for its turn.
"""

from collections.abc import Sequence

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.integrations.internal.blocking_store_calls import read_ahead
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames, Group, alignment, hash_tokens

__all__ = ["Found", "Lookup"]

_MOST_KEYS = 384
"""How many keys a look-up asks for of a group; at least two of each block."""


@attrs.define
class Found:
    """What a lookup found. Counts are of leading tokens."""

    tokens: int = 0
    """What can be used."""
    full_tokens: int = 0
    """What the groups that attend to all tokens have."""
    stored: dict[int, set[int]] = attrs.field(factory=dict)
    """The blocks that the other groups have, by the group's index."""


class Lookup:
    """Looks prompts up in a store, for these groups of layers."""

    def __init__(self, store: BlockingStore, names: BlockNames, groups: Sequence[Group], record: Record) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._unit = hash_tokens(groups)
        self._alignment = alignment(groups)
        self._full = [group for group in groups if group.is_full]
        self._others = [group for group in groups if not group.is_full]

    def find(self, hashes: Sequence[str], computed: int, *, most: int, reads: bool) -> Found:
        """Look up the blocks with these hashes, of which an engine has the first
        `computed` tokens, and can use the first `most`.

        With `reads`, what is found after these is read ahead from a disk.
        """
        end, on_disk = self._leading(hashes, len(hashes) * self._unit)
        found = Found(0, end)
        if not end:
            return found
        found.stored, more_on_disk = self._stored(hashes, end)
        found.tokens = self._usable(min(end, self._aligned(most)), found.stored)
        if reads and on_disk + more_on_disk and found.tokens > computed:
            keys = self._keys(hashes, computed, found.tokens)
            read_ahead(self._store, PrefixMatch(len(keys), on_disk=on_disk + more_on_disk), keys, self._record)
        return found

    def _leading(self, hashes: Sequence[str], tokens: int) -> tuple[int, int]:
        """Return up to where the groups that attend to all tokens seem complete, and
        how many of their keys are on disk only.
        """
        end, on_disk = self._aligned(tokens), 0
        for group in self._full:
            if end:
                of = self._of(group, hashes, range(end // group.block_tokens))
                keys, each = self._names.some_keys(of, group.layers, most=_MOST_KEYS)
                match = self._store.match_prefix(keys)
                end = min(end, self._aligned(match // each * group.block_tokens))
                on_disk += match - match.in_memory
        return end, on_disk

    def _stored(self, hashes: Sequence[str], end: int) -> tuple[dict[int, set[int]], int]:
        """Return which blocks of the other groups seem to be stored, and how many of
        their keys are on disk only.
        """
        parts = []
        for group in self._others:
            of = self._of(group, hashes, range(end // group.block_tokens))
            parts.append((group, *self._names.some_keys(of, group.layers, most=_MOST_KEYS)))
        keys = [key for _, asked, _ in parts for key in asked]
        if not keys:
            return {}, 0
        there = self._store.exists_many(keys)
        stored: dict[int, set[int]] = {}
        first = 0
        for group, asked, each in parts:
            blocks = range(len(asked) // each)
            stored[group.index] = {
                number for number in blocks if all(there[first + number * each : first + (number + 1) * each])
            }
            first += len(asked)
        return stored, there.on_disk

    def _usable(self, end: int, stored: dict[int, set[int]]) -> int:
        """Return the longest length up to `end` at which each group has what it
        needs.
        """
        while end and not all(stored[group.index].issuperset(group.needed(end)) for group in self._others):
            end -= self._alignment
        return end

    def _keys(self, hashes: Sequence[str], start: int, end: int) -> list[str]:
        """Return all keys that a load of these tokens asks for."""
        return [
            key
            for group in (*self._full, *self._others)
            for key in self._names.all_keys(
                self._of(group, hashes, [n for n in group.needed(end) if n >= start // group.block_tokens]),
                group.layers,
            )
        ]

    def _of(self, group: Group, hashes: Sequence[str], numbers: Sequence[int] | range) -> list[str]:
        """Return the hashes of blocks of a group: each that of its last tokens."""
        return block_hashes(group, hashes, numbers, self._unit)

    def _aligned(self, tokens: int) -> int:
        return tokens // self._alignment * self._alignment


def block_hashes(group: Group, hashes: Sequence[str], numbers: Sequence[int] | range, unit: int) -> list[str]:
    """Return the hashes of blocks of a group, where each hash is of `unit` tokens."""
    each = group.block_tokens // unit
    return [hashes[(number + 1) * each - 1] for number in numbers]
