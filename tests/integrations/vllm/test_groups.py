"""Models whose layers are of several kinds, without vLLM: what each kind needs, what of
it is stored, found and read, and what becomes of a prompt of which parts are missing.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.errors import StoreUnavailable
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.blocks import BlockNames, LayerGroup, LayerGroups, Step, block_names
from infinistore.integrations.vllm.scheduler import SchedulerSide
from infinistore.integrations.vllm.worker import WorkerSide

from .halves import MadeRequest, loadable, make_scheduler, make_worker

FULL = LayerGroup(("0", "1"), 4)
WINDOW = LayerGroup(("2", "3"), 4, 1, window=6)
COARSE = LayerGroup(("2", "3"), 8, 1, window=6)
CHUNK = LayerGroup(("2", "3"), 4, 1, chunk=12)
STATE = LayerGroup(("2", "3"), 4, 1, state=True)
OFFERED = LayerGroup(("2", "3"), 4, 1, state=True, offered=True)
KINDS = [WINDOW, COARSE, CHUNK, STATE, OFFERED]
LAYERS = {label: label for label in "0123"}
BLOCKS = 64
PROMPT = list(range(100, 139))  # nine full blocks and three tokens


def names_of() -> BlockNames:
    return block_names({}, model="hybrid", namespace="", layers=tuple(LAYERS), shards=1)


@pytest.mark.parametrize(
    ("group", "tokens", "needed"),
    [
        (FULL, 20, [0, 1, 2, 3, 4]),
        (WINDOW, 4, [0]),
        (WINDOW, 20, [3, 4]),  # the next token sees five before it: 15 to 19
        (attrs.evolve(WINDOW, window=5), 20, [4]),
        (attrs.evolve(WINDOW, window=1), 20, []),
        (CHUNK, 20, [3, 4]),
        (CHUNK, 24, []),
        (STATE, 20, [4]),
        (STATE, 0, []),
    ],
)
def test_a_group_needs_what_the_next_token_sees(group: LayerGroup, tokens: int, needed: list[int]) -> None:
    assert list(group.needed(tokens)) == needed


def test_blocks_of_several_sizes_have_hashes_in_common() -> None:
    groups = LayerGroups([FULL, COARSE])
    assert (groups.hash_tokens, groups.alignment) == (4, 8)
    assert (LayerGroups().hash_tokens, LayerGroups().alignment) == (0, 1)


class Engine:
    """Both halves over a KV cache, and as much of vLLM as a prompt needs: a "model"
    fills each block with numbers that depend on all tokens up to its end.
    """

    def __init__(self, store: blocking.BlockingStore, groups: Sequence[LayerGroup], **options: Any) -> None:
        self.groups = groups
        self.scheduler: SchedulerSide = make_scheduler(store, names_of(), groups=groups, **options)
        self.cache = {name: torch.zeros(BLOCKS, 4) for name in LAYERS}
        self.worker: WorkerSide = make_worker(store, self.cache, names_of(), groups=groups, layers=LAYERS)
        self.failed: set[str] = set()

    def run(self, tokens: list[int], *, chunk: int = 1000, computed: int = 0) -> int:
        """Compute a prompt, and check that what was read is what is computed. Returns
        how many tokens were not computed.
        """
        self.request = request = MadeRequest.of(tokens)
        tables = tuple(range(1 + 20 * place, 21 + 20 * place) for place in range(len(self.groups)))
        loaded = loadable(self.scheduler, request, computed)
        self.scheduler.allocated(request, tables, loaded)
        step = self.scheduler.plan({}, (), lambda _: tables)
        if step.loads:
            self._forward(step)
            if self._wait_for_load():
                return -1
        cached = request.num_computed_tokens = computed + loaded
        if loaded:
            self._check(tokens, cached, computed, tables)
        while request.num_computed_tokens < len(tokens):
            count = min(chunk, len(tokens) - request.num_computed_tokens)
            end = request.num_computed_tokens + count
            if any(group.offered for group in self.groups) and end // 4 * 4 > request.num_computed_tokens:
                count = end // 4 * 4 - request.num_computed_tokens  # as vLLM does
                end = request.num_computed_tokens + count
            self._compute(tokens, end, tables)
            offers = [
                (group.index, tables[place][end // 4 - 1], end)
                for place, group in enumerate(self.groups)
                if group.offered and end % 4 == 0
            ]
            left = self._left_behind(tables, request.num_computed_tokens)
            step = self.scheduler.plan({"r": count}, (), lambda _, left=left: left, {"r": offers})  # type: ignore[misc]
            request.num_computed_tokens = end
            self._forward(step)
            self._overwrite_windows(tables)
        saving = self.scheduler.finished(request)
        self.worker.begin(Step())
        while saving and "r" not in self.worker.poll(["r"])[0]:
            pass
        return cached

    def close(self) -> None:
        self.worker.close()

    def _forward(self, step: Step) -> None:
        self.worker.begin(attrs.evolve(step, computes=True))
        for label in self.groups[0].layers:
            self.worker.save_layer(label)
        self.worker.start_loads()
        self.worker.end_saves()

    def _wait_for_load(self) -> bool:
        while not self.worker.poll(())[1]:
            pass
        assert self.worker.take_failed_blocks() == set()
        failed = self.worker.take_failed_requests()
        self.scheduler.loads_ended(["r"], (), failed)
        return bool(failed)

    def _value(self, tokens: list[int], end: int, label: str) -> torch.Tensor:
        torch.manual_seed(hash((tuple(tokens[:end]), label)) % 2**31)
        return torch.rand(4)

    def _compute(self, tokens: list[int], end: int, tables: Sequence[Sequence[int]]) -> None:
        for place, group in enumerate(self.groups):
            for number in range(end // group.block_tokens):
                for label in group.layers:
                    value = self._value(tokens, (number + 1) * group.block_tokens, label)
                    self.cache[label][tables[place][number]] = value

    def _check(self, tokens: list[int], cached: int, computed: int, tables: Sequence[Sequence[int]]) -> None:
        for place, group in enumerate(self.groups):
            for number in group.needed(cached):
                if number >= computed // group.block_tokens:
                    for label in group.layers:
                        expected = self._value(tokens, (number + 1) * group.block_tokens, label)
                        assert torch.equal(self.cache[label][tables[place][number]], expected)

    def _left_behind(self, tables: Sequence[Sequence[int]], computed: int) -> list[list[int]]:
        """Return the tables with 0 for what vLLM has given to others already."""
        return [
            [
                0 if not group.is_full and number < computed // group.block_tokens else block
                for number, block in enumerate(tables[place])
            ]
            if not group.window
            else [
                0 if number < next(iter(group.needed(computed // 8 * 8)), 0) else block
                for number, block in enumerate(tables[place])
            ]
            for place, group in enumerate(self.groups)
        ]

    def _overwrite_windows(self, tables: Sequence[Sequence[int]]) -> None:
        """Another request gets the blocks at once, while they are being written."""
        for place, group in enumerate(self.groups):
            if not group.is_full:
                for label in group.layers:
                    self.cache[label][list(tables[place])] = -1.0


@pytest.mark.parametrize(
    ("group", "chunk"),
    [
        *((group, 8) for group in KINDS),
        *((group, 1000) for group in (WINDOW, STATE)),
        *(pytest.param(group, 1000, marks=pytest.mark.nightly) for group in (COARSE, CHUNK, OFFERED)),
    ],
)
def test_a_prompt_is_read_as_it_was_computed(store: blocking.BlockingStore, group: LayerGroup, chunk: int) -> None:
    first, second = Engine(store, (FULL, group)), Engine(store, (FULL, group))
    end = len(PROMPT) // LayerGroups((FULL, group)).alignment * LayerGroups((FULL, group)).alignment

    assert first.run(PROMPT, chunk=chunk) == 0
    assert second.run(PROMPT) == end
    assert second.run([*PROMPT, *range(20)]) == end  # a conversation that goes on
    first.close()
    second.close()


def test_of_a_window_only_what_is_needed_is_stored(store: blocking.BlockingStore) -> None:
    engine = Engine(store, (FULL, WINDOW), boundary_tokens=16)
    engine.run(PROMPT)
    stored = [key.rsplit("/", 3)[1] for key in store.keys() if key.endswith("/2")]  # noqa: SIM118 - no mapping

    hashes = PrefixChain(4, group_blocks=names_of().group_blocks).extend(PROMPT)
    # the two blocks before 16, 32 and 36 tokens
    assert sorted(stored) == sorted(hashes[number] for number in (2, 3, 6, 7, 8))
    engine.close()


@pytest.mark.parametrize("group", [WINDOW, STATE, OFFERED])
def test_the_last_token_of_a_prompt_is_always_computed(store: blocking.BlockingStore, group: LayerGroup) -> None:
    """It is computed again, with the window or the state that is there before it."""
    engine = Engine(store, (FULL, group), boundary_tokens=4)
    engine.run(PROMPT[:36], chunk=4)

    assert engine.run(PROMPT[:36]) == 32
    assert engine.run(PROMPT[:37]) == 36
    engine.close()


def test_prompts_that_part_find_the_windows_before_that_place_the_third_time(store: blocking.BlockingStore) -> None:
    engine = Engine(store, (FULL, WINDOW))

    assert [engine.run([*PROMPT[:24], *range(start, start + 15)]) for start in (0, 20, 40)] == [0, 0, 24]
    engine.close()


def test_where_a_request_departs_is_told(store: blocking.BlockingStore) -> None:
    engine = Engine(store, (FULL, OFFERED))
    engine.run(PROMPT)
    request = MadeRequest.of([*PROMPT[:24], *range(15)])

    assert engine.scheduler.loadable_tokens(request, 0) == 0
    assert engine.scheduler.departs_after(request) == 24
    assert engine.scheduler.departs_after(MadeRequest.of([1], "unknown")) == 0
    engine.close()


def test_a_state_is_stored_where_vllm_completes_it_and_a_hit_ends_there(store: blocking.BlockingStore) -> None:
    engine = Engine(store, (FULL, OFFERED))
    engine.run(PROMPT, chunk=16)  # after 16, 32 and 36 tokens

    assert engine.run(PROMPT[:30]) == 16
    assert engine.run(PROMPT[:35]) == 32
    engine.close()


@pytest.mark.timeout(600)  # of a busy machine
@settings(max_examples=10)
@given(st.data(), st.sampled_from(KINDS), st.integers(4, 40))
def test_whatever_is_evicted_what_is_read_is_right_and_the_rest_is_written_again(
    data: st.DataObject, group: LayerGroup, chunk: int
) -> None:
    with (
        blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store,
        closing(Engine(store, (FULL, group), boundary_tokens=8)) as engine,  # also where a draw ends the example
    ):
        best = 0
        engine.run(PROMPT, chunk=chunk)
        keys = sorted(store.keys())
        store.delete(data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=12)))

        for _ in range(4):  # what seems to be there and is not is found out a few at a time
            best = engine.run(PROMPT, chunk=chunk)
        assert best == len(PROMPT) // LayerGroups((FULL, group)).alignment * LayerGroups((FULL, group)).alignment


@pytest.mark.parametrize("local", [0, 1, 5, 8])
def test_what_vllm_has_itself_is_not_read(store: blocking.BlockingStore, local: int) -> None:
    engine = Engine(store, (FULL, WINDOW), boundary_tokens=4)
    engine.run(PROMPT)

    assert engine.run(PROMPT, computed=4 * local) == 36
    engine.close()


def test_a_window_that_is_lost_between_look_up_and_load_fails_the_whole_load(store: blocking.BlockingStore) -> None:
    engine = Engine(store, (FULL, WINDOW))
    engine.run(PROMPT)
    lost = [key for key in store.keys() if key.endswith("/3")]  # noqa: SIM118 - no mapping
    begin = engine.worker.begin

    def lose_and_begin(step: Step) -> None:
        for key in lost:
            store.put(key, b"short")
        begin(step)

    engine.worker.begin = lose_and_begin  # type: ignore[method-assign]

    assert engine.run(PROMPT) == -1
    request = engine.request
    assert engine.scheduler.loadable_tokens(request, 0) == 0  # computed, and not asked for again
    assert engine.scheduler.plan({"r": 39}, (), lambda _: [range(1, 20)] * 2).saves  # and written again
    engine.close()


def test_without_groups_nothing_is_read_or_written(store: blocking.BlockingStore) -> None:
    names = block_names({}, model="none", namespace="", layers=(), shards=1)
    scheduler = make_scheduler(store, names, groups=())
    request = MadeRequest.of(PROMPT)

    assert scheduler.loadable_tokens(request, 0) == 0
    scheduler.allocated(request, ((1, 2),), 0)
    assert scheduler.plan({"r": 39}, (), lambda _: ((1, 2),)) == Step(computes=True)
    assert not scheduler.finished(request)


def test_a_store_that_is_lost_fails_a_load_of_several_groups_and_raises_nothing(
    store: blocking.BlockingStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(store, (FULL, WINDOW))
    engine.run(PROMPT)

    def gone(*_: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(store, "get_many_into", gone)
    with caplog.at_level(logging.WARNING, logger="vllm.infinistore"):
        assert engine.run(PROMPT) == -1
    assert "load failed" in caplog.text
    engine.close()
