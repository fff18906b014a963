"""The checker finds what must not come from one server to the next on its disks, and
what is missing there.
"""

import pytest

from tests.simulation.history import Call, End, Life
from tests.simulation.promises import PromiseException
from tests.simulation.test_checker import Past, found


class DiskPast(Past):
    """A history of servers with disks, told call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.history.has_disks = True

    def flush(self, *keys: str) -> Call:
        return self.call("flush", list(keys), durable=keys)

    def crash(self, *, keeps_disk: bool = True) -> None:
        self.history.lives[-1].crashed = True
        self.end_server()
        self.history.lives[-1].recovers = keeps_disk


@pytest.fixture
def past() -> DiskPast:
    return DiskPast()


def test_what_a_crash_leaves_on_disk_may_come_back(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.crash()
    past.get(b"a")
    assert past.problems() == []


def test_what_was_on_a_lost_disk_does_not_come_back(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.crash(keeps_disk=False)
    past.get(b"a")
    assert found(past.problems(), "what nobody has put")


def test_an_older_block_comes_back_only_if_the_newer_one_was_not_durable(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    past.crash()
    past.get(b"a")
    assert past.problems() == []
    assert found(past.problems(PromiseException.OLDER_BLOCK), "had replaced it")


def test_an_older_block_that_comes_back_after_its_successor_was_durable_is_found(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    past.flush("k0")
    past.crash()
    past.get(b"a")
    assert found(past.problems(), "call 1 had replaced it durably")


def test_an_older_block_may_come_back_where_a_corrupted_one_became_durable(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    past.history.corrupted_puts.append(("k0", past.put(b"c", "k0")))
    past.flush("k0")
    past.crash()
    past.get(b"a")
    assert past.problems() == []


def test_an_older_block_may_not_come_back_after_a_corrupted_one_was_replaced(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.history.corrupted_puts.append(("k0", past.put(b"b", "k0")))
    past.put(b"c", "k0")
    past.flush("k0")
    past.crash()
    past.get(b"a")
    assert found(past.problems(), "call 2 had replaced it durably")


def test_a_deleted_block_that_comes_back_is_found(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.delete("k0")
    past.crash()
    past.get(b"a")
    assert found(past.problems(), r"call 1 \(delete\) had removed it")


def test_a_deletion_of_unknown_outcome_may_be_undone(past: DiskPast) -> None:
    past.put(b"a", "k0")
    deletion = past.delete("k0", end=End.UNKNOWN)
    deletion.connections[1] = past.connection(closed_s=past.now)
    past.crash()
    past.get(b"a")
    assert past.problems() == []


def test_with_one_server_the_newest_block_is_the_only_one(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.crash()
    past.put(b"b", "k0")
    past.get(b"a")
    assert found(past.problems(), "was there again after it had been replaced")


def test_a_block_that_came_back_and_was_deleted_stays_away(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.crash()
    past.delete("k0")
    past.get(b"a")
    assert found(past.problems(), "was there again")


def test_a_read_may_miss_what_a_later_one_finds(past: DiskPast) -> None:
    past.put(b"a", "k0")
    past.get(None)
    past.get(b"a")
    assert past.problems() == []
    assert found(past.problems(PromiseException.LATE_READ), "was there again")


@pytest.mark.parametrize("calm", [False, True])
def test_a_durable_block_that_is_missing_when_nothing_is_late_is_found(past: DiskPast, calm: bool) -> None:
    past.put(b"a", "k0")
    past.flush("k0")
    past.crash()
    if calm:
        past.history.calm_since_s = past.now
    past.get(None)
    assert found(past.problems(), "what call 1 had made durable") is calm


@pytest.mark.parametrize("why", ["removed", "full", "failed", "lost", "corrupted"])
def test_a_durable_block_may_be_missing_for_a_reason(past: DiskPast, why: str) -> None:
    put = past.put(b"a", "k0")
    past.flush("k0")
    if why == "removed":
        past.delete("k0")
    past.crash(keeps_disk=why != "lost")
    past.history.lives[0].recycled = why == "full"
    past.history.disks_failed = why == "failed"
    if why == "corrupted":
        past.history.corrupted_puts.append(("k0", put))
    past.history.calm_since_s = past.now
    past.get(None)
    assert past.problems() == []
    if why in ("full", "failed"):
        assert found(past.problems(PromiseException(f"disk-{why}")), "what call 1 had made durable")


def test_blocks_are_damaged_only_on_disks_that_fail_or_lose_power(past: DiskPast) -> None:
    past.history.lives[0].damaged_blocks = 1
    assert found(past.problems(), "1 blocks on disk were damaged")
    past.history.disks_failed = True
    assert past.problems() == []
    past.history.disks_failed = False
    past.history.lives.insert(0, Life(0.0, 0.0, crashed=True))
    assert past.problems() == []


def test_a_put_that_lasts_longer_than_its_server_may_be_on_the_disks_of_the_next(past: DiskPast) -> None:
    put = past.put(b"a", "k0")
    past.crash()
    put.ended = past.now
    past.crash()
    past.get(b"a")
    assert past.problems() == []
