"""The scheduler's half: looks up a request's blocks, and plans reads and writes.

It runs in the scheduler's thread, where a lookup delays all requests. Lookups therefore
have a short deadline, and the client's circuit breaker protects against a store that
does not answer. Every failure is a miss.

A lookup holds nothing: a worker holds what it cannot read at once. If some blocks are
on disk only, the store is told to read them while vLLM allocates memory for them and
waits for its turn.

Of layers with a sliding window, only the blocks before some places in a prompt are
stored: the multiples of `boundary_tokens`, its end, and where it departs from what was
stored before. Of layers with a state, those states are stored that vLLM completes.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.block_events import BlockEvents, Sweeper
from infinistore.integrations.vllm.blocks import (
    BlockNames,
    Blocks,
    Group,
    Load,
    Save,
    Step,
    alignment,
    hash_tokens,
    is_uniform,
)
from infinistore.integrations.vllm.lookup import Found, Lookup, block_hashes
from infinistore.integrations.vllm.observations import Observations
from infinistore.integrations.vllm.pins import Pins

__all__ = ["Request", "SchedulerSide"]

_ASK_AGAIN_S = 1.0
"""How long the result of a lookup counts for a waiting request."""


class Request(Protocol):
    """The part of vLLM's `Request` that the scheduler's half uses."""

    request_id: str
    num_computed_tokens: int
    priority: int

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The tokens of the prompt, and the generated ones."""


@attrs.define
class _Tracked:
    """The state of one request."""

    request: Request
    chain: PrefixChain
    found: Found = attrs.field(factory=Found)
    kept: list[int] = attrs.field(factory=list)
    """Of each group, the number of leading blocks that are stored, being written, or
    not needed."""
    known_until: float = 0.0
    """Until when the result of the last lookup is valid."""
    loading: Load | None = None
    load_failed: bool = False
    saving: bool = False
    """Whether a worker may still be saving this request's blocks."""
    stale: bool = False
    """Whether it has blocks of before a reset, so that none is saved."""


class SchedulerSide:
    """The scheduler's half of the connector. One thread uses it.

    `groups` are the groups of layers; without any, nothing is read or written. `reads`
    and `writes` follow from `kv_role`. `extra` returns what a block depends on besides
    its tokens.

    `events` collects what is stored and what is gone of the first group that attends to
    all tokens. `pins` keeps blocks from being evicted. `workers` is how many workers
    tell when they are past a reset.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        record: Record,
        *,
        groups: Sequence[Group],
        reads: bool,
        writes: bool,
        save_generated: bool = False,
        boundary_tokens: int = 1024,
        extra: Callable[[Request, int, int], bytes] = lambda request, first, end: b"",
        observations: Observations | None = None,
        events: BlockEvents | None = None,
        pins: Pins | None = None,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observed = observations or Observations()
        self._store = store
        self._names = names
        self._groups = groups
        self._unit = hash_tokens(groups)
        self._alignment = alignment(groups)
        self._lookup = Lookup(store, names, groups, record) if groups else None
        self._reads = reads
        self._writes = writes and bool(groups)
        self._save_generated = save_generated
        self._boundary_tokens = boundary_tokens
        self._extra = extra
        self._clock = clock
        self._record = record
        self._pins = pins
        self._workers = workers
        self._resets = 0
        self._past = 0
        """How many workers are past the last reset."""
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._told = next((place for place, group in enumerate(groups) if group.is_full), None)
        """The group of which changes are told."""
        self._events = events if self._told is not None else None
        self._sweeper: Sweeper | None = None
        if self._events is not None:
            self._sweeper = Sweeper(store, record, self._events, self._keys_of_told, self._told_with, clock=clock)

    def learn_layers(self, stages: Iterable[Mapping[int, Sequence[str]]]) -> None:
        """Learn the layers of all stages of a pipeline, in their order: of each stage
        the labels of its layers, by the group's index.
        """
        told = list(stages)
        if self._groups:
            layers = [[label for stage in told for label in stage.get(group.index, ())] for group in self._groups]
            self._groups = [
                attrs.evolve(group, layers=tuple(dict.fromkeys(labels)))
                for group, labels in zip(self._groups, layers, strict=True)
            ]
            self._lookup = Lookup(self._store, self._names, self._groups, self._record)
            if self._pins is not None:
                self._pins.learn_groups(self._groups)

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return the number of tokens to read after the first `computed_tokens`.

        Both end where a block of each group ends.
        """
        if self._lookup is None or computed_tokens % self._alignment:
            return 0
        tracked = self._track(request)
        if not self.is_past_reset:
            return 0
        now = self._clock()
        if tracked.known_until <= now:
            self._look_up(tracked, self._lookup, computed_tokens, now)
        if not self._reads or tracked.load_failed:
            return 0
        return max(0, tracked.found.tokens - computed_tokens)

    def departs_after(self, request: Request) -> int:
        """Return after how many tokens a request departs from what is stored; 0 if it
        does not, or if all of that can be read.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.found.full_tokens <= tracked.found.tokens:
            return 0
        return tracked.found.full_tokens

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], load_tokens: int) -> None:
        """Record a request's blocks, for each of vLLM's groups; workers will load the
        last `load_tokens` found tokens.
        """
        if not self._groups:
            return
        tracked = self._track(request)
        if not load_tokens:
            return
        end = tracked.found.tokens
        parts = []
        for place, group in enumerate(self._groups):
            first = (end - load_tokens) // group.block_tokens
            numbers = [number for number in group.needed(end) if number >= first]
            ids = block_ids[group.index]
            parts.append(Blocks(self._hashes(tracked, group, numbers), [ids[number] for number in numbers], place))
        tracked.loading = Load(request.request_id, [part for part in parts if part.hashes])
        tracked.saving = False  # it was preempted if it ever saved, and its writes have been waited for
        self._loads.append(tracked.loading)

    def plan(
        self,
        scheduled_tokens: Mapping[str, int],
        preempted: Iterable[str],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
    ) -> Step:
        """Return the workers' tasks in a step that computes these tokens.

        `states` are the states that this step completes, by request: the group's index,
        the block, and after how many tokens.
        """
        step = Step(self._loads, preempted=set(preempted), computes=bool(scheduled_tokens), resets=self._resets)
        self._loads = []
        for request_id in step.preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saving = tracked.stale = False
                tracked.known_until = 0.0
        for background in (self._sweeper, self._pins):
            if background is not None:
                background.go_on()
        if self._writes and self.is_past_reset:
            for request_id, count in scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and not tracked.stale:
                    step.saves.extend(self._saves(tracked, count, block_ids_of))
            for request_id, offers in (states or {}).items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and not tracked.stale and request_id not in step.preempted:
                    step.saves.extend(self._states(tracked, offers))
        return step

    def loads_ended(
        self, request_ids: Iterable[str], failed_blocks: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """Record which loads have ended, and which blocks or requests could not be
        read.
        """
        for request_id in failed_requests:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.load_failed = True
                tracked.found = Found()
                tracked.kept = [0] * len(self._groups)
        failed = set(failed_blocks)
        if failed:
            for tracked in self._tracked.values():
                load = tracked.loading
                if load is not None and is_uniform(self._groups) and not failed.isdisjoint(load.block_ids):
                    first_bad = next(i for i, block_id in enumerate(load.block_ids) if block_id in failed)
                    in_store = tracked.found.tokens // self._unit
                    good = max(0, in_store - len(load.block_ids) + first_bad)  # nothing, if there was a reset
                    # Another rank may have missed an earlier block, in an earlier step.
                    tracked.kept = [min(good, *tracked.kept) if tracked.load_failed else good]
                    # Not asked for again: whatever was wrong with it may be wrong the
                    # next time.
                    tracked.load_failed = True
                    if self._events is not None:
                        self._events.missing([load.parts[0].hashes[first_bad]])
        for request_id in request_ids:
            if (found := self._tracked.get(request_id)) is not None:
                found.loading = None

    @property
    def is_past_reset(self) -> bool:
        """Whether nothing that was written before the last reset can be stored any
        more.
        """
        return not self._resets or not self._writes or self._past >= self._workers

    def forget(self) -> None:
        """Forget what is stored: it has been deleted. Requests go on.

        Nothing is looked up or saved until all workers are past this reset; nothing of
        before is saved at all.
        """
        self._resets += 1
        self._past = 0
        for tracked in self._tracked.values():
            tracked.found = Found()
            tracked.kept = [0] * len(self._groups)
            tracked.known_until = 0.0
            tracked.stale = tracked.request.num_computed_tokens > 0  # others have no blocks, or none any more
        if self._events is not None:
            self._events.clear()

    def workers_past(self, counts: Mapping[int, int]) -> None:
        """Record how many more workers are past a reset, by its number."""
        self._past += counts.get(self._resets, 0)

    def close(self) -> None:
        """End the threads that watch and pin what is stored, if there are any."""
        for background in (self._sweeper, self._pins):
            if background is not None:
                background.close()

    def finished(self, request: Request) -> bool:
        """Forget a request. True if its blocks must be kept until they are saved."""
        tracked = self._tracked.pop(request.request_id, None)
        # Of one that was preempted since the last step, nothing is computed, and its
        # blocks are not its own any more.
        return tracked is not None and tracked.saving and request.num_computed_tokens > 0

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = PrefixChain(
                self._unit,
                extra=lambda first, end: self._extra(request, first, end),
                group_blocks=self._names.group_blocks,
            )
            tracked = self._tracked[request.request_id] = _Tracked(request, chain, kept=[0] * len(self._groups))
        return tracked

    def _look_up(self, tracked: _Tracked, lookup: Lookup, computed_tokens: int, now: float) -> None:
        is_first = not tracked.known_until
        tracked.found = Found()
        tracked.known_until = now + _ASK_AGAIN_S
        tokens = tracked.request.all_token_ids
        if self._pins is not None and is_first:
            request = tracked.request
            if worth := self._pins.worth(tokens, request.num_prompt_tokens, request.priority):
                self._pins.use(tracked.chain.extend(tokens), worth)
        # vLLM computes the last token again, with the window or state before it.
        most = len(tokens) if is_uniform(self._groups) else len(tokens) - 1
        try:
            with self._observed.timed("look_up"):
                if hashes := tracked.chain.extend(tokens):
                    tracked.found = lookup.find(hashes, computed_tokens, most=most, reads=self._reads)
            if is_first and hashes:
                self._observed.count(
                    looked_up_tokens=max(0, len(tokens) - computed_tokens),
                    hit_tokens=max(0, tracked.found.tokens - computed_tokens),
                )
        except InfiniStoreException as error:
            self._record.failed("look-up", error)
        else:
            self._record.succeeded("look-up")
            self._tell_found(tracked)
        tracked.kept = [
            tracked.found.full_tokens // group.block_tokens if group.is_full else 0 for group in self._groups
        ]

    def _hashes(self, tracked: _Tracked, group: Group, numbers: Sequence[int]) -> list[str]:
        return block_hashes(group, tracked.chain.hashes, numbers, self._unit)

    def _known_tokens(self, tracked: _Tracked) -> int:
        """Return how many tokens of a request may be stored."""
        return len(tracked.request.all_token_ids) if self._save_generated else tracked.request.num_prompt_tokens

    def _saves(
        self, tracked: _Tracked, count: int, block_ids_of: Callable[[str], Sequence[Sequence[int]]]
    ) -> list[Save]:
        """Return the blocks that `count` more tokens fill and that are not
        stored yet.
        """
        request = tracked.request
        end = min(request.num_computed_tokens + count, self._known_tokens(tracked))
        saves: list[Save] = []
        tables: Sequence[Sequence[int]] | None = None
        for place, group in enumerate(self._groups):
            first, full = tracked.kept[place], end // group.block_tokens
            if group.offered or full <= first:
                continue
            tracked.kept[place] = full
            tables = block_ids_of(request.request_id) if tables is None else tables
            ids = tables[group.index]
            numbers: Sequence[int] = range(first, full)
            if not group.is_full:
                wanted = self._wanted(tracked, group, first, full)
                stored = tracked.found.stored.get(group.index, ())
                # Blocks that vLLM has left behind have the number 0.
                numbers = [number for number in numbers if number in wanted and number not in stored and ids[number]]
            if numbers:
                tracked.chain.extend(request.all_token_ids)
                hashes = self._hashes(tracked, group, numbers)
                number = 0
                if self._events is not None and place == self._told:
                    number = self._events.saving(request, hashes, first)
                saves.append(Save(request.request_id, Blocks(hashes, [ids[block] for block in numbers], place), number))
        tracked.saving |= bool(saves)
        return saves

    def _tell_found(self, tracked: _Tracked) -> None:
        """Tell what a look-up has found, and which block it has missed."""
        if self._events is None or self._told is None:
            return
        group = self._groups[self._told]
        blocks = len(tracked.chain.hashes) * self._unit // group.block_tokens
        hashes = self._hashes(tracked, group, range(blocks))
        found = tracked.found.full_tokens // group.block_tokens
        self._events.found(tracked.request, hashes[:found])
        self._events.missing(hashes[found : found + 1])

    def _keys_of_told(self, hashes: Sequence[str]) -> tuple[list[str], int]:
        assert self._told is not None
        return self._names.some_keys(hashes, self._groups[self._told].layers, most=4 * len(hashes))

    def _told_with(self, keys: Sequence[str]) -> list[str]:
        assert self._told is not None
        layers = frozenset(self._groups[self._told].layers)
        blocks = dict.fromkeys(self._names.block_of(key, layers) for key in keys)
        return [block for block in blocks if block is not None]

    def _wanted(self, tracked: _Tracked, group: Group, first: int, full: int) -> set[int]:
        """Return which blocks of a group a later request may need."""
        known = self._known_tokens(tracked)
        prompt = tracked.request.num_prompt_tokens
        step = max(1, self._boundary_tokens // self._alignment) * self._alignment
        last = known + (step if self._save_generated else 0)
        boundaries = {prompt - 1, prompt, tracked.found.full_tokens, *range(step, last + 1, step)}
        wanted: set[int] = set()
        for boundary in boundaries:
            wanted.update(group.needed(boundary // self._alignment * self._alignment))
        return wanted.intersection(range(first, full))

    def _states(self, tracked: _Tracked, offers: Iterable[tuple[int, int, int]]) -> list[Save]:
        """Return the states that are complete after this step and not stored yet."""
        places = {group.index: place for place, group in enumerate(self._groups) if group.offered}
        saves = []
        for index, block_id, tokens in offers:
            if index not in places or tokens % self._alignment or tokens > self._known_tokens(tracked):
                continue
            group = self._groups[places[index]]
            number = tokens // group.block_tokens - 1
            stored = tracked.found.stored.setdefault(index, set())
            if number not in stored:
                stored.add(number)
                tracked.chain.extend(tracked.request.all_token_ids)
                hashes = self._hashes(tracked, group, [number])
                saves.append(Save(tracked.request.request_id, Blocks(hashes, [block_id], places[index])))
        tracked.saving |= bool(saves)
        return saves
