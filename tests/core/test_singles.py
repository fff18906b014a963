"""One block at a time, in one step: it leaves what a batch of one block leaves. The
state machine (`test_store_machine.py`) compares sequences of calls with the model.
"""

import pytest

from infinistore.core import Client, CoreLimits, Journal, StoreCore
from infinistore.core.index import NO_CHECKSUM
from infinistore.errors import OutOfMemory
from tests.core.conftest import FakeClock
from tests.core.test_journal import told
from tests.core.test_retention import put_for
from tests.core.test_store import MakeCore, blocks, get, put


def write(core: StoreCore, client: Client, key: str, value: bytes, *, replace: bool = True) -> bool:
    stored = core.write_one(client, key, memoryview(value), NO_CHECKSUM, replace=replace)
    core.free_replaced()
    return stored


@pytest.mark.parametrize("replace", [True, False])
def test_a_key_whose_time_is_over_is_written_as_a_missing_one(core: StoreCore, clock: FakeClock, replace: bool) -> None:
    put_for(core, 5.0, blocks("k"))
    clock.now += 5.0
    assert write(core, core.open_client("a"), "k", b"new", replace=replace)
    assert core.statistics().expired == 1
    assert core.retention.times_left(["k"]) == [None]
    clock.now += 5.0
    assert get(core, core.open_client("b"), "k") == [b"new"]


def test_a_write_ends_the_time_of_the_older_block_and_one_that_keeps_it_does_not(
    core: StoreCore, client: Client, clock: FakeClock
) -> None:
    put_for(core, 5.0, blocks("replaced", "kept"))
    assert write(core, client, "replaced", b"new")
    assert not write(core, client, "kept", b"new", replace=False)
    assert core.retention.times_left(["replaced", "kept"]) == [None, 5.0]
    clock.now += 5.0
    assert core.exists(["replaced", "kept"]) == b"\1\0"


def test_a_protected_key_that_is_written_stays_so_within_the_bound(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_protected_ratio=0.25))
    client = core.open_client("a")
    put(core, client, {"k": b"a" * 512})
    core.retention.protect(["k"])
    assert write(core, client, "k", b"b" * 1024)
    assert core.statistics().protected_bytes == core.statistics().pinned_bytes == 1024
    for number in range(20):
        assert write(core, client, str(number), b"x" * 1024)
    assert core.exists(["k"]) == b"\1"
    assert write(core, client, "k", b"c" * 1025)
    assert core.statistics().protected_keys == core.statistics().pinned_bytes == 0


def test_a_write_that_does_not_fit_beside_protected_keys_is_refused(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_protected_ratio=0.75))
    client = core.open_client("a")
    put(core, client, {"k": b"k" * 3072})
    core.retention.protect(["k"])
    with pytest.raises(OutOfMemory):
        write(core, client, "other", b"o" * 1088)
    assert core.all_keys() == ["k"]
    assert core.statistics().used_bytes == 3072


def test_the_journal_tells_of_a_write_and_of_no_other_end(make_core: MakeCore) -> None:
    journal = Journal(reads=True)
    core = make_core(journal=journal)
    client = core.open_client("a")
    put_for(core, 5.0, blocks("k"))
    journal.take()
    write(core, client, "k", b"new")
    write(core, client, "k", b"newer", replace=False)
    core.use_one(client, "k", core.find_one(client, "k"))
    core.use_one(client, "missing", core.find_one(client, "missing"))
    assert [(change, list(keys)) for change, keys in told(journal)] == [("put", ["k"]), ("read", ["k"])]


def test_a_write_that_fails_on_its_way_leaves_the_older_block(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old"})
    core.retention.protect(["k"])

    def fail(entries: object) -> None:
        raise OSError("no table")

    core.on_removal = fail
    with pytest.raises(OSError, match="no table"):
        write(core, client, "k", b"new")
    core.on_removal = None
    assert get(core, client, "k") == [b"old"]
    statistics = core.statistics()
    assert (statistics.protected_bytes, statistics.used_bytes, statistics.reserved_bytes) == (64, 64, 0)
    assert statistics.puts == 1


def test_a_reader_that_was_leased_the_older_block_keeps_it(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old"})
    lease = core.lease(client, ["k"])
    assert write(core, client, "k", b"new")
    assert [bytes(view) for view in lease.views if view is not None] == [b"old"]
    entry = core.find_one(client, "k")
    assert entry is not None
    assert bytes(core.pool.view(entry)) == b"new"
    core.release(lease)
    assert core.statistics().used_bytes == 64
