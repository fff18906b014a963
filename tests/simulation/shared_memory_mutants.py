"""Bugs to plant in the shared memory path, each of which a simulation has to find.

Each breaks one rule of the tables (`infinistore/protocol/shared_tables.py`), or one
promise of the two ends. `MUTANTS` has a context manager for each that plants it.
Nothing is replaced for the duration of a call: a process may be stopped in it.
"""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any
from unittest import mock

from xxhash import xxh3_64_intdigest

from infinistore.client.movers.shm.known_blocks import KnownBlocks, KnownReads, PinnedBlocks, Places
from infinistore.client.movers.shm.mover import ShmMover
from infinistore.core.index import Index
from infinistore.core.pins import HazardPins, Retired
from infinistore.core.removals import Removals
from infinistore.core.store import CommittedIndex, StoreCore
from infinistore.protocol import shared_tables
from infinistore.protocol.shared_tables import CommitWord, Hazards, HazardTable, RemovalTable
from tests.server.test_store_buffers import epoch_behind_the_fence, epoch_first, no_epoch, no_fence, reordered

__all__ = ["MUTANTS"]

_UNPINNED = -1


def _replaced(*places: tuple[Any, str, Any]) -> Callable[[], AbstractContextManager[object]]:
    def plant() -> AbstractContextManager[object]:
        stack = ExitStack()
        for owner, name, wrong in places:
            stack.enter_context(mock.patch.object(owner, name, wrong))
        return stack

    return plant


def _without_fence(right: Any) -> Any:
    return FunctionType(right.__code__, {**right.__globals__, "fence": lambda: None}, right.__name__)


# The client's end


def _check_before_hazards(self: Any, keys: Sequence[str], known: Places) -> PinnedBlocks | None:
    hazards = self._pins.hazards
    if hazards is None or hazards.closed or not self._known.hold(keys, known):
        return None
    hazard = hazards.add(known.places, known.sizes, known.checksums)
    return None if hazard is None else PinnedBlocks(known.places, known.sizes, known.checksums, hazard)


def _never_check(self: KnownBlocks, keys: Sequence[str], found: Places) -> bool:
    return self.table is not None


def _pin_for_a_moment(self: Any, keys: Sequence[str], known: Places) -> PinnedBlocks | None:
    pinned = _pin(self, keys, known)
    if pinned is None:
        return None
    self._pins.hazards.remove(pinned.hazard)
    return PinnedBlocks(*pinned[:3], hazard=_UNPINNED)


def _remove_if_pinned(self: HazardTable, first: int) -> None:
    if first != _UNPINNED:
        _remove_hazard(self, first)


async def _commit_before_payload(self: Any, part: Any, room: Any) -> Any:
    word = self._known_reads.commit_word
    if word is not None and self._channel.verify:
        word.commit(room.reservation, array("Q", [xxh3_64_intdigest(view) for view in part.views]))
    elif word is not None:
        word.commit(room.reservation, array("Q"))
    targets = self.pool.blocks(room.places.tolist(), part.sizes, writable=True)
    copying = self.pool.copier.copy(
        part.views, targets, part.sizes, part.total_bytes, hash_targets=self._channel.verify
    )
    return array("Q", await copying)


def _commit_before_checksums(self: CommitWord, reservation: int, checksums: Any) -> None:
    self.word[4] = reservation
    self.checksums[: len(checksums)] = memoryview(checksums)
    shared_tables.fence()


# The server's end


def _scan_nothing(self: Retired, entries: Sequence[Any]) -> bool:
    return True


def _scan_before_announcing(self: Any, index: Index, keys: Sequence[str], entries: list[Any]) -> int:
    scanned = self._retired.scan_for(entries)
    self.announce(entries)
    removed = index.remove(keys)
    self._retired.add(entries if removed == len(entries) else list(set(entries)), scanned=scanned)
    return removed


def _announce_after_freeing(self: Any, index: Index, keys: Sequence[str], entries: list[Any]) -> int:
    scanned = self._retired.scan_for(entries)
    removed = index.remove(keys)
    self._retired.add(entries if removed == len(entries) else list(set(entries)), scanned=scanned)
    self.announce(entries)
    return removed


def _prepare_silently(self: Any, reservation: Any, keys: Sequence[str], written: Any) -> bool:
    self.committed.up_to_date()
    if self.committed.names_any(keys):
        return False
    self.committed.prepare(reservation, keys, written)
    return True


def _epoch_after_hazards(self: Any) -> list[tuple[int, int, int, int, int]]:
    found = _look(self)
    self._epoch = self.numbers[5]
    return found


def _scan_once(self: Any, client: Any) -> None:
    if client.read_hazards is not None and not client.hazards:
        _scan_client(self, client)


def _never_up_to_date(self: Any) -> Index:
    return self._CommittedIndex__index  # type: ignore[no-any-return]


_pin, _remove_hazard = KnownReads.pin, HazardTable.remove
_look, _scan_client = Hazards.look, HazardPins.scan_client

MUTANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "hazards without a fence": _replaced((HazardTable, "add", reordered(HazardTable.add, no_fence))),
    "hazards without an epoch": _replaced((HazardTable, "add", reordered(HazardTable.add, no_epoch))),
    "epoch before the hazards": _replaced((HazardTable, "add", reordered(HazardTable.add, epoch_first))),
    "epoch after the fence": _replaced((HazardTable, "add", reordered(HazardTable.add, epoch_behind_the_fence))),
    "removals without a fence": _replaced((RemovalTable, "note", _without_fence(RemovalTable.note))),
    "removals checked before hazards are set": _replaced((KnownReads, "pin", _check_before_hazards)),
    "removals never checked": _replaced((KnownBlocks, "hold", _never_check)),
    "hazards erased before the copy": _replaced(
        (KnownReads, "pin", _pin_for_a_moment), (HazardTable, "remove", _remove_if_pinned)
    ),
    "committed before the payload": _replaced((ShmMover, "_copy_in", _commit_before_payload)),
    "committed before the checksums": _replaced((CommitWord, "commit", _commit_before_checksums)),
    "space reused without a scan": _replaced((Retired, "scan_for", _scan_nothing)),
    "hazards scanned before the removal": _replaced((Removals, "remove", _scan_before_announcing)),
    "removal announced after reuse": _replaced((Removals, "remove", _announce_after_freeing)),
    "replacement not announced": _replaced((StoreCore, "prepare", _prepare_silently)),
    "epoch read after the hazards": _replaced((Hazards, "look", _epoch_after_hazards)),
    "hazards scanned once": _replaced((HazardPins, "scan_client", _scan_once)),
    "commit words not looked at": _replaced((CommittedIndex, "up_to_date", _never_up_to_date)),
    "blocks that are being written told as known": _replaced((StoreCore, "is_being_written", lambda *_: False)),
}
