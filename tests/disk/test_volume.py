"""A volume keeps what was durable, and gives nothing else."""

import errno

import pytest

from infinistore.disk.jobs import ReadInto
from infinistore.disk.volume import Durable, Lost, Reclaim, Volume
from infinistore.errors import ConfigError
from tests.disk.volume_world import CAPACITY_BYTES, VolumeWorld


@pytest.fixture
def world() -> VolumeWorld:
    world = VolumeWorld()
    world.settle()
    return world


def fill(world: VolumeWorld, batches: int, prefix: str = "filler") -> None:
    for number in range(batches):
        world.write({f"{prefix}/{number}": bytes([number % 256]) * 12_000})


def fill_until_offered(world: VolumeWorld) -> Reclaim:
    """Fill a disk until a segment is about to be overwritten; return what is in it."""
    world.accept_offers = False
    for number in range(200):
        world.put({f"filler/{number}": bytes(12_000)})
        world.settle()
        if world.offers:
            break
    [offer] = world.offers
    return offer


def test_a_durable_block_is_found_and_a_pending_one_is_not(world: VolumeWorld) -> None:
    token = world.put({"a": b"first", "b": b"x" * 5000})
    assert token is not None
    assert world.volume.find(["a"]) == [None] and world.volume.contains(["a"]) == [False]
    world.settle()
    assert isinstance(world.ended[token], Durable)
    assert (world.get("a"), world.get("b"), world.get("c")) == (b"first", b"x" * 5000, None)
    assert world.volume.contains(["a", "c"]) == [True, False]


def test_blocks_survive_a_crash_and_a_clean_end(world: VolumeWorld) -> None:
    world.write({"a": b"first", "b": b"x" * 5000})
    world.write({"a": b"second"})
    world.restart()
    assert (world.get("a"), world.get("b")) == (b"second", b"x" * 5000)
    world.volume.close()
    world.settle()
    assert world.volume.state == "closed"
    world.reopen()
    world.settle()
    assert (world.get("a"), world.get("b")) == (b"second", b"x" * 5000)


def test_after_a_clean_end_only_the_snapshot_is_read(world: VolumeWorld) -> None:
    fill(world, 10)
    world.volume.close()
    world.settle()
    world.reopen()
    before = len(world.disk.history)
    world.settle()
    read = {job.file for job in world.disk.history[before:] if isinstance(job, ReadInto)}
    assert read == {"snapshot"}
    assert world.get("filler/9") == bytes([9]) * 12_000


def test_a_tombstone_ends_a_key_for_good(world: VolumeWorld) -> None:
    world.write({"a": b"first"})
    assert world.volume.lingers(["a", "b"]) == [True, False]
    world.volume.forget(["a"])
    assert world.get("a") is None and world.volume.lingers(["a"]) == [True]
    world.write({"a": b""})
    assert world.volume.lingers(["a"]) == [False]
    world.restart()
    assert world.get("a") is None and world.volume.lingers(["a"]) == [False]


def test_the_oldest_segments_are_overwritten_and_capacity_is_never_exceeded(world: VolumeWorld) -> None:
    fill(world, 200)
    figures = world.volume.statistics()
    assert figures.recycled_segments > 0
    assert sum(world.disk.files().values()) <= CAPACITY_BYTES
    assert world.get("filler/199") == bytes([199]) * 12_000
    assert world.get("filler/0") is None


def test_a_pinned_segment_is_not_overwritten(world: VolumeWorld) -> None:
    world.write({"a": b"first"})
    [location] = world.volume.find(["a"])
    assert location is not None
    world.volume.pin([location])
    for number in range(200):
        if world.put({f"filler/{number}": bytes(12_000)}) is None:
            break
        world.settle()
    assert world.volume.room() < 16_000
    assert world.read("a", location) == b"first"
    world.volume.unpin([location])
    world.settle()
    fill(world, 10, "more")


def test_a_block_that_is_appended_again_outlives_its_segment(world: VolumeWorld) -> None:
    world.write({"kept": b"k" * 9000, "gone": b"g" * 9000, "deleted": b"d"})
    offer = fill_until_offered(world)
    assert {"kept", "gone", "deleted"} <= set(offer.keys)
    source = dict(zip(offer.keys, offer.locations, strict=True))
    world.volume.forget(["deleted"])
    token = world.put({"kept": b"k" * 9000, "deleted": b"d"}, [source["kept"], source["deleted"]])
    assert token is not None
    world.volume.reclaimed(offer.segment)
    world.accept_offers = True
    world.settle()
    assert (world.get("kept"), world.get("gone"), world.get("deleted")) == (b"k" * 9000, None, None)
    world.restart()
    assert world.get("kept") == b"k" * 9000


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_segment_is_reused_although_nothing_of_it_was_worth_keeping(world: VolumeWorld, is_purged: bool) -> None:
    """What was offered was replaced or purged before it was appended again: no batch is
    under way, and none may come before there is a segment for it."""
    offer = fill_until_offered(world)
    if is_purged:
        world.volume.purge()
    else:
        world.volume.forget(offer.keys)
        assert world.put(dict.fromkeys(offer.keys, b"again"), list(offer.locations)) is not None
    world.volume.reclaimed(offer.segment)
    world.settle()
    assert world.volume.statistics().recycled_segments == 1


def test_a_full_disk_shrinks_the_capacity(world: VolumeWorld) -> None:
    world.disk.free_bytes = 2 * 64 * 1024
    fill(world, 60)
    figures = world.volume.statistics()
    assert figures.segments * 64 * 1024 == figures.capacity_bytes == figures.allocated_bytes
    assert world.volume.state == "open"


def test_a_failed_flush_loses_its_batches_and_is_never_repeated(world: VolumeWorld) -> None:
    world.write({"a": b"first"})
    world.disk.faults.flush_error = 1.0
    token = world.put({"b": b"second"})
    world.settle()
    assert token is not None
    assert world.ended[token] == Lost(token, errno.EIO)
    world.disk.faults.heal()
    world.write({"c": b"third"})
    assert (world.get("a"), world.get("b"), world.get("c")) == (b"first", None, b"third")
    assert world.volume.lingers(["b"]) == [True]
    assert world.volume.statistics().abandoned_segments == 1


def test_a_purge_stays_done(world: VolumeWorld) -> None:
    world.write({"a": b"first"})
    token = world.volume.purge()
    assert world.get("a") is None
    world.settle()
    assert isinstance(world.ended[token], Durable)
    world.write({"b": b"second"})
    world.restart()
    assert (world.get("a"), world.get("b")) == (None, b"second")


def test_the_membership_of_a_disk_is_kept(world: VolumeWorld) -> None:
    world.volume.set_membership(7)
    world.settle()
    world.crash()
    assert world.volume.membership == 7


def test_a_disk_that_cannot_be_written_is_read_only() -> None:
    world = VolumeWorld()
    world.settle()
    world.write({"a": b"first"})
    world.disk.crash()
    world.reopen()
    world.disk.faults.write_error = 1.0
    world.settle()
    assert world.volume.state == "read-only"
    assert world.get("a") == b"first"
    assert world.put({"b": b"second"}) is None


def test_a_capacity_below_the_segments_that_exist_is_refused(world: VolumeWorld) -> None:
    fill(world, 60)
    world.capacity_bytes = CAPACITY_BYTES - 4 * 64 * 1024
    with pytest.raises(ConfigError, match="infinistore disk wipe"):
        world.reopen()


def test_a_capacity_without_room_for_two_segments_is_refused() -> None:
    with pytest.raises(ConfigError, match="give it more"):
        Volume.create(0, capacity_bytes=1 << 20, uuid=bytes(16), seed=1, segment_bytes=1 << 19)


def test_a_batch_larger_than_a_segment_is_refused(world: VolumeWorld) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        world.put({"a": bytes(70_000)})
    world.write({"a": bytes(world.volume.room())})


def test_a_truncated_segment_and_a_lost_one_cost_only_their_blocks(world: VolumeWorld) -> None:
    fill(world, 20)
    world.disk.truncate("segments/0", 5000)
    world.disk.remove("segments/1")
    world.restart()
    assert world.get("filler/0") is None
    assert world.get("filler/19") == bytes([19]) * 12_000


def test_a_snapshot_of_another_disk_is_ignored(world: VolumeWorld) -> None:
    fill(world, 6)
    world.disk.rot("segments/0", 100)
    world.volume.close()
    world.settle()
    world.disk.rot("snapshot", 30)
    world.reopen()
    world.settle()
    assert world.get("filler/5") == bytes([5]) * 12_000
