"""Every kind of store against the reference model: any sequence of calls, the same
answers, the same recency.

Leases in place are kept by arrays, which die in any order and in other threads; what
they show must never change. By shared memory, a second client puts and deletes, too.
Each value has bytes that no other value has. The pool is small, so puts evict. After
each step the order of keys, from the coldest to the warmest, is compared with the
model's, and so are all stored bytes and what is used and held.
"""

import threading
import warnings
from contextlib import ExitStack
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.core import Watermarks
from infinistore.core.space import EXTRA_STEPS
from infinistore.errors import (
    BufferTooSmall,
    KeyNotFound,
    LeaseStillInUse,
    LimitExceeded,
    OutOfMemory,
    ValueTooLarge,
)
from tests.clients.stores import STORES, Loops, Opener, differing
from tests.core.model import Block, NoRoom, ReferenceStore
from tests.server.running import KIB, make_config

UNIT_BYTES = 4 * KIB
CONFIG = make_config(prealloc_bytes=64 * KIB, minimal_allocate_bytes=UNIT_BYTES, max_batch_keys=6)
MAX_HELD_RATIO = 0.25
KEYS = [f"prefix/{i}" for i in range(12)] + ["a", "ключ", "鍵/1"]
SMALL = [1, 63, 1000, 4095, 4096]
SIZES = [*SMALL, 4097, 8192, 20_000]

some_keys = st.lists(st.sampled_from(KEYS), max_size=9)
runs_of_keys = st.builds(lambda first, count: KEYS[first : first + count], st.integers(0, 11), st.integers(1, 9))
some_kept = st.sets(st.integers(0, 2))
ways_to_read = st.sampled_from(["get", "get_into", "lease", "lease", "match_prefix", "exists"])
ratios = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


def parts(batch: list[Any], length: int) -> list[list[Any]]:
    return [batch[first : first + length] for first in range(0, len(batch), length)]


@attrs.define(eq=False)
class InUse:
    """A lease whose block was left while arrays of it are alive: by position, which;
    and what it pins.
    """

    arrays: dict[int, Any]
    blocks: list[Block | None]
    core_leases: int
    pinned: list[Block] = attrs.field(factory=list)


class ClientMachine(RuleBasedStateMachine):
    """Drives a store and the model side by side. `opener` and `loops` are set by the
    test.
    """

    opener: Opener
    loops: Loops

    holds = Bundle("holds")
    leases = Bundle("leases")

    @initialize(seed=st.integers(0, 1000))
    def start(self, seed: int) -> None:
        self.closing = ExitStack()
        self.opened = self.closing.enter_context(type(self).opener(self.loops, CONFIG, {}, seed))
        self.store = self.opened.store
        marks = Watermarks()
        self.model = ReferenceStore(
            64 * KIB, self.opened.core.pool.allocator.footprint, marks.low, marks.high, EXTRA_STEPS
        )
        self.written = 0
        self.read_before: list[str] = []
        self.open_holds: dict[str, list[Block]] = {}
        self.in_use: list[InUse] = []
        self.embedded = self.opened.server is None
        self.pins_by_itself = not self.embedded and self.store.stats().transport == "shm"
        self.in_place = self.embedded or self.pins_by_itself
        self.other = self.store
        if self.opened.server is not None and self.pins_by_itself:
            self.other = self.closing.enter_context(blocking.open_store(self.opened.server.url))

    @property
    def either(self) -> st.SearchStrategy[BlockingStore]:
        return st.sampled_from([self.store] if self.other is self.store else [self.store, self.other])

    def teardown(self) -> None:
        if hasattr(self, "closing"):
            self.closing.close()
            self.leased_bytes_never_change()  # not even when the store and its server are gone

    # Writing

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=9, unique=True) | runs_of_keys, data=st.data())
    def put_many(self, keys: list[str], data: st.DataObject) -> None:
        whole = len(keys) <= CONFIG.max_batch_keys
        # One that is split is made of values of one footprint, which never fail for
        # want of a large enough piece.
        sizes = data.draw(st.lists(st.sampled_from(SIZES if whole else SMALL), min_size=len(keys), max_size=len(keys)))
        replace = data.draw(st.booleans())
        items = [(key, self.unique_bytes(size)) for key, size in zip(keys, sizes, strict=True)]
        as_mapping = data.draw(st.booleans())
        self.put(items, replace, dict(items) if as_mapping else iter(items), data.draw(self.either))

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from(SIZES), data=st.data())
    def put_one(self, key: str, size: int, data: st.DataObject) -> None:
        value = self.unique_bytes(size)
        self.put([(key, value)], True, None, data.draw(self.either))

    def put(self, items: list[tuple[str, bytes]], replace: bool, given: Any, store: BlockingStore) -> None:
        skipped = [] if replace else [key for key, _ in items if key in self.model.blocks]
        self.model.touch(skipped)
        split = parts([item for item in items if item[0] not in skipped], self.opened.batch_keys)
        room = 0
        try:
            for part in split:
                room = self.model.reserve([len(value) for _, value in part])
                if part is not split[-1]:
                    self.model.commit(room, part, replace=replace)
        except NoRoom:
            event("refused: no room")
            with pytest.raises(OutOfMemory):
                store.put_many(items, replace=replace)
            return
        before = self.fragmented()
        refused = False
        try:
            if given is None:
                store.put(*items[0])
            else:
                assert store.put_many(given, replace=replace) == skipped
        except OutOfMemory:
            event("refused: fragmentation")
            refused = True
        # What fragmentation costs, only the allocator knows.
        self.model.evict_blocks(self.fragmented() - before)
        if refused:
            assert len(split) == 1
            self.model.abort(room)
        elif split:
            self.model.commit(room, split[-1], replace=replace)
            if skipped:
                self.model.touch([key for key, _ in items if key in self.model.blocks])

    @rule(key=st.sampled_from(KEYS), others=st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    def put_something_too_large(self, key: str, others: list[str]) -> None:
        items = {other: b"small" for other in others if other != key}
        with pytest.raises(ValueTooLarge):
            self.store.put_many({**items, key: bytes(64 * KIB + 1)})

    # Reading

    @rule(keys=some_keys | runs_of_keys)
    def get_many(self, keys: list[str]) -> None:
        values = self.store.get_many(keys)
        assert [None if value is None else bytes(value) for value in values] == self.model_get(keys)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: str) -> None:
        (expected,) = self.model_get([key])
        if expected is None:
            with pytest.raises(KeyNotFound):
                self.store.get(key)
        else:
            assert self.store.get(key) == expected

    @rule(keys=some_keys | runs_of_keys, sizes=st.lists(st.sampled_from([0, 1, 5000, 20_000]), min_size=9, max_size=9))
    def get_many_into(self, keys: list[str], sizes: list[int]) -> None:
        buffers = [bytearray(b"." * size) for size in sizes[: len(keys)]]
        expected = [bytes(buffer) for buffer in buffers]
        lengths: list[int | None] = []
        pairs = list(zip(keys, buffers, strict=True))
        first = 0
        for part in parts(keys, self.opened.batch_keys):
            values = self.model_get(part)
            if any(value is not None and len(value) > len(buffers[first + i]) for i, value in enumerate(values)):
                with pytest.raises(BufferTooSmall):
                    self.store.get_many_into(pairs)
                break
            for index, value in enumerate(values, first):
                lengths.append(None if value is None else len(value))
                if value is not None:
                    expected[index] = value + expected[index][len(value) :]
            first += len(part)
        else:
            assert self.store.get_many_into(pairs) == lengths
        assert list(map(bytes, buffers)) == expected

    @rule(
        target=leases,
        first=st.integers(0, 14),
        count=st.integers(1, 3),
        how=ways_to_read,
        kept=some_kept,
    )
    @precondition(lambda self: self.model.blocks)
    def read_what_is_there(self, first: int, count: int, how: str, kept: set[int]) -> Any:
        """Several times: by shared memory, what was read once is read again without
        asking.
        """
        keys = sorted(self.model.blocks)
        first = min(first, len(keys) - 1)
        self.read_before = keys[first : first + count]
        self.get_many(self.read_before)
        self.get_many(self.read_before)
        return self.read_again(how, kept)

    @rule(target=leases, how=ways_to_read, kept=some_kept)
    @precondition(lambda self: self.read_before)
    def read_again(self, how: str, kept: set[int]) -> Any:
        """Others may have changed it meanwhile."""
        keys = self.read_before
        if how == "lease":
            return self.lease(keys, len(keys) > 1, kept)
        if how == "get":
            self.get_many(keys)
        elif how == "get_into":
            self.get_many_into(keys, [20_000] * len(keys))
        elif how == "match_prefix":
            self.match_prefix(keys)
        else:
            self.exists(keys)
        return multiple()

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from([0, 1, 5000, 20_000]))
    def get_into(self, key: str, size: int) -> None:
        buffer = bytearray(b"." * size)
        (value,) = self.model_get([key])
        if value is None:
            with pytest.raises(KeyNotFound):
                self.store.get_into(key, buffer)
        elif len(value) > size:
            with pytest.raises(BufferTooSmall):
                self.store.get_into(key, buffer)
        else:
            assert self.store.get_into(key, buffer) == len(value)
            assert buffer[: len(value)] == value
            return
        assert buffer == b"." * size

    @rule(keys=some_keys | runs_of_keys)
    def exists(self, keys: list[str]) -> None:
        assert self.store.exists_many(iter(keys)) == self.model.exists(keys)
        assert [self.store.exists(key) for key in keys[:2]] == self.model.exists(keys[:2])

    @rule(keys=some_keys | runs_of_keys)
    def match_prefix(self, keys: list[str]) -> None:
        matched = 0
        for part in parts(keys, self.opened.batch_keys):
            found = self.model.match_prefix(part)
            matched += found
            if found < len(part):
                break
        match = self.store.match_prefix(keys)
        assert match == matched
        assert not match.hold

    @rule(target=holds, keys=runs_of_keys)
    def hold(self, keys: list[str]) -> Any:
        keys = keys[: CONFIG.max_batch_keys]
        count = self.model.count_prefix(keys)
        blocks = [self.model.blocks[key] for key in keys[:count]]
        new = sum(block.footprint for block in set(blocks) if not block.holds)
        if count and self.model.held + new > MAX_HELD_RATIO * self.model.capacity:
            with pytest.raises(LimitExceeded):
                self.store.match_prefix(keys, hold_s=50)
            return multiple()
        match = self.store.match_prefix(keys, hold_s=50)
        assert match == self.model.match_prefix(keys)
        assert bool(match.hold) == bool(count)
        if not count:
            return multiple()
        for block in blocks:
            block.holds += 1
        self.open_holds[match.hold] = blocks
        return match.hold

    @rule(hold=consumes(holds) | holds | st.sampled_from(["", "f", "0" * 32 + ":1"]))
    def release_hold(self, hold: str) -> None:
        assert self.store.release_hold(hold) == (hold in self.open_holds)
        for block in self.open_holds.pop(hold, []):
            block.holds -= 1
        self.model.unpinned()

    # In place

    @rule(target=leases, keys=some_keys | runs_of_keys, verify=st.booleans(), kept=st.sets(st.integers(0, 8)))
    def lease(self, keys: list[str], verify: bool, kept: set[int]) -> Any:
        if self.pins_by_itself and self.is_above_share_at_last(keys):
            return multiple()  # what it knows it gets all the same
        blocks: list[Block | None] = []
        core_leases = 0
        leased = self.leased_bytes()
        for part in parts(keys, self.opened.batch_keys):
            found = [self.model.blocks.get(key) for key in part]
            wanted = sum(block.footprint for block in found if block is not None)
            if self.in_place and self.is_above_share(leased, wanted):
                event("refused: lease")
                with pytest.raises(LimitExceeded), self.store.lease(keys):
                    pass
                return multiple()
            self.model.find(part)
            leased += wanted
            core_leases += bool(wanted) and self.in_place
            blocks += found
        kept = {index for index in kept if index < len(keys) and blocks[index] is not None}
        arrays: dict[int, Any] = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self.store.lease(keys, verify=verify) as views:
                assert [None if view is None else bytes(view) for view in views] == [
                    None if block is None else block.data for block in blocks
                ]
                assert all(view is None or view.readonly for view in views)
                arrays.update({index: np.frombuffer(views[index], np.uint8) for index in kept})  # type: ignore[arg-type]
            del views
        assert [warning.category for warning in caught] == [LeaseStillInUse] * bool(kept)
        if not kept:
            return multiple()
        lease = InUse(arrays, blocks, core_leases)
        if self.in_place:
            lease.pinned = [block for block in blocks if block is not None]
            for block in lease.pinned:
                block.leases += 1
        self.in_use.append(lease)
        return lease

    @rule(lease=consumes(leases) | leases, in_thread=st.booleans(), but_one=st.booleans())
    def let_arrays_die(self, lease: InUse, in_thread: bool, but_one: bool) -> None:
        dying = sorted(lease.arrays)[but_one:]
        last = len(dying) == len(lease.arrays)

        def die() -> None:
            for index in dying:
                del lease.arrays[index]

        if in_thread:
            thread = threading.Thread(target=die)
            thread.start()
            thread.join()
        else:
            die()
        if last:
            self.in_use = [other for other in self.in_use if other is not lease]
            for block in lease.pinned:
                block.leases -= 1
            lease.pinned = []
            self.model.unpinned()

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=CONFIG.max_batch_keys, unique=True),
        data=st.data(),
        fails=st.booleans(),
    )
    def reserve(self, keys: list[str], data: st.DataObject, fails: bool) -> None:
        sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=len(keys), max_size=len(keys)))
        items = [(key, self.unique_bytes(size)) for key, size in zip(keys, sizes, strict=True)]
        wanted = self.model.footprints(sizes)
        if self.embedded and self.is_above_share(self.leased_bytes(), wanted):
            event("refused: reservation")
            with pytest.raises(LimitExceeded), self.store.reserve(dict(zip(keys, sizes, strict=True))):
                pass
            return
        expected: type[Exception] | None = KeyError if fails else None
        reserved = self.in_place or not fails
        room = 0
        if reserved:
            try:
                room = self.model.reserve(sizes)
            except NoRoom:
                expected, reserved = OutOfMemory, False
        before = self.fragmented()
        present = self.store.exists_many(keys)
        try:
            with self.store.reserve(dict(zip(keys, sizes, strict=True))) as views:
                now = self.store.exists_many(keys)  # room was made, perhaps, but nothing is new
                assert all(was or not there for was, there in zip(present, now, strict=True))
                for index, (_, value) in enumerate(items):
                    views[index][:] = value
                if fails:
                    raise KeyError
            found: type[Exception] | None = None
        except (OutOfMemory, KeyError) as error:
            found = type(error)
        if found is OutOfMemory and reserved:
            event("refused: fragmentation")
        else:
            assert found is expected
        self.model.evict_blocks(self.fragmented() - before)
        if reserved:
            if found is None:
                self.model.commit(room, items)
            else:
                self.model.abort(room)

    def leased_bytes(self) -> int:
        return sum(block.footprint for lease in self.in_use for block in lease.pinned)

    def is_above_share(self, held: int, wanted: int) -> bool:
        most = self.opened.core.limits.max_pinned_ratio * self.model.capacity
        return bool(held and wanted) and held + wanted > most

    def is_above_share_at_last(self, keys: list[str]) -> bool:
        blocks = filter(None, map(self.model.blocks.get, keys))
        return self.is_above_share(self.leased_bytes() or 1, sum(block.footprint for block in blocks))

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for lease in getattr(self, "in_use", []):
            for index, array in lease.arrays.items():
                block = lease.blocks[index]
                assert block is not None
                assert array.tobytes() == block.data

    # Removing

    @rule(keys=some_keys, data=st.data())
    def delete(self, keys: list[str], data: st.DataObject) -> None:
        assert data.draw(self.either).delete(keys) == self.model.delete(keys)

    @rule()
    def purge(self) -> None:
        assert self.store.purge() == self.model.purge()

    @rule(low=ratios, high=ratios)
    def evict(self, low: float, high: float) -> None:
        if low > high:
            with pytest.raises(ValueError, match=r"."):
                self.store.evict(low, high)
        else:
            assert self.store.evict(low, high) == self.model.evict(low, high)

    # Looking

    @rule(prefix=st.sampled_from(["", "prefix/", "prefix/1", "к", "nothing"]), limit=st.integers(0, 20))
    def list_keys(self, prefix: str, limit: int) -> None:
        assert self.store.keys(prefix, limit) == self.model.keys(prefix, limit, "")

    @rule(page=st.integers(1, 5))
    def page_through_all_keys(self, page: int) -> None:
        found: list[str] = []
        while True:
            keys = self.store.keys(limit=page, after=found[-1] if found else "")
            found += keys
            if len(keys) < page:
                break
        assert found == sorted(self.model.blocks)

    # What must hold after every step

    @invariant()
    def the_store_is_what_the_model_is(self) -> None:
        self.opened.look(self.compare)

    def compare(self) -> None:
        core = self.opened.core
        statistics = core.statistics()  # first: it hears what clients have used without asking
        assert list(core.index) == list(self.model.blocks)
        for key, block in self.model.blocks.items():
            entry = core.index.get(key)
            assert entry is not None
            assert core.pool.view(entry[:3]) == block.data
        expected = {
            "used_bytes": self.model.used,
            "pinned_bytes": self.model.pinned,
            "held_bytes": self.model.held,
            "keys": len(self.model.blocks),
            "holds": len(self.open_holds),
            "reservations": 0,
            "reserved_bytes": 0,
            "leases": sum(lease.core_leases for lease in self.in_use),
        }
        assert {name: getattr(statistics, name) for name in expected} == expected

    def fragmented(self) -> int:
        evicted: int = self.opened.look(lambda: self.opened.core.statistics().evicted.fragmentation)
        return evicted

    def model_get(self, keys: list[str]) -> list[bytes | None]:
        values: list[bytes | None] = []
        for part in parts(keys, self.opened.batch_keys):
            values += self.model.get(part)
        return values

    def unique_bytes(self, size: int) -> bytes:
        self.written += 1
        return (self.written.to_bytes(4, "little") * size)[:size]


@pytest.mark.parametrize("kind", STORES)
def test_every_store_does_what_the_model_does(kind: str, loops: Loops) -> None:
    """Half as often for what differs in its driver alone."""
    machine = type("Machine", (ClientMachine,), {"opener": staticmethod(STORES[kind]), "loops": loops})
    examples = (settings.default.max_examples if settings.default else 100) // 4
    if kind not in differing(STORES):
        examples //= 2
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40))
