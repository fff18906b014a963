"""How long keys stay: at what moment they end, and what protects them from eviction.

The state machine (`test_store_machine.py`) compares sequences of calls with the model.
"""

from collections.abc import Callable

import pytest

from infinistore.core import Client, CoreLimits, Journal, StoreCore
from infinistore.core.hand_over import export
from infinistore.errors import LimitExceeded, OutOfMemory
from tests.core.conftest import FakeClock
from tests.core.test_journal import told
from tests.core.test_store import MakeCore, blocks, put


def put_for(core: StoreCore, ttl_s: float, values: dict[str, bytes]) -> None:
    client = core.open_client("for a while")
    put(core, client, values, hashed=False, ttl_s=ttl_s)
    core.close_client(client)


LOOKS: dict[str, Callable[[StoreCore], object]] = {
    "exists": lambda core: core.exists(["k"]) == b"\0",
    "lease": lambda core: core.lease(core.open_client("reader"), ["k"]).pinned == [],
    "find": lambda core: core.find_one(core.open_client("reader"), "k") is None,
    "match_prefix": lambda core: core.match_prefix(["k"]) == 0,
    "hold_prefix": lambda core: core.hold_prefix(core.open_client("reader"), ["k"], 1.0) == (0, 0),
    "keys": lambda core: core.keys() == [],
    "all_keys": lambda core: core.all_keys() == [],
    "len": lambda core: len(core) == 0,
    "sample": lambda core: core.sample(10) == [],
    "delete": lambda core: core.delete(["k"]) == 0,
    "purge": lambda core: core.purge() == 0,
    "evict_keys": lambda core: core.evict_keys(["k"]) == 0,
    "protect": lambda core: core.retention.protect(["k"]) == b"\0",
    "times_left": lambda core: core.retention.times_left(["k"]) == [0.0],
    "statistics": lambda core: core.statistics().keys == 0,
    "export": lambda core: export(core, "i", []).keys == [],
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_key_is_missing_from_the_moment_its_time_is_over(core: StoreCore, clock: FakeClock, look: str) -> None:
    put_for(core, 5.0, blocks("k"))
    clock.now += 5.0
    assert LOOKS[look](core)
    assert core.statistics().expired == 1
    assert core.statistics().used_bytes == 0


def test_what_has_ended_makes_room_before_anything_is_evicted(
    core: StoreCore, client: Client, clock: FakeClock
) -> None:
    put(core, client, {"old": b"o" * 2048})
    put_for(core, 5.0, {"k": b"k" * 2048})
    clock.now += 5.0
    put(core, client, {"new": b"n" * 2048})
    assert core.exists(["old", "k", "new"]) == b"\1\0\1"
    assert core.statistics().evicted.on_demand == 0


def test_a_lease_outlives_its_key(core: StoreCore, clock: FakeClock) -> None:
    put_for(core, 5.0, blocks("k"))
    lease = core.lease(core.open_client("reader"), ["k"])
    (view,) = lease.views
    assert view is not None
    before = bytes(view)
    clock.now += 5.0
    assert core.exists(["k"]) == b"\0"
    assert core.statistics().condemned_bytes == core.statistics().used_bytes > 0
    assert view == before
    core.release(lease)
    assert core.statistics().used_bytes == 0


def test_a_put_begins_a_new_time_and_one_without_ends_it(core: StoreCore, clock: FakeClock) -> None:
    put_for(core, 5.0, blocks("a", "b", "c"))
    clock.now += 4.0
    put_for(core, 5.0, blocks("a"))
    put(core, core.open_client("x"), blocks("b"))
    put(core, core.open_client("y"), blocks("c"), replace=False)
    assert core.retention.times_left(["a", "b", "c"]) == [5.0, None, 1.0]
    clock.now += 4.0
    assert core.exists(["a", "b", "c"]) == b"\1\1\0"


def test_a_key_put_again_after_its_time_is_not_ended_by_the_old_one(core: StoreCore, clock: FakeClock) -> None:
    put_for(core, 5.0, blocks("k"))
    core.delete(["k"])
    put(core, core.open_client("a"), blocks("k"))
    clock.now += 5.0
    assert core.exists(["k"]) == b"\1"


def test_keys_that_are_gone_are_forgotten(core: StoreCore) -> None:
    for number in range(20_000):
        put_for(core, 1e6, {f"k{number}": b"x" * 1024})
    assert len(core) == 4
    assert len(core.retention.ends) < 2000


def test_removals_that_fail_are_tried_again(core: StoreCore, clock: FakeClock) -> None:
    put_for(core, 5.0, blocks("k"))
    clock.now += 5.0

    def fail(entries: object) -> None:
        raise OSError("no table")

    core.on_removal = fail
    with pytest.raises(OSError, match="no table"):
        core.exists(["k"])
    core.on_removal = None
    assert core.exists(["k"]) == b"\0"


def test_the_journal_tells_that_a_key_is_gone_before_and_after(make_core: MakeCore, clock: FakeClock) -> None:
    journal = Journal()
    core = make_core(journal=journal)
    put_for(core, 5.0, blocks("k"))
    clock.now += 5.0
    core.catch_up()
    assert told(journal) == [("delete", ["k"]), ("put", ["k"]), ("delete", ["k"])]


# Pins


def test_pins_over_the_bound_are_refused_and_change_nothing(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_protected_ratio=0.25))
    client = core.open_client("a")
    put(core, client, {"a": b"a" * 512, "b": b"b" * 512, "c": b"c" * 512})
    assert core.retention.protect(["a"]) == b"\1"
    with pytest.raises(LimitExceeded, match=r"1\.5 KiB.*max_protected_ratio=0\.25 allows 1 KiB.*unpin other keys"):
        core.retention.protect(["b", "c"])
    assert core.statistics().protected_keys == 1
    assert core.retention.protect(["a", "b", "b"]) == b"\1\1\1"
    assert core.statistics().protected_bytes == core.statistics().pinned_bytes == 1024


@pytest.mark.parametrize(("first", "then", "ends"), [(5, 9, 9), (9, 5, 9), (5, 0, 0), (0, 5, 0), (5, 5, 5)])
def test_the_longer_of_two_protections_counts(
    core: StoreCore, clock: FakeClock, first: float, then: float, ends: float
) -> None:
    put(core, core.open_client("a"), blocks("k"))
    core.retention.protect(["k"], first)
    core.retention.protect(["k"], then)
    clock.now += ends - 0.5 if ends else 1e8
    assert core.statistics().protected_keys == 1
    clock.now += 0.5
    assert core.statistics().protected_keys == (0 if ends else 1)


def test_protection_for_a_time_begins_anew_after_it_was_taken_away(core: StoreCore, clock: FakeClock) -> None:
    put(core, core.open_client("a"), blocks("k"))
    core.retention.protect(["k"], 9.0)
    core.retention.unprotect(["k"])
    core.retention.protect(["k"], 5.0)
    clock.now += 5.0
    assert core.statistics().protected_keys == 0
    core.retention.protect(["k"])
    clock.now += 4.0
    assert core.statistics().protected_keys == 1


def test_a_block_put_again_is_protected_for_what_is_left_of_the_time(core: StoreCore, clock: FakeClock) -> None:
    put(core, core.open_client("a"), blocks("k"))
    core.retention.protect(["k"], 5.0)
    clock.now += 3.0
    put(core, core.open_client("b"), blocks("k"))
    clock.now += 1.5
    assert core.statistics().protected_keys == 1
    clock.now += 0.5
    assert core.statistics().protected_keys == 0


def test_protection_that_is_renewed_again_and_again_is_listed_a_few_times(core: StoreCore) -> None:
    put(core, core.open_client("a"), {"k": b"k" * 1024})
    for number in range(20_000):
        core.retention.protect(["k"], 5.0 + number)
    assert len(core.retention.ends) < 2000


def test_a_put_that_does_not_fit_beside_protected_keys_is_refused(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_protected_ratio=0.5))
    client = core.open_client("a")
    put(core, client, {"k": b"k" * 2048})
    core.retention.protect(["k"])
    with pytest.raises(OutOfMemory):
        core.reserve(client, [2112])
    core.abort(core.reserve(client, [2048]))
