"""What of a model's KV cache is stored, and what is told of one that cannot be."""

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

from infinistore.errors import ConfigError
from infinistore.integrations.vllm.settings import ConnectorSettings

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

BLOCK = 16


def layer(kind: str, **given: Any) -> Any:
    """One layer's part of the cache, as vLLM describes it."""
    import torch
    from vllm.v1 import kv_cache_interface

    sizes: dict[str, Any] = {"block_size": BLOCK}
    if kind == "MambaSpec":
        sizes |= {"shapes": ((2, 4),), "dtypes": (torch.float32,)}
    else:
        sizes |= {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return getattr(kv_cache_interface, kind)(**{**sizes, **given})


def together(*layers: Any) -> Any:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    specs = {f"layers.{number}.several": each for number, each in enumerate(layers)}
    return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)


def layout_of(*specs: Any, **given: Any) -> Any:
    """The layout of an engine with a group for each of these."""
    return engine_of(*specs, **given)[0]


def engine_of(
    *specs: Any, transferred: bool = True, parallel: dict[str, int] | None = None, layers: int = 1, shards: int = 0
) -> Any:
    """The layout of an engine, and vLLM's configuration of it and of its cache."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from infinistore.integrations.vllm.layout import Layout

    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **(parallel or {}),
    }
    model = SimpleNamespace(
        model="/models/made",
        revision=None,
        model_weights="",
        hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "made"}),
        model_class_overrides={},
        quantization=None,
        quantization_config=None,
        dtype="float32",
        multimodal_config=None,
    )
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}, indexer_kv_dtype="auto"),
        load_config=SimpleNamespace(load_format="dummy"),
        weight_transfer_config=None,
        speculative_config=None,
    )
    groups = [
        KVCacheGroupSpec(
            [f"layers.{number * layers + turn}.attn" for turn in range(layers)], spec, enable_kv_transfer=transferred
        )
        for number, spec in enumerate(specs)
    ]
    cache = KVCacheConfig(8, [], groups)
    settings = ConnectorSettings(url="infinistore://nowhere", namespace="made", shards=shards)  # there are no weights
    return Layout.of(config, cache, settings), config, cache


def window(tokens: int, **given: Any) -> Any:
    return layer("SlidingWindowSpec", sliding_window=tokens, **given)


NO_STATES = (
    "vLLM keeps no states at the ends of blocks; add --enable-prefix-caching --mamba-cache-mode align,"
    " if the model supports it"
)
CANNOT_BE_STORED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "a kind that is not known": (
        lambda: [layer("CrossAttentionSpec")],
        "it has layers of the kind CrossAttentionSpec, which the connector does not know",
    ),
    "one of several groups": (
        lambda: [layer("FullAttentionSpec"), layer("EncoderOnlyAttentionSpec")],
        "it has layers of the kind EncoderOnlyAttentionSpec, which the connector does not know",
    ),
    "a kind that is not known within a group": (
        lambda: [together(layer("FullAttentionSpec"), layer("CrossAttentionSpec"))],
        "it has layers of the kind CrossAttentionSpec, which the connector does not know",
    ),
    "layers of several kinds in a group": (
        lambda: [together(layer("FullAttentionSpec"), window(64))],
        "a group has layers of several kinds: FullAttentionSpec, SlidingWindowSpec",
    ),
    "windows of several sizes in a group": (
        lambda: [together(window(64), window(128))],
        "a group has layers of several kinds: SlidingWindowSpec",
    ),
    "chunks and windows in a group": (
        lambda: [together(window(64), layer("ChunkedLocalAttentionSpec", attention_chunk_size=64))],
        "a group has layers of several kinds: ChunkedLocalAttentionSpec, SlidingWindowSpec",
    ),
    "what vLLM takes from no cache": (
        lambda: [layer("SlidingWindowMLASpec", sliding_window=64, bounded_replay=True)],
        "vLLM cannot take a part of it from a cache",
    ),
    "states that are not kept": (
        lambda: [layer("FullAttentionSpec"), layer("MambaSpec")],
        NO_STATES,
    ),
    "the first of several obstacles": (
        lambda: [layer("MambaSpec"), layer("CrossAttentionSpec")],
        NO_STATES,
    ),
    "no KV cache": (list, "it has no KV cache"),
}


@pytest.mark.parametrize("what", list(CANNOT_BE_STORED))
def test_of_a_model_with_something_that_cannot_be_stored_nothing_is_and_it_is_told_why(what: str) -> None:
    specs, told = CANNOT_BE_STORED[what]
    layout = layout_of(*specs())

    assert (layout.groups, layout.obstacle) == ((), told)
    assert layout.names.prefix.startswith("vllm/made/")


def test_groups_that_vllm_transfers_nowhere_are_no_obstacle() -> None:
    assert layout_of(layer("CrossAttentionSpec"), transferred=False).obstacle == "it has no KV cache"


@pytest.mark.parametrize(
    ("kind", "given", "window_chunk_state"),
    [
        ("FullAttentionSpec", {}, (0, 0, False)),
        ("FullAttentionSpec", {"tokens_per_state": Fraction(1, 2)}, (0, 0, False)),
        ("MLAAttentionSpec", {}, (0, 0, False)),
        ("SlidingWindowSpec", {"sliding_window": 64}, (64, 0, False)),
        ("SlidingWindowSpec", {"sliding_window": 64, "extra_retained_tokens": 3}, (67, 0, False)),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 32}, (0, 32, False)),
        ("MambaSpec", {"mamba_cache_mode": "align"}, (0, 0, True)),
        ("MambaSpec", {"mamba_cache_mode": "all"}, (0, 0, True)),
    ],
)
def test_what_can_be_stored_is_a_group_of_its_kind(
    kind: str, given: dict[str, Any], window_chunk_state: tuple[int, int, bool]
) -> None:
    layout = layout_of(layer("FullAttentionSpec"), layer(kind, **given))

    assert layout.obstacle == ""
    (first, second) = layout.groups
    assert (first.index, first.layers, first.is_full) == (0, ("0",), True)
    assert (second.index, second.layers, second.block_tokens) == (1, ("1",), BLOCK)
    assert (second.window, second.chunk, second.state) == window_chunk_state
    assert second.offered == (given.get("mamba_cache_mode") == "align")


@pytest.mark.parametrize("flag", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_with_the_flags_to_leave_out(flag: str) -> None:
    with pytest.raises(ConfigError) as raised:
        layout_of(layer("FullAttentionSpec"), parallel={flag: 2})

    assert f"--{flag.replace('_', '-')}" in str(raised.value)
    assert "or without the connector" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "given", "parallel", "shards", "complaint"),
    [
        (
            "FullAttentionSpec",
            {},
            4,
            6,
            "must be a multiple of 4, the number of ranks with KV heads of their own, not",
        ),
        ("FullAttentionSpec", {}, 2, 8, "must divide the 4 KV heads of a layer, and be a multiple of 2, the number of"),
        (
            "FullAttentionSpec",
            {"num_head_slots": 4},
            1,
            2,
            "must be 1 or left out: layers of the kind FullAttentionSpec have no KV",
        ),
        ("MambaSpec", {"mamba_cache_mode": "all"}, 1, 2, "must be 1 or left out: layers of the kind MambaSpec have no"),
    ],
)
def test_shards_that_ranks_or_heads_do_not_make_are_refused(
    kind: str, given: dict[str, Any], parallel: int, shards: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config: shards " + complaint):
        layout_of(layer(kind, **given), parallel={"tensor_parallel_size": parallel}, shards=shards)


def test_ranks_of_engines_with_the_same_shards_have_the_same_names() -> None:
    """Two KV heads for a rank. A single rank, or two with four heads between them."""
    one = layout_of(layer("FullAttentionSpec", num_kv_heads=4), shards=4)
    two = layout_of(layer("FullAttentionSpec"), parallel={"tensor_parallel_size": 2}, shards=4)
    four = layout_of(layer("FullAttentionSpec", num_kv_heads=1), parallel={"tensor_parallel_size": 4})

    assert one.names == two.names == four.names
    assert [layout.shards_of(layout.ranks - 1) for layout in (one, two, four)] == [range(4), range(2, 4), range(3, 4)]
    assert layout_of(layer("FullAttentionSpec", num_kv_heads=4)).names.prefix != one.names.prefix


LAYER_TOKEN = 2 * 2 * 8 * 4
"""Bytes of a token in a layer: a key and a value of two heads."""


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 4}, 4),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
    ],
)
def test_routers_are_told_how_large_a_token_is_in_all_layers_and_ranks(parallel: dict[str, int], ranks: int) -> None:
    from infinistore.integrations.vllm.layout import announced_blocks

    layout, config, cache = engine_of(layer("FullAttentionSpec"), layers=3, parallel=parallel)
    blocks = announced_blocks(layout, config, cache)

    assert blocks is not None
    assert (blocks.names, blocks.names.facts) == (layout.names, layout.names.facts)
    assert (blocks.block_tokens, blocks.hash_tokens) == (BLOCK, BLOCK)
    assert blocks.bytes_per_token == 3 * LAYER_TOKEN * ranks


def test_of_a_model_with_several_kinds_of_layers_they_are_told_those_that_attend_to_all_tokens() -> None:
    from infinistore.integrations.vllm.announcements import AnnouncedBlocks
    from infinistore.integrations.vllm.layout import announced_blocks, announced_engine

    full = layer("FullAttentionSpec", block_size=4 * BLOCK)
    layout, config, cache = engine_of(window(64), full, layer("FullAttentionSpec"), layers=2)
    blocks = announced_blocks(layout, config, cache)

    assert blocks is not None
    assert (blocks.names.layers, blocks.block_tokens, blocks.hash_tokens) == (("2", "3"), 4 * BLOCK, BLOCK)
    assert blocks.bytes_per_token == 6 * LAYER_TOKEN  # as if windows were kept
    assert AnnouncedBlocks.read(blocks.write()) == blocks
    assert announced_engine("http://h", layout.names, cache).cache_tokens == 8 * 4 * BLOCK


def test_routers_are_told_of_no_blocks_if_none_are_stored_of_layers_that_attend_to_all_tokens() -> None:
    from infinistore.integrations.vllm.layout import announced_blocks, announced_engine

    for specs, tokens in (([window(64)], 8 * BLOCK), ([layer("CrossAttentionSpec")], 8 * BLOCK), ([], 0)):
        layout, config, cache = engine_of(*specs)
        assert announced_blocks(layout, config, cache) is None
        assert announced_engine("http://h", layout.names, cache).cache_tokens == tokens


def test_a_group_of_layers_of_several_sizes_has_the_bytes_of_all_of_them() -> None:
    from infinistore.integrations.vllm.layout import announced_blocks

    several = together(layer("FullAttentionSpec"), layer("FullAttentionSpec", head_size=24))
    blocks = announced_blocks(*engine_of(several, layers=2))

    assert blocks is not None
    assert blocks.bytes_per_token == (1 + 3) * LAYER_TOKEN
