"""A worker's half, with a store and tensors but without vLLM: what is written comes
back, or is told as failed.
"""

import logging
import threading
from typing import Any

import attrs
import pytest
import torch

from infinistore import blocking
from infinistore.errors import ConfigError, LimitExceeded, StoreUnavailable
from infinistore.integrations.vllm.blocks import Blocks, Load, Save, Step
from infinistore.integrations.vllm.observations import Observations, merged
from infinistore.integrations.vllm.worker import LayerCache, WorkerSide
from tests.bad_days.held import held_after
from tests.cluster_client.clusters import Member

from .halves import LAYERS, ByHand, make_cache, make_names, make_worker, save

HASHES = ["aa", "bb", "cc", "dd"]
FROM = [3, 0, 5, 1]
TO = [2, 7, 4, 6]
SAVE = Step(saves=[Save("w", Blocks(HASHES, FROM))])
LOAD = Step(loads=[Load("r", [Blocks(HASHES, TO)])])


def wait_for(worker: WorkerSide, *, sent: str = "", read: str = "") -> set[int]:
    """Poll, as vLLM does, until a request is reported; return the blocks that
    failed.
    """
    worker.begin(Step())
    while True:
        sent_now, read_now = worker.poll([sent] if sent else [])
        if (sent or read) in (sent_now if sent else read_now):
            return worker.take_failed_blocks()


def written(store: blocking.BlockingStore, caches: dict[str, torch.Tensor], **options: Any) -> None:
    worker = make_worker(store, caches, **options)
    save(worker, SAVE)
    wait_for(worker, sent="w")
    worker.close()


def read(store: blocking.BlockingStore, caches: dict[str, torch.Tensor], **options: Any) -> set[int]:
    worker = make_worker(store, caches, **options)
    save(worker, LOAD)
    failed = wait_for(worker, read="r")
    worker.close()
    return failed


def permuted(cache: torch.Tensor) -> torch.Tensor:
    """The same tensor with tokens before heads in memory."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def interleaved(cache: torch.Tensor) -> torch.Tensor:
    """The same tensor, with room between its blocks that belongs to another layer."""
    wide = torch.zeros(len(cache), 2, *cache.shape[1:])
    wide[:, 1] = cache
    return wide[:, 1]


@pytest.mark.parametrize("layout", [lambda cache: cache, permuted, interleaved])
def test_blocks_come_back_in_other_places_and_nothing_else_changes(store: blocking.BlockingStore, layout: Any) -> None:
    source = {name: layout(cache) for name, cache in make_cache(1).items()}
    before = make_cache(2)
    target = {name: layout(cache) for name, cache in before.items()}

    written(store, source)
    assert read(store, target) == set()

    for name in LAYERS:
        assert torch.equal(target[name][TO], source[name][FROM])
        others = [block for block in range(8) if block not in TO]
        assert torch.equal(target[name][others], before[name][others])


@pytest.mark.parametrize(("ttl_s", "there"), [(None, 4), (3600.0, 4), (1e-6, 0)])
def test_blocks_end_after_the_time_that_is_set(store: blocking.BlockingStore, ttl_s: float | None, there: int) -> None:
    written(store, make_cache(1), ttl_s=ttl_s)
    assert len(store.keys()) == there * len(LAYERS)


def test_a_request_may_say_when_its_blocks_end(store: blocking.BlockingStore) -> None:
    worker = make_worker(store, make_cache(1), ttl_s=1e-6)
    saves = [Save(name, Blocks([name], [0]), ttl_s=ttl_s) for name, ttl_s in (("aa", None), ("bb", 60.0))]
    save(worker, Step(saves=saves))
    worker.close()
    stored = store.keys()
    assert [make_names().block_of(key, frozenset("012")) for key in stored] == ["bb"] * 3


def test_each_shard_writes_and_reads_its_own_and_one_replica_writes(store: blocking.BlockingStore) -> None:
    names = make_names(shards=2)
    caches = [make_cache(1), make_cache(2)]
    for shard in range(2):
        written(store, caches[shard], names=names, shards=range(shard, shard + 1))
        written(store, make_cache(9), names=names, shards=range(shard, shard + 1), writes=False)

    for shard in range(2):
        target = make_cache(3)
        assert read(store, target, names=names, shards=range(shard, shard + 1)) == set()
        assert torch.equal(target[LAYERS[0]][TO], caches[shard][LAYERS[0]][FROM])


@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        ({"cc": b""}, {4, 6}),  # the places of cc and dd
        ({"cc": b"short"}, {4, 6}),
        ({"bb": b"short", "cc": b""}, {7, 4, 6}),
        ({"cc": b"long" * 1000}, set(TO)),  # there was no room for it, so that nothing was read
    ],
)
@pytest.mark.parametrize(("layer", "read_bytes"), [("0", 1), ("2", 1), ("0", 1 << 20), ("2", 1 << 20)])
def test_a_block_that_is_not_whole_fails_with_those_after_it(
    damage: dict[str, bytes], failed: set[int], layer: str, read_bytes: int, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue("store")
    request.getfixturevalue("monkeypatch").setattr("infinistore.integrations.vllm.worker._READ_BYTES", read_bytes)
    source, target = make_cache(1), make_cache(2)
    written(store, source)
    for block_hash, value in damage.items():
        key = make_names().key(block_hash, 0, layer)
        if value:
            store.put(key, value)
        else:
            store.delete([key])

    assert read(store, target) == failed
    for place, block in zip(TO, FROM, strict=True):
        if place not in failed:
            assert all(torch.equal(target[name][place], source[name][block]) for name in LAYERS)


def test_several_requests_are_read_at_once(store: blocking.BlockingStore) -> None:
    source, target = make_cache(1), make_cache(2)
    written(store, source)
    worker = make_worker(store, target)

    save(
        worker,
        Step(
            loads=[
                Load("one", [Blocks(HASHES[:1], [7])]),
                Load("two", [Blocks(HASHES, [0, 1, 2, 3])]),
                Load("no", [Blocks(["ee"], [6])]),
            ]
        ),
    )
    worker.begin(Step())
    told: set[str] = set()
    while told != {"one", "two", "no"}:
        told |= worker.poll(())[1]

    assert worker.take_failed_blocks() == {6}
    assert torch.equal(target[LAYERS[2]][[7, 0, 1, 2, 3]], source[LAYERS[2]][[3, *FROM]])
    worker.close()


class SlowRead:
    """Reads wait until they may go on."""

    def __init__(self, store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        read = store.get_many_into

        def waiting(blocks: Any) -> Any:
            self.go_on.wait()
            return read(blocks)

        monkeypatch.setattr(store, "get_many_into", waiting)


def test_what_waits_for_a_thread_is_held_until_it_is_read(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_cache(1), make_cache(2)
    written(store, source)
    slow, background = SlowRead(store, monkeypatch), ByHand()
    worker = make_worker(store, target, background=background)

    # Two threads: the first two begin at once.
    others = [Load(name, [Blocks(["none of these is stored"], [0])]) for name in ("one", "two")]
    save(worker, Step(loads=[*others, Load("r", [Blocks(HASHES, TO)])]))
    background.run()
    store.evict(0, 0)
    assert store.exists_many(make_names().all_keys(HASHES)) == [True] * 12

    slow.go_on.set()
    assert wait_for(worker, read="r") == {0}
    assert torch.equal(target[LAYERS[2]][TO], source[LAYERS[2]][FROM])
    worker.close()
    assert store.stats().store.holds == 0


def test_a_load_that_begins_at_once_holds_nothing(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(store, make_cache(1))
    monkeypatch.setattr(store, "match_prefix", lambda *_: pytest.fail("asked"))
    assert read(store, make_cache(2)) == set()


@pytest.mark.parametrize("placed", [True, False])
def test_what_is_read_in_the_meantime_is_not_held(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, placed: bool
) -> None:
    written(store, make_cache(1))
    slow, background = SlowRead(store, monkeypatch), ByHand()
    worker = make_worker(store, make_cache(2), background=background)
    save(worker, Step(loads=[Load(name, [Blocks(HASHES, TO)]) for name in ("one", "two", "r")]))
    match = store.match_prefix

    def late(keys: list[str], *, hold_s: float) -> blocking.PrefixMatch:
        found = match(keys, hold_s=hold_s)
        slow.go_on.set()
        wait_for(worker, read="r")
        return found

    monkeypatch.setattr(store, "match_prefix", late)
    if not placed:
        slow.go_on.set()
        wait_for(worker, read="r")
        monkeypatch.setattr(store, "match_prefix", lambda *_, **__: pytest.fail("asked"))
    background.run()
    worker.close()
    assert store.stats().store.holds == 0


def test_what_cannot_be_held_is_read_all_the_same(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(store, make_cache(1))

    def refuse(*_: object, **__: object) -> None:
        raise LimitExceeded("all holds together would pin too much")

    monkeypatch.setattr(store, "match_prefix", refuse)
    worker = make_worker(store, make_cache(2))
    with caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
        save(worker, Step(loads=[Load(str(number), [Blocks(HASHES, TO)]) for number in range(8)]))
        read: set[str] = set()
        while len(read) < 8:
            read |= worker.poll(())[1]
        worker.close()
    assert worker.take_failed_blocks() == set()
    assert caplog.text.count("hold failed") <= 1


def test_a_finished_request_is_told_as_sent_only_when_its_blocks_are_written(
    store: blocking.BlockingStore, may_write: threading.Event
) -> None:
    worker = make_worker(store, make_cache(1))
    save(worker, SAVE)
    worker.begin(Step())

    assert worker.poll(["w", "a request that wrote nothing"]) == (set(), set())
    assert store.keys() == []
    may_write.set()
    wait_for(worker, sent="w")
    assert len(store.keys()) == 12
    worker.close()


def test_the_blocks_of_a_preempted_request_are_written_before_they_are_taken_away(
    store: blocking.BlockingStore, may_write: threading.Event
) -> None:
    worker = make_worker(store, make_cache(1))
    save(worker, SAVE)
    preempting = threading.Thread(target=worker.begin, args=(Step(preempted={"w"}),))
    preempting.start()

    assert store.keys() == []
    may_write.set()
    preempting.join()
    assert len(store.keys()) == 12
    assert worker.poll(["w"]) == (set(), set())  # vLLM has forgotten that it wrote
    worker.close()


def test_a_producer_ends_its_step_when_a_decoder_can_read_it(store: blocking.BlockingStore) -> None:
    worker = make_worker(store, make_cache(1), delivers=True)

    save(worker, SAVE)

    assert len(store.keys()) == 12
    worker.close()


def test_a_lost_store_fails_reads_and_drops_writes_and_raises_nothing(
    own_server: Member, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.open_store(f"tcp://{own_server.address}?deadline_s=600", lazy=True) as store:
        written(store, make_cache(1))
        own_server.stop()

        with caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
            assert read(store, make_cache(2)) == set(TO)
            written(store, make_cache(1))
            written(store, make_cache(1), delivers=True)

    assert {record.name for record in caplog.records if record.levelname != "INFO"} == {"vllm.infinistore"}


def test_steps_without_a_store_keep_nothing_of_what_was_computed(gone: blocking.BlockingStore) -> None:
    caches = make_cache(1)
    worker = make_worker(gone, caches)
    delivering = make_worker(gone, caches, delivers=True)

    def step() -> None:
        save(worker, SAVE)
        wait_for(worker, sent="w")
        save(worker, LOAD)
        wait_for(worker, read="r")

    def delivering_step() -> None:
        save(delivering, SAVE)

    assert held_after(*[step, delivering_step] * 4) == 0
    worker.close()
    delivering.close()


class Away:
    """Writes fail until `ends`."""

    def __init__(self, store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends = threading.Event()
        put = store.put_batch

        def failing(*arguments: Any, **options: Any) -> list[str]:
            if not self.ends.is_set():
                raise StoreUnavailable("gone")
            return put(*arguments, **options)

        monkeypatch.setattr(store, "put_batch", failing)


def test_after_a_write_that_failed_the_next_is_written(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(store, monkeypatch)
    worker = make_worker(store, make_cache(1), delivers=True)

    save(worker, SAVE)
    away.ends.set()
    save(worker, attrs.evolve(SAVE, saves=[Save("w", Blocks(["ee"], [2]))]))

    assert store.exists_many(make_names().all_keys(["ee"])) == [True] * 3
    worker.close()


def test_after_a_layer_that_failed_those_behind_it_are_written(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(store, monkeypatch)
    worker = make_worker(store, make_cache(1))
    worker.begin(attrs.evolve(SAVE, computes=True))
    worker.save_layer(LAYERS[0])
    while not worker.writer.statistics().failed_writes:
        pass
    away.ends.set()
    for name in LAYERS[1:]:
        worker.save_layer(name)
    worker.end_saves()
    wait_for(worker, sent="w")

    assert store.exists_many(make_names().all_keys(HASHES)) == [False, True, True] * 4
    worker.close()


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (torch.zeros(3, 2, 4, 6), "does not consist of 8 blocks"),
        (torch.zeros(2, 8, 4, 6).transpose(0, 1), "scattered over memory"),
        (None, "does not consist of 8 blocks"),
    ],
)
def test_a_cache_without_whole_blocks_is_refused(
    store: blocking.BlockingStore, cache: torch.Tensor | None, complaint: str
) -> None:
    caches = make_cache(1)
    worker = make_worker(store, caches)
    with pytest.raises(ConfigError, match=complaint):
        worker.register({**caches, LAYERS[1]: cache}, 8)  # type: ignore[dict-item]
    worker.close()


def test_each_shard_of_a_block_is_its_heads() -> None:
    cache = torch.randn(8, 4, 4, 6)
    parts = LayerCache.of("layer", "0", cache, 8, range(2, 4))

    assert [part.shard for part in parts] == [2, 3]
    for part, heads in zip(parts, (cache[:, :2], cache[:, 2:]), strict=True):
        assert bytes(part.block(5)) == heads[5].contiguous().numpy().tobytes()
        assert part.copy([6, 1]).numpy().tobytes() == heads[[6, 1]].contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        (torch.zeros(8, 4, 2, 6).transpose(1, 2), "a shard of a block of layer is scattered over memory"),
        (torch.zeros(16, 2, 2, 6), "a shard of a block of layer is scattered over memory"),  # each block cut in two
        (torch.zeros(8, 3, 4, 6), "the KV heads of layer cannot be told apart"),
        (torch.zeros(8, 2, 4, 2, 6), "the KV heads of layer cannot be told apart"),
    ],
)
def test_a_cache_whose_heads_are_not_apart_has_one_shard_or_none(cache: torch.Tensor, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LayerCache.of("layer", "0", cache, 8, range(2))


def test_bytes_times_and_failures_are_observed(store: blocking.BlockingStore) -> None:
    observed = Observations()
    worker = make_worker(store, make_cache(1), delivers=True, observations=observed)
    save(worker, SAVE)
    worker.observe_writes()
    size = 12 * make_cache(1)[LAYERS[0]][0].nbytes
    assert observed.take() == {"counters": {"written_bytes": size}, "times": {}}

    save(worker, LOAD)
    wait_for(worker, read="r")
    store.delete([make_names().key("dd", 0, "2")])
    save(worker, LOAD)
    wait_for(worker, read="r")
    worker.observe_writes()
    taken = observed.take()
    assert taken["counters"]["failed_reads"] == 1
    assert taken["counters"]["read_bytes"] >= size
    assert len(taken["times"]["read"]) == 2
    worker.close()


def test_observations_of_workers_add_up() -> None:
    one = {"counters": {"read_bytes": 3}, "times": {"read": [1.0]}}
    other = {"counters": {"read_bytes": 4, "failed_reads": 1}, "times": {"read": [2.0], "look_up": [0.5]}}

    assert merged(one, other) == {
        "counters": {"read_bytes": 7, "failed_reads": 1},
        "times": {"read": [1.0, 2.0], "look_up": [0.5]},
    }
    assert (merged({}, one), merged(one, {}), merged({}, {})) == (one, one, {})
