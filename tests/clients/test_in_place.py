"""Reading and writing in place: what every kind of store does, whether its views are of
the pool or of a copy.
"""

import gc
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from infinistore.client.memory.views import PrivateBlocks
from infinistore.errors import ChecksumMismatch, LeaseStillInUse, LimitExceeded, OutOfMemory, ValueTooLarge
from infinistore.protocol.messages import MISSING
from infinistore.statistics import StoreStatistics
from tests.clients.conftest import Remotes
from tests.clients.stores import STORES, Loops, Opened, damage, differing
from tests.server.running import KIB, MIB, make_config

BLOCKS = {"a": b"a" * 70_000, "b": bytes(range(256)) * 512, "short": b"short"}


@pytest.fixture(params=differing(STORES, "embedded-threads", "threads", "shm-trio"))
def opened(request: pytest.FixtureRequest, loops: Loops) -> Iterator[Opened]:
    """A store whose views are of its pool, of a copy, and of the pool of a server."""
    with STORES[request.param](loops, make_config(prealloc_bytes=4 * MIB), {}, 1) as store:
        yield store


@pytest.fixture(params=[False, True], ids=["", "with torch"])
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Both worlds: where PyTorch is loaded, and where it is not."""
    if request.param:
        yield pytest.importorskip("torch")
    else:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        yield None


def is_in_place(opened: Opened) -> bool:
    """Whether the views of this store are of the pool itself."""
    return opened.server is None or opened.store.stats().transport == "shm"


def statistics(opened: Opened) -> StoreStatistics:
    """What the core says, when it has heard all that was sent."""
    found: StoreStatistics = opened.look(opened.core.statistics)
    return found


# Reading


def test_a_lease_used_after_its_block_is_a_value_error(opened: Opened) -> None:
    opened.store.put_many(BLOCKS)
    with opened.store.lease(["a"]) as views:
        pass
    assert views[0] is not None
    with pytest.raises(ValueError, match="released memoryview"):
        bytes(views[0])


def test_loop_variables_are_no_false_alarm(opened: Opened, torch: Any) -> None:
    opened.store.put_many(BLOCKS)
    total = 0
    with opened.store.lease(list(BLOCKS)) as views:
        for view in views:
            assert view is not None
            total += len(view)
    assert total == sum(map(len, BLOCKS.values()))
    if torch:  # which may have made a tensor from it that nobody can see
        del view
    assert statistics(opened).pinned_bytes == 0


def test_leased_bytes_outlive_replacement_deletion_and_eviction_until_the_last_array_is_gone(
    opened: Opened, torch: Any
) -> None:
    names = ["replaced", "deleted", "evicted"]
    blocks = {name: os.urandom(100 * KIB) for name in names}
    opened.store.put_many(blocks)
    with pytest.warns(LeaseStillInUse, match="300 KiB"), opened.store.lease(names) as views:
        arrays = [np.frombuffer(view, np.uint8) for view in views if view is not None]
    opened.store.put("replaced", b"another")
    opened.store.delete(["deleted"])
    for index in range(16):
        opened.store.put(f"filler {index}", bytes(512 * KIB))
    opened.store.purge()
    assert [array.tobytes() for array in arrays] == list(blocks.values())
    part = arrays[2][50:60].reshape(2, 5)
    arrays.clear()
    in_place = is_in_place(opened)
    assert statistics(opened).pinned_bytes >= 300 * KIB * in_place
    assert part.tobytes() == blocks["evicted"][50:60]
    del part
    assert statistics(opened).used_bytes == 0


@pytest.mark.filterwarnings("ignore:The given .* is not writable:UserWarning")
def test_tensors_keep_a_lease_however_they_were_made(opened: Opened) -> None:
    torch = pytest.importorskip("torch")
    opened.store.put_many(BLOCKS)
    with pytest.warns(LeaseStillInUse), opened.store.lease(["a", "b"]) as (a, b):  # noqa: PT031
        assert a is not None and b is not None
        direct = torch.frombuffer(a, dtype=torch.uint8)
        by_array = torch.from_numpy(np.frombuffer(b, np.uint8))
    opened.store.purge()
    for index in range(8):
        opened.store.put(f"filler {index}", b"x" * (512 * KIB))
    assert bytes(direct.numpy()) == BLOCKS["a"]
    assert bytes(by_array.numpy()) == BLOCKS["b"]
    pinned = is_in_place(opened)
    opened.store.purge()
    for tensor in ("by_array", "direct"):
        assert bool(statistics(opened).pinned_bytes) == pinned, tensor
        a = b = None
        if tensor == "by_array":
            del by_array
        else:
            del direct
    assert statistics(opened).used_bytes == 0


def test_a_lease_that_is_left_by_an_error_does_not_warn_and_raises_that_error(opened: Opened) -> None:
    opened.store.put_many(BLOCKS)
    with warnings.catch_warnings(), pytest.raises(KeyError):  # noqa: PT012
        warnings.simplefilter("error")
        with opened.store.lease(["a"]) as views:
            array = np.frombuffer(views[0], np.uint8)  # type: ignore[arg-type]
            raise KeyError(array)
    del array
    gc.collect()


def test_the_last_array_may_die_in_another_thread_in_a_cycle_or_inside_a_call(opened: Opened) -> None:
    opened.store.put_many(BLOCKS)

    def arrays() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LeaseStillInUse)
            with opened.store.lease(list(BLOCKS)) as views:
                return [np.frombuffer(view, np.uint8) for view in views if view is not None]

    held = [arrays()]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert statistics(opened).leases == 0

    cycle: list[Any] = arrays()
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert statistics(opened).leases == 0

    def keys() -> Iterator[str]:
        held.clear()
        yield "a"

    held.append(arrays())
    assert opened.store.exists_many(keys()) == [True]
    assert statistics(opened).leases == 0


def test_a_part_that_is_read_again_takes_the_place_of_the_first_attempt() -> None:
    blocks = PrivateBlocks()
    blocks.room([3, MISSING], 0)
    for attempt in (b"bad", b"new"):
        part = blocks.room([3, MISSING, 5], 2)
        part[0][:], part[1][:] = attempt, b"other"
    assert [view if view is None else bytes(view) for view in blocks.views] == [bytes(3), None, b"new", None, b"other"]


def test_a_lease_that_finds_rotten_bytes_pins_nothing_while_its_error_is_kept(opened: Opened, torch: Any) -> None:
    opened.store.put_many(BLOCKS)
    opened.look(lambda: damage(opened.core, "b"))
    found = pytest.raises(ChecksumMismatch, match=r"1 of \d blocks .* 'b'")
    with found as kept, opened.store.lease(["a", "missing", "b"], verify=True):
        pass
    assert not opened.store.exists("b")  # the server has looked, too
    assert statistics(opened).leases == 0
    assert kept.value.__traceback__ is not None  # whose frames have the variables of the call


def test_leases_count_together_whatever_was_reserved_in_between(opened: Opened, torch: Any) -> None:
    opened.store.put_many({f"key {index}": bytes(MIB) for index in range(3)})
    with opened.store.lease(["key 0"]) as views:
        with opened.store.reserve({"written": 100 * KIB}) as room:
            room[0][:] = bytes(100 * KIB)
        with opened.store.lease(["key 1"]) as more:
            if is_in_place(opened):
                with pytest.raises(LimitExceeded, match=r"max_pinned_ratio.*release"), opened.store.lease(["key 2"]):
                    pass
            assert len(views + more) == 2
    with opened.store.lease(["key 2"]) as views:
        assert [view and bytes(view) for view in views] == [bytes(MIB)]


# Writing


def test_the_room_of_a_failed_reservation_is_nobody_elses_while_an_array_can_write_there(opened: Opened) -> None:
    with pytest.raises(KeyError), opened.store.reserve({"a": MIB}) as views:  # noqa: PT012
        array = np.frombuffer(views[0], np.uint8)
        raise KeyError
    opened.store.put_many({f"key {index}": bytes(512 * KIB) for index in range(4)})
    array[:] = 255
    assert opened.store.get_many([f"key {index}" for index in range(4)]) == [bytearray(512 * KIB)] * 4
    assert statistics(opened).reservations == is_in_place(opened)
    del array, views
    gc.collect()
    assert statistics(opened).reservations == 0


def test_an_array_that_outlives_its_reservation_is_worth_a_warning(opened: Opened) -> None:
    with pytest.warns(LeaseStillInUse, match="do not write"), opened.store.reserve({"a": 1000}) as views:  # noqa: PT031
        array = np.frombuffer(views[0], np.uint8)
        array[:] = 7
    assert opened.store.get("a") == bytes([7]) * 1000
    del array
    assert statistics(opened).reservations == 0


def test_reservations_and_leases_do_not_disturb_each_other(opened: Opened) -> None:
    opened.store.put_many(BLOCKS)
    with opened.store.lease(["a"]) as (leased,), opened.store.reserve({"x": 5, "a": 4}) as (x, a):
        assert leased is not None
        with opened.store.reserve({"y": 3}) as (y,), opened.store.lease(["b"], verify=True) as (other,):
            assert other is not None
            x[:], a[:], y[:] = b"xxxxx", b"new!", b"yyy"
            assert bytes(leased) == BLOCKS["a"]
            assert bytes(other) == BLOCKS["b"]
            del y, other
        assert opened.store.get_many(["x", "y", "a"]) == [None, bytearray(b"yyy"), bytearray(BLOCKS["a"])]
        del x, a
        assert bytes(leased) == BLOCKS["a"]
        del leased
    assert opened.store.get_many(["x", "y", "a"]) == list(map(bytearray, (b"xxxxx", b"yyy", b"new!")))
    found = statistics(opened)
    assert (found.reservations, found.leases, found.pinned_bytes) == (0, 0, 0)


def test_a_reservation_that_cannot_be_is_refused_and_the_store_goes_on(opened: Opened) -> None:
    with pytest.raises(ValueTooLarge), opened.store.reserve({"big": 64 * MIB}):
        pass
    if is_in_place(opened):
        with pytest.raises(OutOfMemory), opened.store.reserve(dict.fromkeys("abcdefg", MIB)):
            pass
    with opened.store.reserve({"a": 3}) as views:
        views[0][:] = b"abc"
    with pytest.raises(ValueError, match="released memoryview"):
        views[0][0] = 1
    assert opened.store.get("a") == b"abc"
    assert statistics(opened).reservations == 0


def test_a_reservation_is_never_split(remotes: Remotes) -> None:
    opened = remotes.open(max_batch_keys=3, max_batch_bytes=64 * KIB, max_value_bytes=64 * KIB)
    for sizes in (dict.fromkeys("abcd", 10), dict.fromkeys("abc", 30 * KIB)):
        with pytest.raises(LimitExceeded, match="make several"), opened.store.reserve(sizes):
            pass
    with opened.store.reserve({"one": 64 * KIB}) as views:
        views[0][:] = bytes(64 * KIB)
    assert opened.store.get("one") == bytes(64 * KIB)
