"""Times to live and pins, by every client and every path: the clock is set, not waited
for.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infinistore.blocking import BlockingStore
from infinistore.errors import KeyNotFound, LimitExceeded, VersionMismatch
from infinistore.protocol.versions import Capability
from tests.clients.own_reading import needs_tables
from tests.clients.shared_serving import LONG, Shared
from tests.clients.stores import REMOTE, SILENT, STORES, Loops, Opened, differing, servers_lack
from tests.clients.test_disks import ON_DISK, read, until_recovered, with_disk
from tests.server.running import KIB, MIB, make_config

SIZES = {"short": 100, "long": 100_000}


def let_pass(opened: Opened | Shared, seconds: float) -> None:
    """Set the clock of the store forward."""
    retention = opened.core.retention
    clock = retention.clock
    opened.look(lambda: setattr(retention, "clock", lambda: clock() + seconds))


def reserve(store: BlockingStore, values: dict[str, bytes], ttl_s: float | None) -> None:
    with store.reserve({key: len(value) for key, value in values.items()}, ttl_s=ttl_s) as views:
        for view, value in zip(views, values.values(), strict=True):
            view[:] = value


def put_singly(store: BlockingStore, values: dict[str, bytes], ttl_s: float | None) -> None:
    for key, value in values.items():
        store.put(key, value, ttl_s=ttl_s)


PUTS: dict[str, Callable[[BlockingStore, dict[str, bytes], float | None], Any]] = {
    "put": put_singly,
    "put_many": lambda store, values, ttl_s: store.put_many(values, ttl_s=ttl_s),
    "put_many without replacing": lambda store, values, ttl_s: store.put_many(values, replace=False, ttl_s=ttl_s),
    "reserve": reserve,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", PUTS)
def test_a_key_is_a_miss_for_everybody_when_its_time_is_over(opened: Opened, how: str, size: str) -> None:
    store = opened.store
    values = {"a": b"a" * SIZES[size], "b": b"b" * SIZES[size]}
    PUTS[how](store, values, 100.0)
    store.put("stays", b"s" * SIZES[size])
    assert read(store, ["a", "b", "stays"]) == [*values.values(), b"s" * SIZES[size]]
    let_pass(opened, 99.0)
    assert store.match_prefix(["a", "b"]) == 2
    let_pass(opened, 1.0)
    assert store.exists_many(["a", "b", "stays"]) == [False, False, True]
    assert store.match_prefix(["a", "b"]) == 0
    assert read(store, ["a", "b"]) == [None, None]
    with pytest.raises(KeyNotFound):
        store.get("a")
    with store.lease(["a", "stays"]) as views:
        assert [view is not None for view in views] == [False, True]
    assert store.keys() == ["stays"]
    assert store.delete(["a"]) == 0
    assert store.stats().store.expired == 2


@pytest.mark.parametrize("ttl_s", [0, -1, -0.5, float("nan"), float("inf"), 1e10, "5", True])
@pytest.mark.parametrize("how", [*PUTS, "pin"])
@pytest.mark.parametrize("store", SILENT.values(), ids=SILENT)
def test_a_time_that_is_none_is_refused_before_anything_is_sent(store: BlockingStore, how: str, ttl_s: Any) -> None:
    calls = PUTS | {"pin": lambda store, values, ttl_s: store.pin(list(values), ttl_s=ttl_s)}
    kind = TypeError if isinstance(ttl_s, str | bool) else ValueError
    with pytest.raises(kind, match=r"ttl_s is .*seconds"):
        calls[how](store, {"k": b"v"}, ttl_s)


@needs_tables
@pytest.mark.parametrize("own", [False, True], ids=["another client's", "its own"])
def test_a_client_that_reads_without_asking_asks_for_what_ends(shared: Shared, own: bool) -> None:
    store = shared.open()
    store.put_many(LONG)
    assert read(store, ["a", "b"]) == list(LONG.values())
    writer = store if own else shared.open()
    writer.put_many(LONG, ttl_s=100.0)
    for _ in range(3):
        with shared.with_a_request():
            assert read(store, ["a", "b"]) == list(LONG.values())
        with shared.with_a_request():
            assert store.match_prefix(["a", "b"]) == 2
    let_pass(shared, 100.0)
    assert read(store, ["a", "b"]) == [None, None]
    assert store.match_prefix(["a", "b"]) == 0


def test_pinned_keys_outlive_everything_else(opened: Opened) -> None:
    store = opened.store
    store.put_many({"kept": b"k" * 1000, "other": b"o" * 1000})
    assert store.pin(["kept", "missing", "kept"]) == 2
    assert store.stats().store.protected_keys == 1
    assert store.evict(0.0, 0.0) == 1
    assert read(store, ["kept", "other"]) == [b"k" * 1000, None]
    assert store.unpin(["kept", "other"]) == 1
    assert store.unpin(["kept"]) == 0
    assert store.evict(0.0, 0.0) == 1
    assert store.pin(["kept"]) == 0


def test_a_pin_with_a_time_ends_by_itself(opened: Opened) -> None:
    store = opened.store
    store.put_many({"short": b"s" * 1000, "long": b"l" * 1000})
    assert store.pin(["short", "long"], ttl_s=100.0) == 2
    assert store.pin(["long"], ttl_s=200.0) == store.pin(["long"], ttl_s=1.0) == 1
    let_pass(opened, 99.0)
    assert store.evict(0.0, 0.0) == 0
    let_pass(opened, 1.0)
    assert store.stats().store.protected_keys == 1
    assert store.evict(0.0, 0.0) == 1
    assert store.keys() == ["long"]
    let_pass(opened, 100.0)
    assert store.unpin(["long"]) == 0


def test_pins_over_the_bound_name_the_setting(opened: Opened) -> None:
    store = opened.store
    store.put_many({str(number): bytes(256 * KIB) for number in range(8)})
    with pytest.raises(LimitExceeded, match="--max-protected-ratio"):
        store.pin(map(str, range(8)))
    assert store.stats().store.protected_keys == 0
    assert store.pin(map(str, range(4))) == 4
    assert store.stats().store.protected_bytes == MIB


@pytest.mark.parametrize("kind", differing(REMOTE))
def test_the_bound_is_a_setting_of_the_server(kind: str, loops: Loops) -> None:
    config = make_config(prealloc_bytes=4 * MIB, max_protected_ratio=0.0)
    with REMOTE[kind](loops, config, {}, 1) as opened:
        opened.store.put("k", b"v")
        with pytest.raises(LimitExceeded, match="max_protected_ratio=0 "):
            opened.store.pin(["k"])


def test_more_keys_than_a_request_takes_are_pinned_in_parts(opened: Opened) -> None:
    keys = [str(number) for number in range(10)]
    opened.store.put_many(dict.fromkeys(keys, b"v"))
    assert opened.store.pin(keys * 2000) == 20_000
    assert opened.store.unpin(keys) == 10


@pytest.mark.parametrize("kind", ON_DISK)
def test_what_ends_is_in_memory_only(kind: str, loops: Loops, tmp_path: Path) -> None:
    """Not even an earlier block of its key comes back."""
    config = with_disk(tmp_path / "disk")
    with STORES[kind](loops, config, {}, 1) as opened:
        store = opened.store
        store.put_many({"before": b"1" * 1000, "same": b"2" * 1000, "stays": b"3" * 1000})
        assert store.flush(["before", "same", "stays"]) == 3
        store.put_many({"before": b"4" * 1000, "same": b"2" * 1000, "new": b"5" * 1000}, ttl_s=100.0)
        assert store.flush(["before", "same", "new", "stays"]) == 1
        assert store.get("before") == b"4" * 1000
        let_pass(opened, 100.0)
        assert store.exists_many(["before", "same", "new", "stays"]) == [False] * 3 + [True]
        store.put("late", b"6" * 1000, ttl_s=100.0)
    with STORES[kind](loops, config, {}, 1) as opened:
        until_recovered(opened)
        keys = ["before", "same", "new", "late", "stays"]
        assert read(opened.store, keys) == [None] * 4 + [b"3" * 1000]


@pytest.mark.parametrize("kind", ON_DISK)
def test_an_evicted_block_that_ends_is_not_on_disk(kind: str, loops: Loops, tmp_path: Path) -> None:
    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        store = opened.store
        store.put("k", b"v" * 1000, ttl_s=100.0)
        assert store.get("k") == b"v" * 1000
        assert store.flush(["k"]) == 0
        assert store.evict(0.0, 0.0) >= 1
        assert not store.exists("k")


def test_a_server_that_cannot_end_or_pin_keys_is_not_asked_to(loops: Loops) -> None:
    with (
        servers_lack(Capability.RETENTION),
        REMOTE["shm-threads"](loops, make_config(prealloc_bytes=4 * MIB), {}, 1) as opened,
    ):
        store = opened.store
        for put in PUTS.values():
            with pytest.raises(VersionMismatch, match="time to live"):
                put(store, {"k": b"v" * 100_000}, 5.0)
        with pytest.raises(VersionMismatch, match="does not understand Pin"):
            store.pin(["k"])
        assert store.keys() == []
        store.put("k", b"v")
        assert store.get("k") == b"v"


def test_a_server_that_cannot_end_pins_is_not_asked_to(loops: Loops) -> None:
    with (
        servers_lack(Capability.TIMED_PINS),
        REMOTE["shm-threads"](loops, make_config(prealloc_bytes=4 * MIB), {}, 1) as opened,
    ):
        store = opened.store
        store.put("k", b"v")
        with pytest.raises(VersionMismatch, match="does not end pins; pin without ttl_s"):
            store.pin(["k"], ttl_s=5.0)
        assert store.stats().store.protected_keys == 0
        assert store.pin(["k"]) == 1
