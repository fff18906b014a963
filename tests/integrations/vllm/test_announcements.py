"""What engines of one name tell each other at their start."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.errors import PermissionDenied, StoreUnavailable
from infinistore.integrations.vllm.announcements import (
    ENGINES_PREFIX,
    URLS_PREFIX,
    AnnouncedBlocks,
    AnnouncedEngine,
    Announcement,
)
from infinistore.integrations.vllm.blocks import BlockNames

from .halves import ByHand, make_names, make_record

SAME_SIZE = "(start both with the same --tensor-parallel-size)"


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="vllm.infinistore")


def engine(store: blocking.BlockingStore, *, writes: bool = True, **facts: Any) -> Announcement:
    """One that has just started."""
    announcement = Announcement(store, make_names(**facts), make_record(), writes=writes)
    announcement.announce()
    return announcement


def there(store: blocking.BlockingStore) -> list[str]:
    return store.keys("vllm-engines/")


@pytest.mark.parametrize(
    ("own", "others", "told"),
    [
        ({"shards": 2}, {"shards": 4}, f"tensor parallel shards 4, here 2 {SAME_SIZE}"),
        ({"groups": [(64, 0)]}, {"groups": [(128, 0)]}, "groups [(128, 0)], here [(64, 0)]"),
        ({"dtype": "float16"}, {}, "dtype none, here float16"),
        ({"draft layers": 1, "draft method": "mtp"}, {}, "draft layers none, here 1; draft method none, here mtp"),
        ({"config": "c" * 200}, {"config": "d"}, f"config d, here {'c' * 80}..."),
    ],
)
def test_engines_of_one_name_that_share_nothing_are_told_why(
    store: blocking.BlockingStore,
    caplog: pytest.LogCaptureFixture,
    own: dict[str, Any],
    others: dict[str, Any],
    told: str,
) -> None:
    engine(store, **others)
    engine(store, **others)  # it was started again
    engine(store, namespace="other", **own)
    assert caplog.messages == []
    one = engine(store, **own)

    (line,) = caplog.messages
    assert line.endswith(f"neither reads the other's: {told}")
    one.announce()
    assert caplog.messages == [line]  # a renewal tells nothing again


@pytest.mark.parametrize(
    "value", [b"\xff", b"[1]", b"3", b"{", b'{"facts": {"namespace": 7}}', b'{"facts": [], "blocks": 3}']
)
@pytest.mark.parametrize("writes", [True, False])
def test_what_somebody_else_put_there_is_no_announcement(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture, value: bytes, *, writes: bool
) -> None:
    store.put(make_names().announcement.rpartition("/")[0] + "/0123", value)
    engine(store, writes=writes)

    assert caplog.messages == []


def test_many_engines_are_all_known(store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(40):
        Announcement(store, make_names(config=f"{number}"), make_record(), writes=True).announce()
    caplog.clear()
    engine(store, config="own")

    assert sorted(line.rpartition(": ")[2] for line in caplog.messages) == sorted(
        f"config {number}, here own" for number in range(40)
    )


def test_an_announcement_lasts_three_renewals(store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an engine that has ended is not named."""
    lasting_s: list[float | None] = []
    put = store.put

    def note(key: str, data: bytes, *, ttl_s: float | None = None) -> None:
        lasting_s.append(ttl_s)
        put(key, data, ttl_s=ttl_s)

    monkeypatch.setattr(store, "put", note)
    background = ByHand()
    background.start(Announcement(store, make_names(), make_record(), writes=True).renewing())
    background.run(179.0)

    assert (lasting_s, background.pauses) == ([180.0] * 3, [60.0] * 3)


def test_an_engine_that_ended_is_not_named(store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture) -> None:
    engine(store, shards=4)
    store.delete(there(store))  # as when its time is over
    engine(store, shards=2)

    assert caplog.messages == []


@pytest.mark.parametrize(
    ("writers", "told"),
    [
        ([4], f"tensor parallel shards 4, here 2 {SAME_SIZE}"),
        ([4, 8], f"tensor parallel shards 4, here 2 {SAME_SIZE} / tensor parallel shards 8, here 2 {SAME_SIZE}"),
        ([4, 2], ""),
        ([], ""),
    ],
)
def test_one_that_only_reads_is_told_once_if_nobody_writes_what_it_reads(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture, writers: Sequence[int], told: str
) -> None:
    for shards in writers:
        Announcement(store, make_names(shards=shards), make_record(), writes=False).announce()  # others that only read
        engine(store, shards=shards)
    caplog.clear()
    reader = engine(store, writes=False, shards=2)
    reader.announce()

    if not told:
        assert caplog.messages == []
        return
    (line,) = caplog.messages
    assert "reads nothing and computes every prompt" in line
    parts = line.partition("blocks that suit it: ")[2].split(" / ")
    assert sorted(parts) == sorted(told.split(" / "))


def test_one_that_reads_and_starts_first_hears_of_the_writer_later_and_the_writer_of_it(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture
) -> None:
    reader = engine(store, writes=False, shards=2)
    engine(store, writes=False, shards=8)  # neither of the two writes anything
    assert caplog.messages == []
    engine(store, shards=4)
    assert len(caplog.messages) == 2
    assert all("neither reads the other's: tensor parallel shards" in line for line in caplog.messages)
    reader.announce()

    assert caplog.messages[2].endswith(f"blocks that suit it: tensor parallel shards 4, here 2 {SAME_SIZE}")


def test_one_that_reads_looks_a_few_times_for_a_writer_and_then_no_more(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings: list[str] = []
    keys = store.keys

    def note(prefix: str, **options: Any) -> list[str]:
        listings.append(prefix)
        return keys(prefix, **options)

    monkeypatch.setattr(store, "keys", note)
    reader = engine(store, writes=False)
    for _ in range(30):
        reader.announce()
    assert listings == ["vllm-engines/llama/"] * 10

    listings.clear()
    engine(store)
    found = engine(store, writes=False)
    found.announce()
    assert len(listings) == 2  # one each: it knows whom it reads from


def test_a_store_that_is_lost_meanwhile_is_told_once_and_looked_at_when_it_is_back(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(store, shards=4)

    def gone(*_: object, **__: object) -> None:
        raise StoreUnavailable("it is gone")

    with monkeypatch.context() as patched:
        patched.setattr(store, "put", gone)
        patched.setattr(store, "keys", gone)
        one = engine(store, shards=2)
        one.announce()
    (line,) = caplog.messages
    assert "announcement failed" in line
    one.announce()
    assert "tensor parallel shards 4, here 2" in caplog.messages[1]
    assert len(there(store)) == 2


def test_an_announcement_that_succeeds_does_not_end_an_outage_of_lookups(store: blocking.BlockingStore) -> None:
    """It has more time than they, and would tell each minute that the store is back."""
    record = make_record()
    record.failed("look-up", StoreUnavailable("too slow"))
    Announcement(store, make_names(), record, writes=True).announce()
    assert not record.is_healthy


def test_one_that_may_not_write_is_told_of_others(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(store, shards=4)

    def refused(*_: object, **__: object) -> None:
        raise PermissionDenied("read only")

    monkeypatch.setattr(store, "put", refused)
    engine(store, writes=False, shards=2)

    assert "computes every prompt" in caplog.messages[1]


NUMBERS = st.integers(1, 2**20)
KINDS = st.builds(
    lambda names, of_hash, times, size: AnnouncedBlocks(names, of_hash * times, of_hash, size),
    st.builds(
        BlockNames,
        st.sampled_from(["vllm/model/0123", "vllm/namespace/model/0123"]),
        st.lists(st.text(max_size=5), min_size=1, max_size=4).map(tuple),
        NUMBERS,
        st.integers(0, 64),
    ),
    NUMBERS,
    NUMBERS,
    NUMBERS,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(kind=KINDS)
def test_a_router_reads_how_blocks_are_called(kind: AnnouncedBlocks) -> None:
    assert AnnouncedBlocks.read(json.dumps({"facts": {}, "blocks": kind.value()}).encode()) == kind


@given(engine=st.builds(AnnouncedEngine, st.text(max_size=30), st.text(max_size=30), NUMBERS))
def test_a_router_reads_where_an_engine_is(engine: AnnouncedEngine) -> None:
    assert AnnouncedEngine.read(engine.key, engine.value()) == engine


@given(kind=KINDS, name=st.sampled_from(["prefix", "layers", "shards", "block_tokens", "other"]), junk=JSON)
def test_what_somebody_else_put_there_is_never_an_error(kind: AnnouncedBlocks, name: str, junk: object) -> None:
    for said in (junk, {"blocks": junk}, {"blocks": {**kind.value(), name: junk}}, {"engine": junk}):
        value = json.dumps(said).encode()
        found = AnnouncedBlocks.read(value)
        assert found is None or found.block_tokens % found.hash_tokens == 0
        AnnouncedEngine.read(f"{URLS_PREFIX}http://a", value)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"prefix": 3}, {"prefix": "vllm"}, {"layers": []}, {"layers": [3]}, {"layers": "01"}, {"shards": 0}),
        *({"block_tokens": 10, "hash_tokens": 4}, {"hash_tokens": -1}, {"bytes_per_token": 1.5}, {"shards": True}),
        *({"layers": ["0"] * 100_001}, {"bytes_per_token": 2**41}),
    ],
)
def test_what_cannot_be_is_no_announcement(wrong: dict[str, object]) -> None:
    kind = AnnouncedBlocks(BlockNames("vllm/model/0123", ("0",)), 16, 16, 1024)
    assert AnnouncedBlocks.read(json.dumps({"blocks": {**kind.value(), **wrong}}).encode()) is None


def test_an_engine_that_knows_its_url_is_found_by_it(store: blocking.BlockingStore) -> None:
    names = make_names()
    kind = AnnouncedBlocks(names, 16, 16, 1024)
    Announcement(store, names, make_record(), writes=True, blocks=kind, url="http://a", cache_tokens=4800).announce()
    (key,) = store.keys(URLS_PREFIX)
    engine = AnnouncedEngine.read(key, bytes(store.get(key)))
    assert engine == AnnouncedEngine("http://a", names.announcement, 4800)
    assert names.announcement.startswith(ENGINES_PREFIX)
    found = AnnouncedBlocks.read(bytes(store.get(names.announcement)))
    assert found == kind
