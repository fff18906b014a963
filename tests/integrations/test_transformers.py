"""A real model of transformers, with random weights, goes on after a stored prefix as
if it had computed it.
"""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

from infinistore import blocking
from infinistore.integrations.transformers import load_cache, save_cache
from tests.bad_days.servers import running_server_process
from tests.cluster_client.clusters import Cluster, Member
from tests.documentation.blocks import programs
from tests.integrations.disks import leave_on_disk
from tests.integrations.owners import Owners
from tests.integrations.small_llama import NAME, VOCABULARY, complete, make_model

MIB = 1024 * 1024
LOG = "infinistore.integrations.transformers"
TOKENS = [(7 * i * i + 3 * i) % VOCABULARY for i in range(100)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=8 * MIB, minimal_allocate_bytes=1024) as store:
        yield store


def prefill(model: PreTrainedModel, tokens: list[int]) -> DynamicCache:
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), use_cache=True).cache
    assert isinstance(cache, DynamicCache)
    return cache


def tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    **DYNAMIC,
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}


def save(store: blocking.BlockingStore, model: PreTrainedModel, tokens: list[int], **options: Any) -> int:
    return save_cache(store, model, tokens, prefill(model, tokens), name=NAME, block_tokens=8, **options)


def load(
    store: blocking.BlockingStore, model: PreTrainedModel, tokens: list[int], **options: Any
) -> tuple[DynamicCache, int]:
    return load_cache(store, model, tokens, name=NAME, block_tokens=8, **options)


@pytest.mark.parametrize(
    ("dtype", "batch_bytes"), [(torch.float32, 1), (torch.bfloat16, 20_000), (torch.float16, 64 * MIB)]
)
def test_every_layer_comes_back_bit_by_bit(
    store: blocking.BlockingStore, dtype: torch.dtype, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinistore.integrations.transformers._BATCH_BYTES", batch_bytes)
    model = make_model(dtype)
    computed = prefill(model, TOKENS)

    assert save(store, model, TOKENS) == 96
    loaded, matched = load(store, model, TOKENS)

    assert matched == loaded.get_seq_length() == 96
    for ours, theirs in zip(tensors(computed), tensors(loaded), strict=True):
        assert torch.equal(ours[:, :, :96], theirs)


@pytest.mark.nightly
@pytest.mark.process
def test_another_process_goes_on_with_the_same_tokens_and_computes_only_the_rest(model: PreTrainedModel) -> None:
    cold_logits, cold = complete(model, DynamicCache(config=model.config), TOKENS)
    with running_server_process() as server:

        def run() -> list[int]:
            command = [sys.executable, "-P", str(Path(__file__).with_name("small_llama.py")), server.url]
            done = subprocess.run([*command, *map(str, TOKENS)], capture_output=True, text=True, check=True)
            return list(map(int, done.stdout.split()))

        assert run() == [0, *cold]
        with blocking.open_store(server.url) as store:
            cache, matched = load(store, model, TOKENS)
        warm_logits, warm = complete(model, cache, TOKENS)
        assert matched == 96
        assert warm == cold
        torch.testing.assert_close(warm_logits, cold_logits)
        assert run() == [96, *cold]


def test_the_longest_prefix_is_loaded_and_the_last_token_is_always_left(
    store: blocking.BlockingStore, model: PreTrainedModel
) -> None:
    save(store, model, TOKENS)

    assert load(store, model, [*TOKENS[:50], 1, 2, 3])[1] == 48
    assert load(store, model, TOKENS[:48])[1] == 40
    assert load(store, model, [1, *TOKENS])[1] == 0
    assert load(store, model, [])[1] == 0


def test_a_prefix_that_is_on_disk_is_read_ahead_of_the_batches_that_load_it(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_ahead: list[str] = []
    prefetch = blocking.BlockingStore.prefetch

    def recorded(store: blocking.BlockingStore, keys: list[str]) -> object:
        read_ahead.extend(keys)
        return prefetch(store, keys)

    monkeypatch.setattr(blocking.BlockingStore, "prefetch", recorded)
    disk = f"{tmp_path / 'disk'}:64MiB"
    with blocking.open_store(pool_bytes=8 * MIB, disk=disk, disk_admission="eager") as store:
        stored = tensors(prefill(model, TOKENS))
        save(store, model, TOKENS)
        keys = leave_on_disk(store)

        for _ in range(2):
            cache, matched = load(store, model, [*TOKENS, 1])
            assert matched == 96
            for got, expected in zip(tensors(cache), stored, strict=True):
                assert torch.equal(got, expected[:, :, :96])

        assert sorted(read_ahead) == keys  # once: the second time they are in memory


def test_a_longer_sequence_adds_only_its_own_blocks(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    save(store, model, TOKENS[:40])
    before = store.keys()

    assert save(store, model, TOKENS) == 96

    assert (len(before), len(store.keys())) == (5, 12)
    assert set(before) < set(store.keys())


@pytest.mark.parametrize(("ttl_s", "there"), [(None, True), (3600.0, True), (1e-6, False)])
def test_blocks_end_after_the_time_that_is_given(
    store: blocking.BlockingStore, model: PreTrainedModel, ttl_s: float | None, there: bool
) -> None:
    save_cache(store, model, TOKENS, prefill(model, TOKENS), name=NAME, block_tokens=8, ttl_s=ttl_s)
    assert bool(store.keys()) == there


def test_tokens_may_be_a_tensor_of_one_row(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    rows = torch.tensor([TOKENS])
    save_cache(store, model, rows, prefill(model, TOKENS), name=NAME, block_tokens=8)

    assert load_cache(store, model, rows[0], name=NAME, block_tokens=8)[1] == 96


def test_keys_of_another_model_dtype_salt_or_block_size_are_not_found(
    store: blocking.BlockingStore, model: PreTrainedModel
) -> None:
    save(store, model, TOKENS, salt="tenant")

    assert load(store, model, TOKENS, salt="tenant")[1] == 96
    assert load(store, model, TOKENS)[1] == 0
    assert load(store, make_model(torch.bfloat16), TOKENS, salt="tenant")[1] == 0
    assert load(store, make_model(rope_theta=500), TOKENS, salt="tenant")[1] == 0
    assert load_cache(store, model, TOKENS, name="another", salt="tenant", block_tokens=8)[1] == 0
    assert load_cache(store, model, TOKENS, name=NAME, salt="tenant", block_tokens=16)[1] == 0


def test_a_block_of_another_size_ends_the_prefix(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    save(store, model, TOKENS[:16])
    first_of_two = store.keys()
    save(store, model, TOKENS)
    (third, *_) = [key for key in store.keys() if key not in first_of_two]  # noqa: SIM118 - a store, not a mapping
    store.put(third, b"short")

    cache, matched = load(store, model, TOKENS)

    assert 16 <= matched < 96
    assert complete(model, cache, TOKENS)[1] == complete(model, DynamicCache(config=model.config), TOKENS)[1]


def test_a_lost_store_is_a_miss_and_is_logged(
    model: PreTrainedModel, own_server: Member, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.open_store(f"tcp://{own_server.address}") as store:
        own_server.stop()
        with caplog.at_level(logging.WARNING, logger=LOG):
            cache, matched = load(store, model, TOKENS)
            assert save(store, model, TOKENS) == 0
    assert (matched, cache.get_seq_length()) == (0, 0)
    assert [record.levelname for record in caplog.records if record.name == LOG] == ["WARNING"] * 2


def test_in_a_cluster_a_group_is_on_one_server_and_a_lost_one_leaves_what_is_before_its_groups(
    model: PreTrainedModel, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    stored, owners = tensors(prefill(model, TOKENS)), Owners(cluster)
    with blocking.open_store(cluster.url()) as writer, blocking.open_store(cluster.url()) as reader:
        for end in range(16, 97, 16):
            assert save(writer, model, TOKENS[:end], group_tokens=16) == end
            assert len(owners.note()) == 2
        cache, matched = load(reader, model, TOKENS, group_tokens=16)
        assert matched == 96
        for got, expected in zip(tensors(cache), stored, strict=True):
            assert torch.equal(got, expected[:, :, :96])
        assert load(reader, model, TOKENS, group_tokens=32)[1] == 0

        lost = owners.stop_one()
        for _ in range(2):
            cache, matched = load(reader, model, TOKENS, group_tokens=16)
            assert matched == 16 * lost[0]
        assert complete(model, cache, TOKENS)[1] == complete(model, DynamicCache(config=model.config), TOKENS)[1]
        assert "infinistore.integrations" not in caplog.text
        assert save(reader, model, TOKENS, group_tokens=16) == 16 * lost[0]
    assert "the KV cache was not stored in full" in caplog.text


def test_a_store_smaller_than_the_prompt_keeps_what_it_can(model: PreTrainedModel) -> None:
    with blocking.open_store(pool_bytes=16 * 1024, minimal_allocate_bytes=1024) as store:
        assert save(store, model, TOKENS) < 96
        cache, _ = load(store, model, TOKENS)
        assert complete(model, cache, TOKENS)[1] == complete(model, DynamicCache(config=model.config), TOKENS)[1]


def test_a_model_without_a_name_is_refused(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="pass name="):
        load_cache(store, model, TOKENS)


def test_a_batch_is_refused(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    with torch.no_grad():
        cache = model(torch.tensor([TOKENS, TOKENS]), use_cache=True).cache
    with pytest.raises(ValueError, match="one by one"):
        save_cache(store, model, [TOKENS, TOKENS], cache, name=NAME)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one sequence"):
        save_cache(store, model, TOKENS, cache, name=NAME)


def test_the_cache_of_another_model_is_refused(store: blocking.BlockingStore, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="layers"):
        save_cache(store, model, TOKENS, prefill(make_model(num_hidden_layers=2), TOKENS), name=NAME)
    with pytest.raises(ValueError, match=r"\[1, 2, tokens, 8\]"):
        save_cache(store, model, TOKENS, prefill(make_model(num_key_value_heads=4), TOKENS), name=NAME)


def test_a_model_that_forgets_what_left_its_window_is_refused(store: blocking.BlockingStore) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MistralConfig(
        vocab_size=VOCABULARY, sliding_window=16, num_attention_heads=4, num_key_value_heads=2, **sizes
    )
    windowed = MistralForCausalLM(config)

    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        load_cache(store, windowed, TOKENS, name=NAME)


def test_tokens_that_stand_for_images_need_a_salt(store: blocking.BlockingStore) -> None:
    model = make_model()
    model.config.image_token_id = TOKENS[3]

    with pytest.raises(ValueError, match="pass salt="):
        save(store, model, TOKENS)
    assert save(store, model, TOKENS, salt="hash of the image") == 96


def test_the_program_of_the_page_runs(
    model: PreTrainedModel, own_server: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "name_or_path", NAME)  # as of a model that was loaded
    (code,) = (one.code for one in programs("docs/transformers.md") if "load_cache" in one.code)
    code = code.replace("infinistore://127.0.0.1:22345", f"tcp://{own_server.address}")
    found: list[dict[str, Any]] = [{"model": model, "token_ids": TOKENS} for _ in range(2)]
    for names in found:
        exec(code, names)
    assert found[0]["matched"] == 0
    assert found[1]["matched"] > 0
    assert torch.equal(found[0]["output"].logits[:, -1], found[1]["output"].logits[:, -1])


@pytest.mark.parametrize(
    ("parameters", "longest", "shared"),
    [(DYNAMIC, 64, 63), (LONGROPE, 256, 64), ({"rope_type": "default", "rope_theta": 1e4}, 64, 99)],
)
def test_keys_that_depend_on_the_length_of_the_sequence_are_not_shared_with_another_length(
    parameters: dict[str, Any], longest: int, shared: int, store: blocking.BlockingStore
) -> None:
    rotary = make_model(max_position_embeddings=longest, rope_parameters=parameters)
    assert save(store, rotary, TOKENS) == (96 if shared == 99 else 0)
    for length in (shared + 1, shared, 40):
        tokens = TOKENS[:length]
        save(store, rotary, tokens)
        cache, matched = load(store, rotary, tokens)
        assert bool(matched) == (length <= shared or shared == 99)
        if matched:
            for restored, expected in zip(tensors(cache), tensors(prefill(rotary, tokens)), strict=True):
                assert torch.equal(restored, expected[:, :, :matched])
    assert load(store, rotary, TOKENS)[1] == (96 if shared == 99 else 0)
