"""Several workers of one engine, without vLLM: tensor parallel shards, stages of a
pipeline, and engines whose blocks are cut in different ways.
"""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.integrations.vllm.blocks import block_names

from .halves import LAYERS, Engine, MadeRequest, make_scheduler, stage_group

TOKENS = list(range(100, 122))  # five full blocks and two tokens
STAGES = [LAYERS[:2], LAYERS[2:]]


def whole(engine: Engine, stages: list[list[str]], name: str) -> torch.Tensor:
    """The prompt's blocks of a layer, with the heads of all ranks of its stage."""
    (stage,) = (number for number, layers in enumerate(stages) if name in layers)
    ranks = len(engine.workers) // len(stages)
    return torch.cat([cache[name][:5] for cache in engine.caches[stage * ranks : (stage + 1) * ranks]], 1)


@pytest.mark.parametrize(
    ("shards", "stages"), [(2, [LAYERS]), (1, STAGES), (2, STAGES), (3, [LAYERS[:1], *STAGES[1:]])]
)
def test_each_rank_stores_and_reads_its_own_part(
    store: blocking.BlockingStore, shards: int, stages: list[list[str]]
) -> None:
    one, other = (Engine(store, shards=shards, stages=stages) for _ in range(2))
    one.write(TOKENS)
    for cache in other.caches:
        for layer in cache.values():
            layer.zero_()

    assert other.read(TOKENS) == (20, [set()] * len(one.workers))
    assert len(store.keys()) == 5 * shards * sum(map(len, stages))
    for number, worker in enumerate(other.workers):
        for name in stages[number // shards]:
            assert torch.equal(other.caches[number][name][:5], one.caches[number][name][:5]), (number, worker)
    one.close()
    other.close()


@pytest.mark.parametrize("stages", [[LAYERS], STAGES])
@pytest.mark.parametrize(("shards", "ranks"), [(2, (1, 2)), (4, (1, 4)), (4, (2, 4)), (4, (1, 2))])
def test_engines_of_other_tensor_parallel_sizes_read_the_shards_of_each_other(
    store: blocking.BlockingStore, shards: int, ranks: tuple[int, int], stages: list[list[str]]
) -> None:
    for writing, reading in (ranks, ranks[::-1]):
        one = Engine(store, shards=shards, ranks=writing, stages=stages)
        other = Engine(store, shards=shards, ranks=reading)
        one.write(TOKENS)
        written = {name: whole(one, stages, name) for name in LAYERS}
        for layer in (layer for cache in other.caches for layer in cache.values()):
            layer.zero_()

        assert len(store.keys()) == 5 * shards * len(LAYERS)
        assert other.read(TOKENS) == (20, [set()] * reading)
        for name in LAYERS:
            assert torch.equal(whole(other, [LAYERS], name), written[name]), name
        store.delete(store.keys())
        one.close()
        other.close()


@pytest.mark.parametrize("layer", ["0", "1", "2"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_block_is_found_only_if_every_stage_and_shard_has_it(
    store: blocking.BlockingStore, layer: str, shard: int
) -> None:
    engine = Engine(store, shards=2, stages=STAGES)
    engine.write(TOKENS)
    hashes = [key.split("/")[-3] for key in store.keys() if key.endswith("/0/0")]  # noqa: SIM118 - no mapping
    store.delete([engine.names.key(block, shard, layer) for block in hashes])

    assert engine.read(TOKENS) == (0, [])
    engine.write(TOKENS)  # what is missing is written again
    assert engine.read(TOKENS) == (20, [set()] * 4)
    engine.close()


def test_a_scheduler_that_learns_of_no_stages_finds_what_the_first_has(store: blocking.BlockingStore) -> None:
    """So the test above would see it, if the layers of other stages were not asked
    for.
    """
    engine = Engine(store, stages=STAGES)
    engine.write(TOKENS)
    store.delete([key for key in store.keys() if key.endswith("/2")])  # noqa: SIM118 - no mapping
    alone = make_scheduler(store, engine.names, groups=(stage_group(STAGES[0]),))

    assert alone.loadable_tokens(MadeRequest.of(TOKENS), 0) == 20
    assert engine.read(TOKENS) == (0, [])
    engine.close()


def test_pipelines_of_other_lengths_share_blocks(store: blocking.BlockingStore) -> None:
    writer, reader = Engine(store, stages=STAGES), Engine(store)
    writer.write(TOKENS)

    assert reader.read(TOKENS) == (20, [set()])
    writer.close()
    reader.close()


def test_a_scheduler_without_groups_has_nothing_to_learn(store: blocking.BlockingStore) -> None:
    scheduler = make_scheduler(store, groups=())
    scheduler.learn_layers([{0: ("0",)}])

    assert scheduler.loadable_tokens(MadeRequest.of(TOKENS), 0) == 0


ENGINES = st.fixed_dictionaries(
    {
        "shards": st.sampled_from([1, 2, 4]),
        "groups": st.lists(st.tuples(st.sampled_from([0, 64, 128]), st.sampled_from([0, 8192])), max_size=2),
        "config": st.sampled_from(["window 64", "window 128"]),
        "namespace": st.sampled_from(["", "a", "vllm"]),
        "group_blocks": st.sampled_from([0, 4]),
    }
)


@given(ENGINES, ENGINES)
def test_engines_have_keys_in_common_if_and_only_if_all_of_them_agrees(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    def keys(engine: dict[str, Any]) -> set[str]:
        facts = {name: engine[name] for name in ("shards", "groups", "config")}
        names = block_names(
            facts,
            model="/models/llama",
            namespace=engine["namespace"],
            layers=("0", "1"),
            shards=engine["shards"],
            group_blocks=engine["group_blocks"],
        )
        return set(names.all_keys(["a" * 32, "b" * 32]))

    assert (keys(one) == keys(two)) == (one == two)
    assert keys(one).isdisjoint(keys(two)) == (one != two)
