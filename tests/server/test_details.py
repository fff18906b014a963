"""What an operator sees of a server: counts of its requests, its connections, its
arenas, and which keys it holds.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking, open_store
from infinistore.allocators import create_allocator
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.errors import InvalidRequest, LimitExceeded
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Get, Keys, MatchPrefix, Message, Put
from infinistore.server.recorder import OK, Recorder, outcome_of
from infinistore.server.telemetry import ARENA_PARTS, MAX_SAMPLE_KEYS, prefixes
from infinistore.statistics import LATENCY_BOUNDS_S, MAX_PREFIXES, PrefixStatistics, ServerDetails
from tests.server.running import KIB, MIB, POOL_BYTES, RunningServer, make_config, running_server

CHECKSUM_BYTES = 8


async def details_of(server: RunningServer) -> ServerDetails:
    async with open_store(server.url) as store:
        details = (await store.stats(details=True)).details
    assert details is not None
    return details


def outcomes(details: ServerDetails) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Count and bytes of each operation but the question itself."""
    return {
        (one.kind, one.transport, one.outcome): (one.count, one.payload_bytes)
        for one in details.operations
        if one.kind != "statistics"
    }


async def test_every_request_is_counted_by_kind_transport_and_outcome(tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "s"))
    async with running_server(config) as server:
        async with open_store(server.url) as store:
            await store.put_many([("a", bytes(100)), ("b", bytes(50))])
            await store.get("a")
            await store.get_many(["b", "missing"])
            await store.match_prefix(["a", "b", "c"])
            with pytest.raises(LimitExceeded):
                await store.match_prefix(["a"], hold_s=1e6)
        async with open_store(f"unix://{server.unix_path}") as store:
            await store.exists("a")
            await store.purge()
        found = outcomes(await details_of(server))
    assert found == {
        ("put", "tcp", "ok"): (1, 150 + 2 * CHECKSUM_BYTES),
        ("get", "tcp", "ok"): (2, 150),
        ("match_prefix", "tcp", "ok"): (1, 0),
        ("match_prefix", "tcp", "LimitExceeded"): (1, 0),
        ("exists", "unix", "ok"): (1, 0),
        ("purge", "unix", "ok"): (1, 0),
    }


async def test_a_request_that_breaks_the_connection_is_counted_too() -> None:
    async with running_server() as server:
        peer = await server.peer()
        await peer.send_head(Put(Keys(["a"]), pack_u64([1000]), checksums=False), payload_bytes=1000)
        peer.close()
        await server.quiet()
        found = outcomes(await details_of(server))
        assert found == {("put", "tcp", "StoreUnavailable"): (1, 1000)}
        assert server.server.telemetry.statistics().received_bytes == 1000


async def test_connections_are_shown_with_the_names_they_gave_themselves() -> None:
    async with running_server() as server, open_store(server.url, name="prefill-3") as store:
        await store.put("a", bytes(1000))
        details = await details_of(server)
    busy, asking = details.clients
    assert (busy.name, busy.transport, busy.requests, busy.errors) == ("prefill-3", "tcp", 1, 0)
    assert (busy.received_bytes, busy.sent_bytes, busy.pinned_bytes) == (1000 + CHECKSUM_BYTES, 0, 0)
    assert busy.connected_s >= asking.connected_s >= 0
    instance = server.server.telemetry.instance
    assert [busy.id, asking.id] == [f"{instance}-1", f"{instance}-2"]


async def test_the_totals_of_a_server_include_connections_that_are_over() -> None:
    async with running_server() as server:
        for _ in range(3):
            async with open_store(server.url) as store:
                await store.put("a", bytes(92))
        await server.quiet()
        statistics = server.server.telemetry.statistics()
    assert (statistics.requests, statistics.received_bytes) == (3, 300)


async def test_the_fill_of_an_arena_shows_where_it_is_full() -> None:
    async with running_server() as server, open_store(server.url) as store:
        await store.put_many([(f"{i}", bytes(KIB)) for i in range(POOL_BYTES // KIB // 4)])
        (arena,) = (await details_of(server)).arenas
    assert (arena.index, arena.length_bytes, arena.used_bytes) == (0, POOL_BYTES, POOL_BYTES // 4)
    assert arena.fill == [1.0] * (ARENA_PARTS // 4) + [0.0] * (ARENA_PARTS * 3 // 4)


async def test_details_come_on_request_and_to_the_blocking_client_too() -> None:
    async with running_server() as server:

        def ask(details: bool) -> ServerDetails | None:
            with blocking.open_store(server.url) as store:
                return store.stats(details=details).details

        assert await trio.to_thread.run_sync(ask, False) is None
        found = await trio.to_thread.run_sync(ask, True)
    assert found is not None
    assert found.state == "serving"


async def test_an_embedded_store_has_no_details() -> None:
    async with open_store() as store:
        assert (await store.stats(details=True)).details is None


KINDS: dict[str, type[Message]] = {"get": Get, "match_prefix": MatchPrefix, "put": Put}
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS)),
        st.sampled_from(["tcp", "unix"]),
        st.sampled_from([OK, "OutOfMemory"]),
        st.integers(0, 2**40),
        st.floats(0, 20) | st.sampled_from(LATENCY_BOUNDS_S),
    )
)


@given(RECORDS, RECORDS)
def test_a_request_counts_where_it_belongs_and_in_the_first_bucket_that_bounds_its_latency(
    records: list[tuple[str, str, str, int, float]], later: list[tuple[str, str, str, int, float]]
) -> None:
    recorder = Recorder()
    for kind, transport, outcome, payload, elapsed_s in records:
        recorder.record(KINDS[kind], transport, outcome, payload, elapsed_s)
    found = recorder.statistics()
    for kind, transport, outcome, payload, elapsed_s in later:  # which changes nothing of what was found
        recorder.record(KINDS[kind], transport, outcome, payload, elapsed_s)
    assert [(one.kind, one.transport, one.outcome) for one in found] == sorted({record[:3] for record in records})
    for one in found:
        same = [record[3:] for record in records if record[:3] == (one.kind, one.transport, one.outcome)]
        assert (one.count, one.payload_bytes) == (len(same), sum(payload for payload, _ in same))
        assert one.latency_sum_s == pytest.approx(sum(elapsed_s for _, elapsed_s in same))
        assert list(itertools.accumulate(one.latency_counts)) == [
            sum(elapsed_s <= bound for _, elapsed_s in same) for bound in (*LATENCY_BOUNDS_S, float("inf"))
        ]


def test_the_outcome_of_a_request_is_its_error_as_the_client_sees_it() -> None:
    assert outcome_of(LimitExceeded("")) == "LimitExceeded"
    assert outcome_of(KeyError("")) == "InfiniStoreException"


def core_with(*keys: str, sizes: Sequence[int] = (10,)) -> StoreCore:
    """A store with a block under each of these keys, of these sizes in turn."""
    pool = Pool(create_allocator("bitmap", 64))
    pool.add_arena(create_arena(0, 4 * MIB))
    core = StoreCore(pool, clock=lambda: 0.0)
    client = core.open_client("test")
    for key, size in zip(keys, itertools.cycle(sizes), strict=False):
        core.commit(core.reserve(client, [size]), [key], None)
    return core


async def found_prefixes(*keys: str) -> dict[str, tuple[int, int]]:
    core = core_with(*keys)
    found = {one.prefix: (one.keys, one.payload_bytes) for one in await prefixes(core)}
    core.pool.close()
    return found


async def test_a_prefix_ends_with_the_last_separator() -> None:
    found = await found_prefixes("m/a/1", "m/a/2", "m/b/1", "plain", "x:y", "v@w#u|z", "new\nline/1")
    one, two = (1, 10), (2, 20)
    assert found == {"m/a/": two, "m/b/": one, "": one, "x:": one, "v@w#u|": one, "new\nline/": one}


async def test_too_many_prefixes_are_cut_shorter() -> None:
    keys = [f"model/{layer}/{i}" for layer in range(MAX_PREFIXES) for i in range(2)]
    found = await found_prefixes(*keys, "other/1/2/3/4", "/")
    assert found == {"model/": (2 * MAX_PREFIXES, 20 * MAX_PREFIXES), "other/": (1, 10), "/": (1, 10)}


async def test_what_cannot_be_cut_shorter_is_left_out_beyond_the_largest() -> None:
    found = await found_prefixes(*(f"{i}/x" for i in range(MAX_PREFIXES + 9)), "0/y")
    assert len(found) == MAX_PREFIXES
    assert found["0/"] == (2, 20)


@pytest.mark.parametrize("count", [2 * MAX_SAMPLE_KEYS, 10 * MAX_SAMPLE_KEYS])
async def test_a_large_store_is_estimated_and_the_error_is_told(count: int) -> None:
    """A few prefixes hold the coldest and the warmest keys, and nearly nothing else
    does.
    """
    names = ["cold"] * 640 + ["most"] * (count - 1280) + ["warm"] * 640
    core = core_with(*(f"{name}/{i}" for i, name in enumerate(names)))
    found = {one.prefix: one for one in await prefixes(core)}
    core.pool.close()

    for name, one in found.items():
        assert abs(one.keys - names.count(name[:-1])) <= 2 * one.keys_error
        assert one.payload_bytes == pytest.approx(10 * one.keys, abs=10)
        assert one.payload_error_bytes == pytest.approx(10 * one.keys_error, abs=10)
    assert set(found) == {"cold/", "most/", "warm/"}
    assert 0 < found["cold/"].keys_error < 600
    assert 0 < found["most/"].keys_error < 600


async def test_a_store_that_is_looked_at_whole_has_no_error() -> None:
    core = core_with(*(f"some/{i}" for i in range(MAX_SAMPLE_KEYS)))
    assert await prefixes(core) == [PrefixStatistics("some/", MAX_SAMPLE_KEYS, 10 * MAX_SAMPLE_KEYS, 0, 0)]
    core.pool.close()


async def test_the_error_of_bytes_is_larger_than_that_of_keys_where_sizes_differ() -> None:
    count = 2 * MAX_SAMPLE_KEYS
    core = core_with(*map(str, range(count)), sizes=[10, 10, 10, 10, 10, 10, 10, 1000])
    (one,) = await prefixes(core)
    core.pool.close()

    assert one.keys == count
    assert abs(one.payload_bytes - count * 1070 // 8) <= 2 * one.payload_error_bytes
    assert one.payload_error_bytes / one.payload_bytes > 2 * one.keys_error / one.keys > 0


@given(st.lists(st.text("ab/:", min_size=1, max_size=12), unique=True, max_size=200))
async def test_prefixes_are_those_of_the_keys_and_count_each_once(keys: list[str]) -> None:
    found = await found_prefixes(*keys)
    assert all(any(key.startswith(prefix) for key in keys) for prefix in found)
    assert all(not prefix or prefix[-1] in "/:" for prefix in found)
    total = sum(count for count, _ in found.values())
    assert total == len(keys) if len(found) < MAX_PREFIXES else total <= len(keys)


async def test_keys_made_of_separators_do_not_take_for_ever() -> None:
    found = await found_prefixes(*("/" * i + str(i) for i in range(1, 1000)))
    assert len(found) == MAX_PREFIXES


async def test_the_log_names_no_keys_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infinistore.server")
    size = 20 * 1024 * KIB  # more than the server would drop to keep the connection
    async with running_server() as server:
        peer = await server.peer()
        twice = Put(Keys(["secret", "secret"]), pack_u64([size, size]), checksums=False)
        await peer.send_head(twice, payload_bytes=2 * size)
        with pytest.raises(InvalidRequest, match="secret"):
            await peer.reply_to_half(twice)
    audited = [record.getMessage() + str(vars(record)["audit"]) for record in caplog.records if "audit" in vars(record)]
    assert not any("secret" in text for text in audited)
    said = [record for record in caplog.records if record.name == "infinistore.server"]
    (line,) = [record for record in said if record.getMessage() != "serving without RDMA"]
    assert (line.getMessage(), vars(line)["error"], vars(line)["client"]) == (
        "connection closed",
        "InvalidRequest",
        "peer",
    )


def test_a_sample_has_every_key_once_when_it_can() -> None:
    core = core_with("a", "b", "c")
    assert Counter(core.sample(3)) == Counter({("a", 10): 1, ("b", 10): 1, ("c", 10): 1})
    assert len(set(core.sample(2)) & {("a", 10), ("b", 10), ("c", 10)}) == 2
    assert core.sample(1) == [("a", 10)]
    core.pool.close()
