"""The parts of the demonstration that need no process: layout, names, tokens, content,
what fits.
"""

import hashlib
import re
import struct
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from infinistore import blocking
from infinistore.demo.display import Display
from infinistore.demo.prompts import (
    SAMPLE_TEXT,
    VOCABULARY_SIZE,
    DemoError,
    DemoSettings,
    KVLayout,
    Prompt,
    block_content,
    block_key,
    block_keys,
    chunk_names,
    other_prompts,
    pieces,
    token_ids,
    tokens_that_fit,
    two_prompts,
)
from infinistore.demo.workers import Worker, gigabytes_per_s
from infinistore.errors import StoreUnavailable
from infinistore.sizes import GIB, KIB, MIB
from infinistore.statistics import DiskStatistics, DiskTierStatistics, Stats

SMALL = KVLayout(layers=3, chunk_tokens=4)

# A small alphabet and repeated beginnings, so that common prefixes of every length turn
# up.
token_lists = st.lists(st.integers(0, 2), max_size=24)


def test_the_default_layout_has_the_sizes_of_qwen2_5_7b() -> None:
    layout = KVLayout()

    assert layout.block_bytes == 512 * KIB
    assert layout.chunk_bytes == 14 * MIB


@given(beginning=token_lists, one=token_lists, other=token_lists)
def test_names_are_equal_exactly_as_far_as_the_prompts_are(
    beginning: list[int], one: list[int], other: list[int]
) -> None:
    prompt_a, prompt_b = beginning + one, beginning + other
    common = 0
    while common < min(len(prompt_a), len(prompt_b)) and prompt_a[common] == prompt_b[common]:
        common += 1

    names_a, names_b = chunk_names(SMALL, prompt_a), chunk_names(SMALL, prompt_b)

    shared = common // SMALL.chunk_tokens
    assert names_a[:shared] == names_b[:shared]
    assert not set(names_a[shared:]) & set(names_b[shared:])
    assert len(names_a) == len(set(names_a)) == len(prompt_a) // SMALL.chunk_tokens


def test_the_same_tokens_have_other_names_in_another_layout() -> None:
    tokens = list(range(64))
    layouts = [KVLayout(), KVLayout(model="other"), KVLayout(layers=2), KVLayout(kv_heads=8), KVLayout(chunk_tokens=32)]

    names = [name for layout in layouts for name in chunk_names(layout, tokens)]

    assert len(names) == len(set(names))


def test_keys_go_chunk_by_chunk_and_layer_by_layer() -> None:
    assert block_keys(SMALL, [b"\x01", b"\x02"]) == [
        "demo/01/L00",
        "demo/01/L01",
        "demo/01/L02",
        "demo/02/L00",
        "demo/02/L01",
        "demo/02/L02",
    ]
    assert block_key(b"\xff", 12) == "demo/ff/L12"


@given(text=st.text())
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text


@given(text=st.text())
def test_every_piece_is_a_token_of_the_vocabulary(text: str) -> None:
    tokens = token_ids(text)

    assert len(tokens) == len(pieces(text))
    assert all(0 <= token < VOCABULARY_SIZE for token in tokens)


def test_words_keep_their_space_and_long_ones_are_cut() -> None:
    assert pieces("The cache, 2048 bytes\n\n  disaggregation") == [
        "The", " cache", ",", " 204", "8", " bytes", "\n\n ", " disaggre", "gation",
    ]  # fmt: skip


def test_token_ids_are_the_same_on_every_machine() -> None:
    assert token_ids("a KV cache") == [147795, 32303, 110792]


def test_the_shipped_text_is_a_prompt_of_several_thousand_tokens() -> None:
    text = SAMPLE_TEXT.read_text(encoding="utf-8")

    assert text.isascii()
    assert 3000 <= len(token_ids(text)) <= 6000


@given(tokens=st.integers(1, 2000))
def test_the_second_prompt_is_the_first_with_something_put_in_after_two_thirds(tokens: int) -> None:
    prompt_a, prompt_b = two_prompts(list(range(tokens)))

    place = 2 * tokens // 3
    assert prompt_a.tokens[:place] == prompt_b.tokens[:place]
    assert prompt_a.tokens[place:] == prompt_b.tokens[len(prompt_b.tokens) - (tokens - place) :]
    assert len(prompt_b.tokens) > tokens


def test_content_is_the_same_on_every_machine() -> None:
    assert (
        hashlib.sha256(block_content(KVLayout(), b"name", 7)).hexdigest()
        == "2cf5fb902ef6372c51c5828501d6562cbaf2d97c4403dd08b23ac92bd7d09ebd"
    )


@given(
    names=st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=2, unique=True), layer=st.integers(0, 27)
)
def test_content_differs_from_chunk_to_chunk_and_from_layer_to_layer(names: list[bytes], layer: int) -> None:
    block = block_content(SMALL, names[0], layer)

    assert len(block) == SMALL.block_bytes
    assert block == block_content(SMALL, names[0], layer)
    assert block != block_content(SMALL, names[1], layer)
    assert block != block_content(SMALL, names[0], layer + 1)


def test_rows_of_a_block_differ_so_that_a_shifted_block_is_noticed() -> None:
    block = block_content(KVLayout(), b"name", 0)
    rows = {block[start : start + KIB] for start in range(0, len(block), KIB)}

    assert len(rows) == 512  # one of K and one of V for each of 256 tokens


def test_a_block_longer_than_the_tape_is_whole() -> None:
    layout = KVLayout(chunk_tokens=4096)

    assert len(block_content(layout, b"name", 0)) == layout.block_bytes == 8 * MIB


def test_content_is_small_finite_bfloat16_numbers() -> None:
    block = block_content(SMALL, b"name", 0)
    # A bfloat16 is the upper half of a float32.
    numbers = [struct.unpack("<f", b"\0\0" + block[place : place + 2])[0] for place in range(0, len(block), 2)]

    assert all(2**-5 <= abs(number) < 2 for number in numbers)
    assert min(numbers) < 0 < max(numbers)


@given(tokens=st.integers(256, 200_000), capacity_mib=st.integers(64, 4096))
def test_both_prompts_fit_into_the_pool_together(tokens: int, capacity_mib: int) -> None:
    layout = KVLayout()
    used = tokens_that_fit(layout, tokens, capacity_mib * MIB)

    prompt_a, prompt_b = two_prompts(list(range(used)))
    stored = set(chunk_names(layout, prompt_a.tokens)) | set(chunk_names(layout, prompt_b.tokens))
    assert 256 <= used <= min(tokens, 32_768)
    assert len(stored) * layout.chunk_bytes <= 0.75 * capacity_mib * MIB


@given(tokens=token_lists.filter(bool), capacity_mib=st.integers(1, 64))
def test_other_prompts_fill_the_pool_and_share_no_block(tokens: list[int], capacity_mib: int) -> None:
    layout = KVLayout(layers=3, chunk_tokens=64)
    prompts = [prompt.tokens for prompt in other_prompts(layout, tokens, capacity_mib * MIB)]

    names = [name for prompt in prompts for name in chunk_names(layout, prompt)]
    assert max(map(len, prompts)) <= 32_768
    assert len(set(names)) * layout.chunk_footprint_bytes >= capacity_mib * MIB
    assert not set(names) & set(chunk_names(layout, tokens * 64))


def test_a_text_that_fits_is_used_whole() -> None:
    assert tokens_that_fit(KVLayout(), 4004, GIB) == 4004


@pytest.mark.parametrize(
    ("tokens", "capacity_bytes", "remedy"), [(255, GIB, "--input"), (4000, 8 * MIB, "--pool-size")]
)
def test_what_cannot_work_is_refused_with_a_remedy(tokens: int, capacity_bytes: int, remedy: str) -> None:
    with pytest.raises(DemoError, match=remedy):
        tokens_that_fit(KVLayout(), tokens, capacity_bytes)


def usage_of(used_bytes: int, capacity_bytes: int, keys: int) -> Stats:
    """The figures of a server whose pool and disk are half full."""
    with blocking.open_store(pool_bytes=MIB) as store:
        found = store.stats()
    pool = attrs.evolve(found.store, used_bytes=used_bytes, capacity_bytes=capacity_bytes, keys=keys)
    figures: dict[str, Any] = {field.name: 0 for field in attrs.fields(DiskStatistics)}
    disk = DiskStatistics(**figures | {"used_bytes": 2 * used_bytes, "capacity_bytes": 2 * capacity_bytes})
    figures = {field.name: 0 for field in attrs.fields(DiskTierStatistics)}
    return attrs.evolve(found, store=pool, disk=DiskTierStatistics(**figures | {"disks": [disk]}))


def test_a_terminal_shows_layers_and_pool_while_the_work_goes_on() -> None:
    console = Console(file=StringIO(), force_terminal=True, width=100)
    display = Display(console)
    with display.bars:
        display.plan(DemoSettings(layout=SMALL), "a text", 9, 8, 64 * MIB)
        display.prompt_started(Prompt("A", "a prompt", [1] * 8))
        for who, work in (("prefill", "loads"), ("prefill", "computes"), ("prefill", "stores"), ("decode", "loads")):
            display.event(who, {"event": "layer", "work": work, "layer": 1, "gb_per_s": 2.0})
        display.usage(usage_of(32 * MIB, 64 * MIB, 12))
        with console.capture() as shown:
            console.print(display.bars)
        display.prompt_started(Prompt("B", "another", [1] * 8))

    text = Text.from_ansi(shown.get()).plain
    assert re.search(r"server +holds .* 32 MiB in 12 blocks", text)
    assert re.search(r"server +on disk .* 64 MiB of 128 MiB", text)
    for bar in ("prefill +loads", "prefill +computes", "prefill +stores", "decode +loads"):
        assert re.search(rf"{bar} .* layer +2 of 3, 2.0 GB/s", text)
    assert [bar.description for bar in display.bars.tasks] == ["holds", "on disk"]  # those of a prompt begin again


def test_a_worker_begins_once_its_own_view_of_the_cluster_is_that_of_the_order() -> None:
    views = [["node-1", "node-2"], ["node-1"], ["node-1", "node-3"]]
    store = Mock(spec=blocking.BlockingStore)
    store.stats.side_effect = [
        SimpleNamespace(cluster=SimpleNamespace(nodes=[SimpleNamespace(id=name, state="serving") for name in view]))
        for view in views
    ]
    store.match_prefix.side_effect = StoreUnavailable("the first call of its work")
    worker = Worker("decode", store, SMALL, tokens_per_s=1.0)

    with pytest.raises(StoreUnavailable):
        worker.work("A", [1] * 8, may_miss=False, nodes={"node-2": False, "node-3": True})

    assert store.stats.call_count == len(views)


def test_a_rate_is_in_units_of_a_thousand_million_bytes() -> None:
    assert gigabytes_per_s(3_000_000_000, 2.0) == 1.5
    assert gigabytes_per_s(0, 2.0) is None
