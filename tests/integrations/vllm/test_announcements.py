"""What engines of one name tell each other at their start."""

import json
import logging
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.errors import PermissionDenied, StoreUnavailable
from infinistore.integrations.vllm.announcements import (
    ENGINES_PREFIX,
    READER,
    URLS_PREFIX,
    AnnouncedBlocks,
    AnnouncedEngine,
    Announcement,
)
from infinistore.integrations.vllm.blocks import BlockNames
from infinistore.integrations.vllm.settings import is_engine_url
from infinistore.keys import check_keys

from .halves import ByHand, make_names, make_record

SAME_SIZE = "(start both with the same --tensor-parallel-size, or set shards to the same number in both)"


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
    "value", [b"\xff", b"[1]", b"3", b"{", b"[" * 100_000, b'{"facts": [1]}', b'{"facts": {"namespace": 7}}']
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


BLOCKS = AnnouncedBlocks(make_names(shards=2), block_tokens=32, hash_tokens=16, bytes_per_token=4096)
ENGINE = AnnouncedEngine("http://10.0.0.1:8000", BLOCKS.names.announcement, cache_tokens=100_000)


@pytest.mark.parametrize("writes", [True, False])
def test_a_router_reads_where_an_engine_is_and_how_its_blocks_are_called(
    store: blocking.BlockingStore, *, writes: bool
) -> None:
    Announcement(store, BLOCKS.names, make_record(), writes=writes, blocks=BLOCKS, engine=ENGINE).announce()

    (key,) = store.keys(URLS_PREFIX)
    engine = AnnouncedEngine.read(key, bytes(store.get(key)))
    assert engine == ENGINE
    (key,) = store.keys(ENGINES_PREFIX)
    assert key == engine.announcement + ("" if writes else READER)
    assert AnnouncedBlocks.read(bytes(store.get(key))) == BLOCKS


def test_one_whose_blocks_a_router_cannot_ask_for_says_only_where_it_is(store: blocking.BlockingStore) -> None:
    Announcement(store, BLOCKS.names, make_record(), writes=True, engine=ENGINE).announce()

    assert AnnouncedBlocks.read(bytes(store.get(ENGINE.announcement))) is None
    assert store.keys(URLS_PREFIX) == [f"{URLS_PREFIX}http://10.0.0.1:8000"]


def test_where_an_engine_is_lasts_as_long_as_the_rest(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting_s: dict[str, float | None] = {}

    def note(key: str, data: bytes, *, ttl_s: float | None = None) -> None:
        lasting_s[key] = ttl_s

    monkeypatch.setattr(store, "put", note)
    Announcement(store, BLOCKS.names, make_record(), writes=True, blocks=BLOCKS, engine=ENGINE).announce()

    assert lasting_s == {ENGINE.key: 180.0, ENGINE.announcement: 180.0}


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
COUNTS = st.integers(1, 1000)
NAMES = st.builds(
    BlockNames,
    TEXTS.map("vllm/".__add__),
    st.lists(TEXTS, min_size=1, max_size=9).map(tuple),
    COUNTS,
    st.integers(0, 9),
)


@given(NAMES, COUNTS, COUNTS, st.integers(1, 2**50))
def test_what_is_said_of_blocks_is_what_is_read(names: BlockNames, hashes: int, hash_tokens: int, size: int) -> None:
    blocks = AnnouncedBlocks(names, hashes * hash_tokens, hash_tokens, size)

    assert AnnouncedBlocks.read(blocks.write()) == blocks


@given(st.sampled_from(["http://h", "https://[::1]:8000", "http://10.0.0.1:8000/a/b"]), TEXTS, st.integers(0, 2**50))
def test_what_is_said_of_an_engine_is_what_is_read(url: str, name: str, tokens: int) -> None:
    engine = AnnouncedEngine(url, ENGINES_PREFIX + name, tokens)

    assert AnnouncedEngine.read(engine.key, engine.write()) == engine


def with_blocks(**changed: object) -> bytes:
    """The value of `BLOCKS` with something else in it."""
    value = json.loads(BLOCKS.write())
    value["blocks"] |= changed
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": []},
        {"layers": "012"},
        {"layers": {"0": 1}},
        {"layers": [0, 1]},
        {"layers": ["0", ""]},
        {"layers": ["\ud800"]},
        {"layers": ["a\0b"]},
        {"layers": ["0" * 1000]},
        {"layers": ["0"] * 50_001},  # of two shards each
        {"prefix": None},
        {"prefix": "other/llama/0123"},
        {"prefix": "vllm/\ud800"},
        {"prefix": "vllm/" + "x" * 1000},
        {"shards": 0},
        {"shards": True},
        {"shards": 2**70},
        {"group_blocks": -1},
        {"group_blocks": "1"},
        {"block_tokens": 0},
        {"block_tokens": 40},  # the hashes are of 16
        {"block_tokens": 16_000_000},
        {"hash_tokens": 0},
        {"hash_tokens": 16.0},
        {"bytes_per_token": 0},
        {"bytes_per_token": 1e300},
    ],
)
def test_blocks_that_cannot_be_are_not_read(changed: dict[str, object]) -> None:
    assert AnnouncedBlocks.read(with_blocks()) == BLOCKS
    assert AnnouncedBlocks.read(with_blocks(**changed)) is None


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h", "http://", "http://h\n", "http://me@h", "http://h:x"])
def test_an_engine_at_no_url_is_not_read(url: str) -> None:
    assert AnnouncedEngine.read(URLS_PREFIX + url, ENGINE.write()) is None
    assert AnnouncedEngine.read(f"other/{ENGINE.url}", ENGINE.write()) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"announcement": None},
        {"announcement": "vllm/llama/0123"},
        {"announcement": "vllm-engines/" + "x" * 2000},
        {"announcement": "vllm-engines/\ud800"},
        {"cache_tokens": -1},
        {"cache_tokens": 2**70},
        {"cache_tokens": None},
        {"cache_tokens": 1.5},
        {"cache_tokens": True},
    ],
)
def test_an_engine_that_cannot_be_is_not_read(changed: dict[str, Any]) -> None:
    assert AnnouncedEngine.read(ENGINE.key, attrs.evolve(ENGINE, **changed).write()) is None


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["vllm/a", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
PARTS = ["prefix", "layers", "shards", "group_blocks", "block_tokens", "hash_tokens", "bytes_per_token"]
JUNK: st.SearchStrategy[bytes] = st.one_of(
    st.binary(max_size=99),
    JSON.map(lambda value: json.dumps(value).encode()),
    JSON.map(lambda value: json.dumps({"blocks": value}).encode()),
    st.fixed_dictionaries({}, optional={"engine": JSON, "cache_tokens": JSON}).map(lambda v: json.dumps(v).encode()),
    st.dictionaries(st.sampled_from(PARTS), JSON).map(lambda changed: with_blocks(**changed)),
    st.tuples(st.sampled_from([BLOCKS.write(), ENGINE.write()]), st.integers(0, 99)).map(lambda cut: cut[0][: cut[1]]),
    st.sampled_from([b"[" * 100_000, b'{"blocks":' * 100_000, b"1" * 10_000, b" " * 5_000_000]),
)


@given(JUNK, st.text(max_size=30).map(URLS_PREFIX.__add__) | st.just(ENGINE.key))
def test_junk_is_nothing_or_something_that_can_be(value: bytes, key: str) -> None:
    blocks, engine = AnnouncedBlocks.read(value), AnnouncedEngine.read(key, value)

    if blocks is not None:
        assert AnnouncedBlocks.read(blocks.write()) == blocks
        check_keys(blocks.names.all_keys(["0" * 32]))
        assert blocks.names.announcement.startswith(ENGINES_PREFIX)
    if engine is not None:
        assert is_engine_url(engine.url)
        assert AnnouncedEngine.read(engine.key, engine.write()) == engine
