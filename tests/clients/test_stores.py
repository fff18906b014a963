"""What every kind of store promises to those who call it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from infinistore.blocking import BlockingStore
from infinistore.errors import (
    BufferTooSmall,
    ChecksumMismatch,
    InvalidRequest,
    KeyNotFound,
    LimitExceeded,
    ValueTooLarge,
)
from infinistore.statistics import ServerStatistics
from tests.clients.conftest import Remotes
from tests.clients.stores import SILENT, STORES, Opened, damage, differing
from tests.server.running import KIB, MIB


def server_statistics(store: BlockingStore) -> ServerStatistics:
    server = store.stats().server
    assert server is not None
    return server


def contents(values: list[bytearray | None]) -> list[bytes | None]:
    assert all(value is None or type(value) is bytearray for value in values)
    return [None if value is None else bytes(value) for value in values]


# What goes in comes out


def test_every_kind_of_data_comes_back_as_its_bytes(opened: Opened) -> None:
    store = opened.store
    data: dict[str, Any] = {
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "view": memoryview(b"abcdef")[1:4],
        "array": np.arange(100, dtype=np.float16).reshape(4, 25),
        "one": b"\0",
    }
    assert store.put_many(data) == []
    expected = {key: bytes(value) for key, value in data.items() if isinstance(value, bytes | bytearray | memoryview)}
    expected["array"] = data["array"].tobytes()
    assert contents(store.get_many(data)) == [expected[key] for key in data]
    assert isinstance(store.get("bytes"), bytearray)


def test_tensors_come_back_as_their_bytes(opened: Opened) -> None:
    torch = pytest.importorskip("torch")
    store = opened.store
    data: dict[str, Any] = {
        "tensor": torch.arange(100, dtype=torch.bfloat16),
        "gradient": torch.ones(10, requires_grad=True),
        "scalar": torch.tensor(1.5),
    }
    assert store.put_many(data) == []
    expected = {
        "tensor": data["tensor"].view(torch.uint8).numpy().tobytes(),
        "gradient": data["gradient"].detach().numpy().tobytes(),
        "scalar": data["scalar"].numpy().tobytes(),
    }
    assert contents(store.get_many(data)) == [expected[key] for key in data]
    into = torch.zeros(100, dtype=torch.bfloat16)
    assert store.get_into("tensor", into) == 200
    assert torch.equal(into, data["tensor"])


def test_items_may_be_a_mapping_or_pairs_of_any_kind(opened: Opened) -> None:
    store = opened.store
    store.put_many({"a": b"1"})
    store.put_many([("b", b"2")])
    store.put_many((key, value) for key, value in [("c", b"3"), ("d", b"4")])
    store.put_many(zip(["e"], [b"5"], strict=True))
    assert contents(store.get_many(key for key in "abcde")) == [b"1", b"2", b"3", b"4", b"5"]
    buffers = {key: bytearray(1) for key in "abx"}
    assert store.get_many_into(buffers) == [1, 1, None]
    assert buffers == {"a": b"1", "b": b"2", "x": b"\0"}
    assert store.delete({"a": None, "b": None}) == 2
    assert store.exists_many({"c": None}.keys()) == [True]
    assert store.match_prefix(iter("cdx")) == 2


def test_empty_batches_do_nothing(opened: Opened) -> None:
    store = opened.store
    assert store.put_many([]) == []
    assert store.put_many({}, replace=False) == []
    assert contents(store.get_many([])) == []
    assert store.get_many_into([]) == []
    assert store.exists_many([]) == []
    assert store.match_prefix([]) == 0
    assert store.match_prefix([], hold_s=1) == 0
    with store.lease([]) as nothing, store.lease(["missing"], verify=True) as missing, store.reserve({}) as no_room:
        assert (nothing, missing, no_room) == ([], [None], [])
        assert opened.look(opened.core.statistics).pinned_bytes == 0
    assert store.delete([]) == 0
    assert store.keys() == store.keys(limit=0) == []
    assert store.purge() == 0
    assert store.release_hold("") is False


def test_a_put_that_stores_nothing_evicts_nothing(opened: Opened) -> None:
    """Also when the pool is above its high watermark, where any other put would
    evict.
    """
    store = opened.store
    store.put_many({"a": bytes(2 * MIB), "b": bytes(2 * MIB)})
    assert store.put_many([]) == []
    assert store.put_many({"a": b"x", "b": b"x"}, replace=False) == ["a", "b"]
    assert store.exists_many(["a", "b"]) == [True, True]


def test_keys_of_any_text_up_to_one_kibibyte(opened: Opened) -> None:
    store = opened.store
    keys = ["k" * 1024, "ü" * 512, "鍵" * 341, "\n", " ", "\x7f", "😀", "a/b?c=d&e", "\\", "\ufeff"]
    store.put_many({key: key.encode() for key in keys})
    assert contents(store.get_many(keys)) == [key.encode() for key in keys]
    assert store.keys() == sorted(keys)


# What cannot be asked for

REFUSED: dict[str, tuple[type[Exception], Callable[[BlockingStore], Any]]] = {
    "an empty key": (ValueError, lambda store: store.put("", b"x")),
    "a key that is too long": (ValueError, lambda store: store.put("k" * 1025, b"x")),
    "a key that is too long in bytes": (ValueError, lambda store: store.get("ü" * 513)),
    "a key with a lone surrogate": (ValueError, lambda store: store.get("\ud800")),
    "a key of bytes": (TypeError, lambda store: store.get(b"key")),  # type: ignore[call-overload]
    "a number for a key": (TypeError, lambda store: store.exists_many([5])),  # type: ignore[list-item]
    "a text for a list of keys": (TypeError, lambda store: store.get_many("abc")),
    "bytes for a list of keys": (TypeError, lambda store: store.get_many(b"abc")),  # type: ignore[arg-type]
    "no list of keys": (TypeError, lambda store: store.delete(5)),  # type: ignore[arg-type]
    "a key twice in a put": (ValueError, lambda store: store.put_many([("a", b"1"), ("a", b"2")])),
    "an empty value": (ValueError, lambda store: store.put("a", b"")),
    "an empty value among others": (ValueError, lambda store: store.put_many({"a": b"1", "b": b""})),
    "a text for a value": (TypeError, lambda store: store.put("a", "text")),  # type: ignore[arg-type]
    "nothing for a value": (TypeError, lambda store: store.put("a", None)),  # type: ignore[arg-type]
    "no pairs": (TypeError, lambda store: store.put_many([("a", b"1", b"2")])),  # type: ignore[list-item]
    "keys only": (TypeError, lambda store: store.put_many(["abc"])),  # type: ignore[list-item]
    "no items": (TypeError, lambda store: store.put_many(5)),  # type: ignore[arg-type]
    "a buffer that cannot be written": (TypeError, lambda store: store.get_into("a", b"abc")),
    "a value with holes": (ValueError, lambda store: store.put("a", np.zeros((4, 4)).T[1:])),
    "a negative hold": (ValueError, lambda store: store.match_prefix(["a"], hold_s=-1)),
    "a hold for ever": (ValueError, lambda store: store.match_prefix(["a"], hold_s=float("inf"))),
    "a hold that is no number": (ValueError, lambda store: store.match_prefix(["a"], hold_s=float("nan"))),
    "a hold that is a text": (TypeError, lambda store: store.match_prefix(["a"], hold_s="1")),  # type: ignore[arg-type]
    "ratios upside down": (ValueError, lambda store: store.evict(0.9, 0.1)),
    "a ratio above one": (ValueError, lambda store: store.evict(0.5, 1.1)),
    "a ratio that is no number": (ValueError, lambda store: store.evict(float("nan"), 1)),
    "a text for a ratio": (TypeError, lambda store: store.evict("0", 1)),  # type: ignore[arg-type]
    "a negative limit": (ValueError, lambda store: store.keys(limit=-1)),
    "a limit that is no whole number": (TypeError, lambda store: store.keys(limit=1.5)),  # type: ignore[arg-type]
    "a prefix of bytes": (TypeError, lambda store: store.keys(prefix=b"a")),  # type: ignore[arg-type]
    "a number to begin after": (TypeError, lambda store: store.keys(after=5)),  # type: ignore[arg-type]
    "a prefix longer than any key": (ValueError, lambda store: store.keys(prefix="k" * 1025)),
    "a prefix with a lone surrogate": (ValueError, lambda store: store.keys(prefix="\ud800")),
    "a hold that is no text": (TypeError, lambda store: store.release_hold(5)),  # type: ignore[arg-type]
    "a lease of a text": (TypeError, lambda store: store.lease("abc")),
    "a lease of an empty key": (ValueError, lambda store: store.lease([""])),
    "a lease of a key that is too long": (ValueError, lambda store: store.lease(["k" * 1025])),
    "a lease of a number": (TypeError, lambda store: store.lease([5])),  # type: ignore[list-item]
    "pairs of keys and sizes": (TypeError, lambda store: store.reserve([("a", 1)])),  # type: ignore[arg-type]
    "room for no bytes": (ValueError, lambda store: store.reserve({"a": 0})),
    "room for less than nothing": (ValueError, lambda store: store.reserve({"a": -1})),
    "room for a broken number of bytes": (TypeError, lambda store: store.reserve({"a": 1.0})),  # type: ignore[dict-item]
    "room for a truth": (TypeError, lambda store: store.reserve({"a": True})),
    "room under an empty key": (ValueError, lambda store: store.reserve({"": 1})),
    "room under a key that is too long": (ValueError, lambda store: store.reserve({"k" * 1025: 1})),
    "room under a number": (TypeError, lambda store: store.reserve({5: 1})),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("store", SILENT.values(), ids=SILENT)
@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_sent(what: str, store: BlockingStore) -> None:
    error, call = REFUSED[what]
    with pytest.raises(error) as raised:
        call(store)
    assert type(raised.value) is error or (error is ValueError and type(raised.value) is UnicodeEncodeError)


def test_evict_takes_whole_numbers_too(opened: Opened) -> None:
    opened.store.put("a", b"x")
    assert opened.store.evict(1, 1) == 0
    assert opened.store.evict(0, 0) == 1


def test_what_is_not_there_is_an_error_only_for_one_key(opened: Opened) -> None:
    with pytest.raises(KeyNotFound, match="missing"):
        opened.store.get("missing")
    with pytest.raises(KeyError):
        opened.store.get_into("missing", bytearray(1))
    assert opened.store.get_many(["missing"]) == [None]


def test_a_buffer_that_is_too_small_leaves_every_buffer_untouched(opened: Opened) -> None:
    store = opened.store
    store.put_many({"a": b"abc", "b": b"abcdef"})
    buffers = {"a": bytearray(b"..."), "b": bytearray(b"....."), "missing": bytearray(b".")}
    with pytest.raises(BufferTooSmall, match="'b' has 6 bytes, its buffer 5"):
        store.get_many_into(buffers)
    assert buffers == {"a": b"...", "b": b".....", "missing": b"."}
    assert store.get_into("b", bytearray(6)) == 6  # and the connection is good


def test_all_or_nothing_is_an_error_that_leaves_the_buffers_alone(opened: Opened) -> None:
    store = opened.store
    store.put_many({"a": b"abc", "b": bytes(range(200)) * 500})
    buffers = {"a": bytearray(b"..."), "missing": bytearray(b"."), "b": bytearray(b".") * 100_001, "gone": bytearray(1)}
    with pytest.raises(KeyNotFound, match="2 of 4 keys are not in the store, first 'missing'"):
        store.get_many_into(buffers, all_or_nothing=True)
    assert buffers == {"a": b"...", "missing": b".", "b": b"." * 100_001, "gone": b"\0"}
    del buffers["missing"], buffers["gone"]
    assert store.get_many_into(buffers, all_or_nothing=True) == [3, 100_000]
    assert buffers == {"a": b"abc", "b": bytes(range(200)) * 500 + b"."}


# Replacing


def test_without_replacing_no_bytes_of_what_is_there_are_moved(remotes: Remotes) -> None:
    store = remotes.open({"verify": "never"}).store
    store.put_many({"a": bytes(MIB), "b": bytes(MIB)})
    before = server_statistics(store).received_bytes
    assert store.put_many({"a": bytes(MIB), "b": bytes(MIB)}, replace=False) == ["a", "b"]
    assert server_statistics(store).received_bytes == before
    assert store.put_many({"a": bytes(MIB), "c": b"abc"}, replace=False) == ["a"]
    assert server_statistics(store).received_bytes == before + 3


# Checksums


def test_bytes_that_changed_in_the_store_are_an_error_and_then_a_miss(opened: Opened) -> None:
    store = opened.store
    store.put_many({"good": b"abc", "bad": b"abcdef" * 100})
    opened.look(lambda: damage(opened.core, "bad"))
    with pytest.raises(ChecksumMismatch, match="bad"):
        store.get_many(["good", "missing", "bad"])
    assert contents(store.get_many(["good", "bad"])) == [b"abc", None]
    assert store.stats().store.checksum_drops == 1
    store.put("bad", b"again")
    opened.look(lambda: damage(opened.core, "bad"))
    with pytest.raises(ChecksumMismatch):
        store.get_into("bad", bytearray(10))
    with pytest.raises(KeyNotFound):
        store.get_into("bad", bytearray(10))


def test_many_damaged_blocks_are_all_dropped(opened: Opened) -> None:
    store = opened.store
    store.put_many({f"key {number}": bytes([number]) * 1000 for number in range(20)})
    opened.look(lambda: damage(opened.core, *(f"key {number}" for number in range(0, 20, 3))))
    with pytest.raises(ChecksumMismatch, match="7 of 20"):
        store.get_many([f"key {number}" for number in range(20)])
    assert store.exists_many([f"key {number}" for number in range(20)]) == [number % 3 != 0 for number in range(20)]


def test_without_checksums_nothing_is_checked(remotes: Remotes) -> None:
    opened = remotes.open({"verify": "never"})
    opened.store.put("a", b"abc")
    assert opened.store.get("a") == b"abc"
    opened.look(lambda: damage(opened.core, "a"))
    assert opened.store.get("a") == b"`bc"


# Batches over the limits of the server


def test_batches_over_the_limits_are_split(remotes: Remotes) -> None:
    opened = remotes.open(max_batch_keys=7, max_batch_bytes=10 * KIB, max_value_bytes=8 * KIB)
    store = opened.store
    items = {f"key {number:03}": bytes([number]) * (number * 100 + 1) for number in range(60)}
    assert store.put_many(items) == []
    keys = list(items)
    assert contents(store.get_many(keys)) == list(items.values())
    buffers = {key: bytearray(8 * KIB) for key in keys}
    assert store.get_many_into(buffers) == [len(value) for value in items.values()]
    assert all(buffers[key].startswith(value) for key, value in items.items())
    with store.lease([*keys, "missing"], verify=True) as views:
        assert [view and bytes(view) for view in views] == [*items.values(), None]
        del views
    assert opened.look(opened.core.statistics).leases == 0
    assert store.exists_many([*keys, "missing"]) == [True] * 60 + [False]
    assert store.match_prefix([*keys, "missing"]) == 60
    assert store.match_prefix([*keys[:8], "missing", *keys[8:]]) == 8
    assert store.keys(limit=50) == keys[:50]
    assert store.put_many({**items, "new": b"x"}, replace=False) == keys
    assert store.delete([*keys[:20], "missing"]) == 20
    with pytest.raises(ValueTooLarge, match="8,193"):
        store.put("a", bytes(8 * KIB + 1))


def test_a_hold_over_more_keys_than_one_request_takes_is_one_hold(remotes: Remotes) -> None:
    opened = remotes.open(max_batch_keys=4)
    store = opened.store
    keys = [f"key {number}" for number in range(10)]
    store.put_many(dict.fromkeys(keys, b"x"))
    match = store.match_prefix(keys, hold_s=30)
    assert match == 10
    assert opened.look(lambda: opened.core.statistics().holds) == 3
    assert store.release_hold(match.hold) is True
    assert opened.look(lambda: opened.core.statistics().holds) == 0
    assert store.release_hold(match.hold) is False


def test_a_hold_that_is_refused_half_way_holds_nothing(remotes: Remotes) -> None:
    opened = remotes.open(max_batch_keys=2, prealloc_bytes=64 * KIB)
    store = opened.store
    keys = [f"key {number}" for number in range(6)]
    store.put_many({key: bytes(4 * KIB) for key in keys})
    with pytest.raises(LimitExceeded):
        store.match_prefix(keys, hold_s=30)  # a quarter of the pool: four of six
    assert opened.look(lambda: opened.core.statistics().holds) == 0


def test_pages_of_keys_longer_than_the_server_gives_are_put_together(remotes: Remotes) -> None:
    store = remotes.open(minimal_allocate_bytes=64, max_batch_keys=20_000).store
    keys = [f"{number:06}" for number in range(10_001)]
    store.put_many(dict.fromkeys(keys, b"x"))
    assert store.keys(limit=20_000) == keys
    assert store.keys(limit=10_001) == keys
    assert store.keys(prefix="0001", after="000150", limit=10_000) == keys[151:200]


# Statistics and holds


def test_the_statistics_say_which_way_the_bytes_go(opened: Opened) -> None:
    statistics = opened.store.stats()
    assert statistics.transport_reason
    assert (statistics.server is None) == (statistics.transport == "embedded")
    assert statistics.store.capacity_bytes == 4 * MIB


# Many at once


@pytest.mark.parametrize("opened", differing(STORES, "embedded-threads", "shm-threads"), indirect=True)
def test_32_threads_on_one_store_get_what_they_put(opened: Opened) -> None:
    store = opened.store
    start = threading.Barrier(32)

    def work(number: int) -> None:
        start.wait()
        for turn in range(10):
            keys = [f"{number}/{turn}/{i}" for i in range(3)]
            items = {key: (key.encode() * 500)[: 1000 + number] for key in keys}
            store.put_many(items)
            assert store.match_prefix(keys) <= 3
            for key, value in zip(keys, store.get_many(keys), strict=True):
                assert value is None or value == items[key]
            store.put("shared", bytes([number]) * 1000)
            shared = store.get_many(["shared"])[0]
            assert shared is None or shared == bytes([shared[0]]) * 1000
            store.delete(keys[:1])

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(work, range(32)))
    statistics = opened.look(opened.core.statistics)
    assert (statistics.reservations, statistics.leases, statistics.pinned_bytes) == (0, 0, 0)


def test_a_key_over_the_limit_of_its_server_is_refused_and_the_store_goes_on(remotes: Remotes) -> None:
    store = remotes.open(max_key_bytes=16).store
    store.put("k" * 16, b"fits")
    with pytest.raises(InvalidRequest, match="at most 16"):
        store.put_many({"fits": b"1", "k" * 17: b"does not"})
    assert store.keys() == ["k" * 16]
    assert store.get("k" * 16) == b"fits"
