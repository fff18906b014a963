"""A cache without the middle of a sequence: its beginning is exact, what is behind the
hole is turned, and nobody takes it for an exact one."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from infinistore import blocking
from infinistore.integrations.rotary import Turn
from infinistore.integrations.transformers import load_approximate_cache, load_cache, save_cache
from tests.integrations.small_llama import NAME, VOCABULARY, complete, make_model

BLOCK = 8
TOKENS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(100)]
"""12 full blocks, and a few tokens."""


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=8 * 1024 * 1024, minimal_allocate_bytes=1024) as store:
        yield store


@pytest.fixture(scope="module")
def shallow() -> PreTrainedModel:
    """A model of one layer: its keys and values know nothing of other tokens, so that
    what is approximate elsewhere is exact."""
    return make_model(num_hidden_layers=1)


@torch.no_grad()
def prefill(model: PreTrainedModel, tokens: list[int]) -> DynamicCache:
    cache = model(torch.tensor([tokens]), use_cache=True).cache
    assert isinstance(cache, DynamicCache)
    return cache


def keys_of(cache: DynamicCache) -> torch.Tensor:
    layer: Any = cache.layers[0]
    keys: torch.Tensor = layer.keys
    return keys


def save(store: blocking.BlockingStore, model: PreTrainedModel, tokens: list[int], salt: str = "") -> None:
    save_cache(store, model, tokens, prefill(model, tokens), name=NAME, block_tokens=BLOCK, salt=salt)


@given(
    hole=st.tuples(st.integers(4, 98), st.integers(5, 99)).filter(lambda hole: hole[0] < hole[1]),
    stored=st.integers(0, len(TOKENS)),
)
def test_what_is_stored_is_used_up_to_the_hole_and_behind_it(
    shallow: PreTrainedModel, hole: tuple[int, int], stored: int
) -> None:
    with blocking.open_store(pool_bytes=1024 * 1024, minimal_allocate_bytes=1024) as store:
        if stored:
            save(store, shallow, TOKENS[:stored])
        cache, left, report = load_approximate_cache(store, shallow, TOKENS, drop=hole, name=NAME, block_tokens=BLOCK)
    first, end = hole
    assert left == TOKENS[:first] + TOKENS[end:]
    full = stored // BLOCK * BLOCK
    expected = (min(first, full), max(0, full - end), end - first)
    assert (report.exact, report.approximate, report.dropped) == expected
    assert cache.get_seq_length() == report.reused == expected[0] + expected[1]
    made, tokens = complete(shallow, cache, left)
    computed, expected_tokens = complete(shallow, DynamicCache(config=shallow.config), left)
    torch.testing.assert_close(made, computed, rtol=0, atol=1e-5)
    assert tokens == expected_tokens


@pytest.mark.parametrize(("bad", "expected"), [(0, (0, 0)), (2, (16, 0)), (3, (20, 34)), (7, (20, 0)), (9, (20, 10))])
def test_a_block_of_another_length_ends_what_is_used_unless_all_of_it_is_dropped(
    store: blocking.BlockingStore, shallow: PreTrainedModel, bad: int, expected: tuple[int, int]
) -> None:
    for tokens in range(BLOCK, bad * BLOCK + 1, BLOCK):
        save(store, shallow, TOKENS[:tokens])
    before = set(store.keys())
    save(store, shallow, TOKENS[: (bad + 1) * BLOCK])
    (key,) = set(store.keys()) - before
    save(store, shallow, TOKENS)
    store.put(key, b"short")

    _, _, report = load_approximate_cache(store, shallow, TOKENS, drop=(20, 62), name=NAME, block_tokens=BLOCK)
    assert (report.exact, report.approximate) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_before_the_hole_is_exact_and_the_first_layer_behind_it_is_turned(
    store: blocking.BlockingStore, dtype: torch.dtype
) -> None:
    model = make_model(dtype)
    save(store, model, TOKENS)
    cache, left, report = load_approximate_cache(store, model, TOKENS, drop=(20, 62), name=NAME, block_tokens=BLOCK)
    whole, computed = prefill(model, TOKENS), prefill(model, left)
    for number in range(len(cache.layers)):
        for name in ("keys", "values"):
            have, kept, anew = (getattr(one.layers[number], name) for one in (cache, whole, computed))
            assert torch.equal(have[:, :, :20], kept[:, :, :20])
            if name == "values":
                assert torch.equal(have[:, :, 20:], kept[:, :, 62:96])
            if number == 0:
                off = (have - anew[:, :, : report.reused]).float()
                assert off.abs().max() <= (1e-4 if dtype is torch.float32 else 2e-2) * anew.float().abs().max()


def test_nothing_of_the_store_is_changed(store: blocking.BlockingStore, shallow: PreTrainedModel) -> None:
    save(store, shallow, TOKENS)
    before, _ = load_cache(store, shallow, TOKENS, name=NAME, block_tokens=BLOCK)
    load_approximate_cache(store, shallow, TOKENS, drop=(20, 62), name=NAME, block_tokens=BLOCK)
    after, _ = load_cache(store, shallow, TOKENS, name=NAME, block_tokens=BLOCK)
    assert torch.equal(keys_of(before), keys_of(after))


def test_an_approximate_cache_is_stored_under_a_salt_of_its_own_only(store: blocking.BlockingStore) -> None:
    model = make_model()
    save(store, model, TOKENS, salt="theirs")
    cache, left, report = load_approximate_cache(
        store, model, TOKENS, drop=(20, 62), name=NAME, block_tokens=BLOCK, salt="theirs"
    )
    assert report.approximate
    complete(model, cache, left)
    for one in (cache, copy.deepcopy(cache)):
        for salt in ("", "theirs"):
            with pytest.raises(ValueError, match="approximate"):
                save_cache(store, model, left, one, name=NAME, block_tokens=BLOCK, salt=salt)
    assert save_cache(store, model, left, cache, name=NAME, block_tokens=BLOCK, salt="approximate") == 56


def test_what_is_exact_is_stored_as_it_is(store: blocking.BlockingStore) -> None:
    model = make_model()
    save(store, model, TOKENS[:50])
    cache, left, report = load_approximate_cache(store, model, TOKENS, drop=(20, 62), name=NAME, block_tokens=BLOCK)
    assert (report.exact, report.approximate) == (20, 0)
    made, _ = complete(model, cache, left)
    assert save_cache(store, model, left, cache, name=NAME, block_tokens=BLOCK) == 56
    again, matched = load_cache(store, model, left, name=NAME, block_tokens=BLOCK)
    assert matched == 56
    torch.testing.assert_close(complete(model, again, left)[0], made)


@pytest.mark.parametrize("hole", [(3, 50), (0, 50), (20, 20), (50, 20), (20, 100), (20, 101), (-1, 7)])
def test_a_hole_without_a_start_or_an_end_is_refused(
    store: blocking.BlockingStore, shallow: PreTrainedModel, hole: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match="has to lie within 100 tokens, behind the first 4"):
        load_approximate_cache(store, shallow, TOKENS, drop=hole, name=NAME, block_tokens=BLOCK)


def test_a_window_over_the_hole_is_refused(store: blocking.BlockingStore) -> None:
    model = make_model(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=4096)
    with pytest.raises(ValueError, match="layer 1 is a DynamicSlidingWindowLayer"):
        load_approximate_cache(store, model, TOKENS, drop=(20, 62), name=NAME)


def test_a_turn_is_made_once_for_several_loads_of_its_model(
    store: blocking.BlockingStore, shallow: PreTrainedModel
) -> None:
    save(store, shallow, TOKENS)
    turn = Turn.of(shallow, longest=100)
    _, _, report = load_approximate_cache(
        store, shallow, TOKENS, drop=(20, 62), turn=turn, name=NAME, block_tokens=BLOCK
    )
    assert report.approximate == 34
    for model, tokens in ((make_model(), TOKENS), (shallow, [*TOKENS, 1])):
        with pytest.raises(ValueError, match=rf"Turn.of\(model, longest={len(tokens)}\)"):
            load_approximate_cache(store, model, tokens, drop=(20, 62), turn=turn, name=NAME)


def test_beyond_the_switch_of_a_dynamic_embedding_only_a_shorter_rest_is_loaded(store: blocking.BlockingStore) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = make_model(rope_parameters=rope, max_position_embeddings=80)
    save(store, model, TOKENS[:72])
    for hole, expected in (((20, 62), (20, 10)), ((20, 25), (0, 0))):
        _, _, report = load_approximate_cache(store, model, TOKENS, drop=hole, name=NAME, block_tokens=BLOCK)
        assert (report.exact, report.approximate) == expected
