"""The tier, the core, volumes and simulated disks against a model, in any order.

Every block is written with bytes that no other one has. Jobs end one at a time, in any
order, between any calls. After any crash each durable key that was not deleted gives
its bytes, and no key gives anything but one completed put's; while a store lives, a key
gives its newest block or nothing.
"""

import random
from typing import Any

import attrs
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from infinistore.core import Client, Lease, Reservation
from infinistore.disk.settings import Admission, TierSettings
from infinistore.disk.waits import Wait
from infinistore.errors import LimitExceeded, OutOfMemory
from tests.disk.conftest import FOREVER, UNIT_BYTES, Machine
from tests.disk.model import Mark, Model

pytestmark = pytest.mark.nightly
KEYS = [f"prefix/{number}" for number in range(10)] + ["ключ", "k" * 300]
LENGTHS = [1, 500, UNIT_BYTES, UNIT_BYTES, UNIT_BYTES + 1, 3 * UNIT_BYTES]

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True)
some_puts = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(LENGTHS), min_size=1, max_size=5)


@attrs.define(eq=False)
class Pending:
    """A deletion, purge or flush that is not settled."""

    wait: Wait
    keys: list[str] | None
    since: Mark
    what: str
    flushed: dict[str, Mark] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Prepared:
    """A put that becomes visible by a word, when its writer wants."""

    reservation: Reservation
    values: dict[str, bytes]
    checksums: list[int] | None = None


class TierMachine(RuleBasedStateMachine):
    """Drives a store with disks, and the model, side by side. The test sets what can go
    wrong."""

    disks = 1
    faults: tuple[str, ...] = ()
    is_lossy = False
    """Whether disks lie: deletions and durable blocks may be lost then."""

    @initialize(
        admission=st.sampled_from(["lazy", "eager", "eager", "second-use"]),
        segments=st.sampled_from([3, 4, 8]),
        seed=st.integers(0, 1000),
        group_units=st.sampled_from([2, 8, 64]),
        compress=st.booleans(),
    )
    def start(self, admission: Admission, segments: int, seed: int, group_units: int, compress: bool) -> None:
        self.machine = Machine(
            disks=self.disks,
            segments=segments,
            seed=seed,
            settings=TierSettings(
                admission=admission,
                compress=compress,
                group_s=0.01,
                group_bytes=group_units * UNIT_BYTES,
                hang_s=10.0,
                wait_s=FOREVER,
            ),
        )
        self.machine.settle()  # a disk that is made has a superblock
        self.random = random.Random(seed)
        self.model = Model()
        self.numbers = 0
        self.is_faulty = False
        self.was_faulty = False
        self.has_reused = self.has_scribbled = False
        self.begin()

    def begin(self) -> None:
        self.pending: list[Pending] = []
        self.prepared: list[Prepared] = []
        self.leases: list[tuple[Client, Lease, list[bytes | None]]] = []
        self.holds: list[int] = []

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.finish_all()
            self.check_all()
            self.machine.close()

    # Writing

    def values(self, lengths: dict[str, int]) -> dict[str, bytes]:
        self.numbers += 1
        found = {
            key: random.Random(f"{key} {self.numbers}").randbytes(max(8, length)) for key, length in lengths.items()
        }
        if self.numbers % 2:  # they get shorter when they are compressed
            found = {key: (value[:8] * len(value))[: len(value)] for key, value in found.items()}
        return found

    def reserve(self, values: dict[str, bytes]) -> Reservation | None:
        """Write values that have no names yet, if there is room for them."""
        core = self.machine.core
        try:
            reservation = core.reserve(self.machine.client, [len(value) for value in values.values()])
        except (OutOfMemory, LimitExceeded):
            return None
        core.commit_written()
        for view, value in zip(reservation.views, values.values(), strict=True):
            view[:] = value
        return reservation

    @rule(lengths=some_puts, hashed=st.sampled_from([True, True, True, False]), replace=st.booleans())
    def put(self, lengths: dict[str, int], hashed: bool, replace: bool) -> None:
        values = self.values(lengths)
        reservation = self.reserve(values)
        if reservation is None:
            return
        checksums = [xxhash.xxh3_64_intdigest(value) for value in values.values()] if hashed else None
        skipped = self.machine.core.commit(reservation, list(values), checksums, replace=replace)
        self.model.put({key: value for i, (key, value) in enumerate(values.items()) if i not in skipped})

    @rule(lengths=some_puts)
    def prepare(self, lengths: dict[str, int]) -> None:
        values = self.values(lengths)
        core = self.machine.core
        if core.is_being_written(list(values)) or (reservation := self.reserve(values)) is None:
            return
        prepared = Prepared(reservation, values)
        assert core.prepare(reservation, list(values), lambda: prepared.checksums)
        self.prepared.append(prepared)

    @precondition(lambda self: self.prepared)
    @rule()
    def write_a_word(self) -> None:
        """From now on the store has it, whenever it looks."""
        prepared = self.prepared.pop(0)
        prepared.checksums = [xxhash.xxh3_64_intdigest(value) for value in prepared.values.values()]
        self.model.put(prepared.values)

    # Removing

    @rule(keys=some_keys)
    def delete(self, keys: list[str]) -> None:
        deletion = self.machine.tier.delete(keys, FOREVER)
        self.model.delete(keys)
        self.pending.append(Pending(deletion.wait, keys, self.model.mark(), "delete"))

    @rule(keys=some_keys)
    def delete_in_memory_alone(self, keys: list[str]) -> None:
        """What others call the core for; the journal tells the tier."""
        self.machine.core.delete(keys)
        self.model.delete(keys)

    @rule(incremental=st.booleans())
    def purge(self, incremental: bool) -> None:
        wait = self.machine.tier.purge(FOREVER)
        core = self.machine.core
        core.commit_written()
        if incremental:
            while core.purge(3):
                pass
        else:
            core.purge()
        self.model.delete_all()
        self.pending.append(Pending(wait, None, self.model.mark(), "purge"))

    @rule(low=st.sampled_from([0.0, 0.3]))
    def evict(self, low: float) -> None:
        self.machine.core.evict(low, low)

    @rule(key=st.sampled_from(KEYS))
    def scribble(self, key: str) -> None:
        """A client overwrites a block that has a checksum; the store notices, some
        day."""
        core = self.machine.core
        entry = core.index.get(key)
        if entry is None or not entry[3]:
            return
        view = core.pool.view(entry[:3])
        before = bytes(view)
        self.was_faulty = True  # a copy that is written just now is damaged
        self.has_scribbled = True  # readers see it, too
        view[:8] = bytes(8)
        self.machine.start_jobs()
        for disk in self.machine.disks:
            for job in list(disk.under_way)[:2]:
                self.machine.finish(disk, job)
        if core.index.get(key) == entry:
            if self.random.random() < 0.5:
                core.verify(key)
            else:
                view[:] = before

    # Reading

    @rule(keys=some_keys)
    def get(self, keys: list[str]) -> None:
        self.machine.tier.want(keys, FOREVER)
        self.check_memory(keys)

    @rule(keys=some_keys)
    def get_and_wait(self, keys: list[str]) -> None:
        wait = self.machine.tier.want(keys, FOREVER)
        for _ in range(200):
            if wait is None or wait.settled:
                break
            self.run(10)
        self.check_memory(keys)

    @rule(keys=some_keys, hold=st.booleans())
    def prefetch(self, keys: list[str], hold: bool) -> None:
        try:
            found = self.machine.tier.prefetch(keys, 20.0 if hold else None)
        except LimitExceeded:
            return
        if found.hold_id:
            self.holds.append(found.hold_id)

    @rule(keys=some_keys)
    def match(self, keys: list[str]) -> None:
        tier = self.machine.tier
        where = tier.exists(keys)
        match = tier.match_prefix(keys)
        assert match.matched == (where + b"\0").index(0)
        assert match.in_memory == where[: match.matched].count(1)

    @precondition(lambda self: self.holds)
    @rule()
    def release_hold(self) -> None:
        self.machine.tier.release_hold(self.holds.pop())

    @rule(keys=some_keys, lost=st.booleans())
    def lease(self, keys: list[str], lost: bool) -> None:
        client = self.machine.core.open_client("a reader")
        lease = self.machine.core.lease(client, keys)
        self.leases.append((client, lease, [None if view is None else bytes(view) for view in lease.views]))
        if lost:
            self.machine.core.quarantine(client)

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self) -> None:
        client, lease, values = self.leases.pop(0)
        for view, value in zip(lease.views, values, strict=True):
            assert value is None or (view is not None and (bytes(view) == value or self.has_scribbled))
        self.machine.core.close_client(client)

    def check_memory(self, keys: list[str]) -> None:
        core = self.machine.core
        lease = core.lease(self.machine.client, keys)
        for key, view, entry in zip(keys, lease.views, lease.entries, strict=True):
            value = None if view is None else bytes(view)
            if value is not None and entry is not None and entry[3] and xxhash.xxh3_64_intdigest(value) != entry[3]:
                continue  # a reader would have noticed
            self.model.check(key, value, strict=not self.is_lossy)
        core.release(lease)

    # Disks

    @rule(most=st.sampled_from([1, 1, 2, 5, 30]))
    def run(self, most: int) -> None:
        """Let some jobs end, in any order."""
        for _ in range(most):
            self.machine.start_jobs()
            jobs = [(disk, job) for disk in self.machine.disks for job in disk.under_way]
            if not jobs:
                break
            disk, job = self.random.choice(jobs)
            self.machine.finish(disk, job)
        self.settle_pending()

    @rule(seconds=st.sampled_from([0.02, 0.02, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.machine.clock.now += seconds
        self.machine.start_jobs()
        self.settle_pending()

    @rule(keys=st.none() | some_keys)
    def flush(self, keys: list[str] | None) -> None:
        flushed = {} if keys is None else self.model.flushing(keys)
        wait = self.machine.tier.flush(keys, FOREVER)
        self.pending.append(Pending(wait, keys, self.model.mark(), "flush", flushed))

    def settle_pending(self) -> None:
        for pending in [one for one in self.pending if one.wait.settled]:
            self.pending.remove(pending)
            if pending.wait.unmet:
                continue
            if pending.what == "flush":
                self.model.flushed(pending.flushed)
            elif pending.what == "delete" and pending.keys is not None:
                self.model.deletion_is_durable(pending.keys, pending.since)
            elif pending.what == "purge":
                self.model.all_deleted_durably(pending.since)

    @precondition(lambda self: self.faults)
    @rule(chance=st.sampled_from([0.05, 0.3]))
    def break_disks(self, chance: float) -> None:
        self.is_faulty = self.was_faulty = True
        for disk in self.machine.disks:
            setattr(disk.faults, self.random.choice(self.faults), chance)

    @precondition(lambda self: self.is_faulty)
    @rule()
    def heal_disks(self) -> None:
        self.is_faulty = False
        for disk in self.machine.disks:
            disk.faults.heal()

    @precondition(lambda self: self.is_lossy)
    @rule(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def rot(self, where: float, bit: int) -> None:
        self.was_faulty = True
        for disk in self.machine.disks:
            for file, length in disk.files().items():
                if length:
                    disk.rot(file, int(where * length), bit)

    # Endings

    @rule(recovered=st.booleans())
    def crash(self, recovered: bool) -> None:
        self.lose_memory(recovered, orderly=False)

    def lose_memory(self, recovered: bool, orderly: bool) -> None:
        self.settle_pending()
        self.heal_disks()
        self.reuses_segments()
        self.machine.crash()
        self.model.crash(orderly=orderly)
        self.begin()
        if recovered:
            self.finish_all()
            self.check_all()

    @rule()
    def close_and_open(self) -> None:
        """An orderly end. What cannot be written in time is lost."""
        wait = self.machine.tier.close(self.machine.clock.now + 1000)
        for _ in range(1000):
            if wait.settled:
                break
            self.run(10)
            self.machine.clock.now += 0.01
        self.lose_memory(recovered=True, orderly=True)

    def finish_all(self) -> None:
        self.heal_disks()
        for prepared in self.prepared:
            self.machine.core.abort(prepared.reservation)
        self.prepared = []
        self.machine.settle(100.0)
        self.settle_pending()

    def check_all(self) -> None:
        """Read every key from where it is."""
        statistics = self.machine.tier.statistics()
        is_healthy = all(disk.state == "healthy" for disk in statistics.disks)
        must = is_healthy and not self.is_lossy and not self.was_faulty and not self.reuses_segments()
        for key in KEYS:
            wait = self.machine.tier.want([key], FOREVER)
            if wait is not None:
                self.machine.until(wait)
            lease = self.machine.core.lease(self.machine.client, [key])
            (view,) = lease.views
            value = None if view is None else bytes(view)
            (entry,) = lease.entries
            self.machine.core.release(lease)
            if entry is None or not entry[3] or xxhash.xxh3_64_intdigest(value or b"") == entry[3]:
                self.model.check(key, value, strict=not self.is_lossy, must=must)

    def reuses_segments(self) -> bool:
        """Whether what was durable may have been overwritten: disks were full."""
        self.has_reused |= any(volume.statistics().recycled_segments for volume in self.machine.volumes)
        return self.has_reused


def run_machine(machine: type[TierMachine], examples: int = 15, **attributes: Any) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), attributes),
        settings=settings(max_examples=examples, stateful_step_count=50, deadline=None),
    )


@pytest.mark.parametrize("disks", [1, 2])
def test_what_is_read_is_what_was_put_whatever_crashes(disks: int) -> None:
    run_machine(TierMachine, disks=disks)


@pytest.mark.parametrize("disks", [1, 2])
def test_what_is_read_is_what_was_put_on_disks_that_fail(disks: int) -> None:
    run_machine(TierMachine, disks=disks, faults=("read_error", "write_error", "flush_error", "short_read"))


def test_what_is_read_was_put_even_on_disks_that_lie() -> None:
    run_machine(TierMachine, disks=2, faults=("misdirected_write", "misdirected_read"), is_lossy=True)
