"""The scheduler's half: looks up a request's blocks, plans reads and writes, and pins
blocks of important prompts.

It runs in the scheduler's thread, where whatever waits delays all requests. So while
requests are computed, a lookup is made in another thread, and waited for only for five
milliseconds of each step, in which a store that is well has answered; a request whose
lookup takes longer is asked about again in the next step, and the others go on. Lookups
have a short deadline, and the client's circuit breaker protects against a store that
does not answer. Every failure is a miss. A model of many layers has thousands of keys
for a prompt, so of long prompts some keys of each block are asked for, a bounded number
in all; a block of which others are missing is found out by the read, and computed.

A lookup holds no blocks: a worker holds those that it cannot read at once. If some
blocks are on disk only, the store reads them into memory while vLLM allocates memory
for them and the request waits for its turn.

One group that attends to all tokens takes one request. With other groups, a prompt can
be used up to n tokens if each group has what it needs there: a second request asks
which windows and states are stored. Of layers with a sliding window, only the blocks
before some places in a prompt are stored: the multiples of `boundary_tokens`, its end,
and where it departs from what was stored before. Of layers with a state, those states
are stored that vLLM completes.

Blocks of three kinds of prompts are pinned in the store: system prompts in a list,
requests with a high priority, and those that ask for it (`Pins`). A prompt is pinned
when a request begins with it. Pins are renewed every minute: a server that restarts
forgets them, and a block can be pinned only after it has been written. A block is
unpinned when no request has begun with it for `pin_s`; above a number of blocks, those
unused for longest are unpinned, too. The store has a bound of its own, and pins that it
refuses are tried again a minute later. Pins outlive the engine by about `pin_s`, so
that it finds these blocks after a restart; then they expire.
"""

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import ConfigError, InfiniStoreException, LimitExceeded
from infinistore.integrations.internal.blocking_store_calls import read_ahead
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.background import Background
from infinistore.integrations.vllm.block_events import BlockEvents, Sweeper
from infinistore.integrations.vllm.blocks import BlockNames, Blocks, LayerGroup, LayerGroups, Load, Save, Step
from infinistore.integrations.vllm.loading import LinkReport, LoadChoice
from infinistore.integrations.vllm.observations import Observations
from infinistore.integrations.vllm.settings import RequestSettings

_MOST_KEYS = 384
"""How many keys a look-up asks for of a group; at least two of each block."""


@attrs.define
class Found:
    """What a lookup found. Counts are of leading tokens."""

    tokens: int = 0
    """What can be used."""
    full_tokens: int = 0
    """What the groups that attend to all tokens have."""
    stored: dict[int, set[int]] = attrs.field(factory=dict)
    """The blocks that the other groups have, by the group's index."""
    is_on_disk: bool = False
    """Whether some of them are on disk only."""


_Answer: TypeAlias = Future[Found | None]
"""What a lookup finds; None if it fails."""


class Lookup:
    """Looks prompts up in a store, for these groups of layers."""

    def __init__(self, store: BlockingStore, names: BlockNames, groups: LayerGroups, record: Record) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._groups = groups
        self._full = [group for group in groups if group.is_full]
        self._others = [group for group in groups if not group.is_full]

    def find(self, hashes: Sequence[str], computed: int, *, most: int, reads: bool) -> Found:
        """Look up the blocks with these hashes, of which an engine has the first
        `computed` tokens, and can use the first `most`.

        With `reads`, what is found after these is read ahead from a disk.
        """
        end, on_disk = self._leading(hashes, len(hashes) * self._groups.hash_tokens)
        found = Found(0, end)
        if not end:
            return found
        found.stored, more_on_disk = self._stored(hashes, end)
        found.is_on_disk = on_disk + more_on_disk > 0
        found.tokens = self._usable(min(end, self._groups.aligned(most)), found.stored)
        if reads and found.is_on_disk and found.tokens > computed:
            keys = self._keys(hashes, computed, found.tokens)
            read_ahead(self._store, PrefixMatch(len(keys), on_disk=on_disk + more_on_disk), keys, self._record)
        return found

    def _leading(self, hashes: Sequence[str], tokens: int) -> tuple[int, int]:
        """Return up to where full attention seems complete, and how many on disk."""
        end, on_disk = self._groups.aligned(tokens), 0
        for group in self._full:
            if end:
                of = self._groups.hashes_of(group, range(end // group.block_tokens), hashes)
                keys, each = self._names.some_keys(of, group.layers, most=_MOST_KEYS)
                match = self._store.match_prefix(keys)
                end = min(end, self._groups.aligned(match // each * group.block_tokens))
                on_disk += match - match.in_memory
        return end, on_disk

    def _stored(self, hashes: Sequence[str], end: int) -> tuple[dict[int, set[int]], int]:
        """Return which blocks of other groups seem stored, and how many are on disk."""
        parts = []
        for group in self._others:
            of = self._groups.hashes_of(group, range(end // group.block_tokens), hashes)
            parts.append((group, *self._names.some_keys(of, group.layers, most=_MOST_KEYS)))
        keys = [key for _, asked, _ in parts for key in asked]
        if not keys:
            return {}, 0
        there = self._store.exists_many(keys)
        stored: dict[int, set[int]] = {}
        first = 0
        for group, asked, each in parts:
            blocks = range(len(asked) // each)
            stored[group.index] = {
                number for number in blocks if all(there[first + number * each : first + (number + 1) * each])
            }
            first += len(asked)
        return stored, there.on_disk

    def _usable(self, end: int, stored: dict[int, set[int]]) -> int:
        """Return the longest length up to `end` at which no group lacks anything."""
        while end and not all(stored[group.index].issuperset(group.needed(end)) for group in self._others):
            end -= self._groups.alignment
        return end

    def _keys(self, hashes: Sequence[str], start: int, end: int) -> list[str]:
        """Return all keys that a load of these tokens asks for."""
        keys: list[str] = []
        for group in (*self._full, *self._others):
            numbers = [number for number in group.needed(end) if number >= start // group.block_tokens]
            keys += self._names.all_keys(self._groups.hashes_of(group, numbers, hashes), group.layers)
        return keys


_MOST_PROMPTS: Final = 1000
_MOST_PINNED_KEYS: Final = 1024
"""How many keys one call pins, and at least one block."""
_SOON_S: Final = 1.0
_PIN_AGAIN_S: Final = 60.0
_LONGER_S: Final = 2 * _PIN_AGAIN_S
"""By how much the store's pins outlive `pin_s`: none ends while it is renewed."""
_TRIES: Final = 10
"""How often a block is tried again that is not there yet, before the next minute."""

_REMEDY: Final = (
    "pins of engines that have ended count until their pin_s is over: `infinistore unpin --prefix vllm/` ends all pins"
    " of vLLM, and engines that compute pin theirs again within a minute"
)

_Block: TypeAlias = tuple[int, str]
"""The place of its group, and its hash."""


def read_prompts(path: str, tokenize: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return the tokens of the prompts in a file: a JSON list of texts and of lists of
    tokens.

    Raises:
        ConfigError: it cannot be read.
    """

    def problem(what: str) -> ConfigError:
        return ConfigError(f"kv_connector_extra_config: pin_prompts_file {path}: {what}")

    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise problem(f"{error.strerror}; give a file that vLLM's scheduler can read") from None
    except ValueError as error:
        raise problem(f"it is no JSON ({error}); write a list of texts, or of lists of tokens") from None
    if not isinstance(found, list) or len(found) > _MOST_PROMPTS:
        raise problem(f"write a list of at most {_MOST_PROMPTS} prompts")
    prompts = []
    for number, prompt in enumerate(found):
        if isinstance(prompt, str) and prompt:
            prompts.append(list(tokenize(prompt)))
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            prompts.append(prompt)
        else:
            raise problem(f"entry {number} is neither a text nor a list of tokens")
    return prompts


class Pins:
    """The pins of one engine, on at most `most` blocks. One thread uses it; the calls
    to the store are made in the background.

    `prompts` are token lists. A request that begins with one has that part pinned; if
    it has at most the priority `priority`, all of its prompt (in vLLM, less is
    earlier).
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        groups: Sequence[LayerGroup],
        record: Record,
        *,
        prompts: Sequence[Sequence[int]] = (),
        priority: int | None = None,
        pin_s: float = 3600.0,
        most: int = 100_000,
        background: Background,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._priority = priority
        self._pin_s = pin_s
        self._most = most
        self._clock = clock
        self.learn_groups(groups)
        # The last token of a text can be another one when more text follows.
        ends = {len(prompt): self._groups.aligned(len(prompt) - 1) for prompt in prompts}
        heads = {tuple(prompt[: ends[len(prompt)]]) for prompt in prompts} - {()}
        self._heads = sorted(heads, key=len, reverse=True)
        self._ends: OrderedDict[_Block, float] = OrderedDict()
        """Until when each block is pinned; that which a request began with last is the
        last one."""
        self._due: OrderedDict[_Block, None] = OrderedDict()
        """The blocks that the next task pins."""
        self._unused: deque[_Block] = deque()
        """The blocks that the next task unpins."""
        self._again_s = clock() + _PIN_AGAIN_S
        self._background = background
        self._is_working = False

    def learn_groups(self, groups: Sequence[LayerGroup]) -> None:
        """Learn of the layers of other stages of a pipeline."""
        self._groups = LayerGroups(groups)
        most_layers = max((len(group.layers) for group in groups), default=1)
        self._blocks_at_a_time = max(1, _MOST_PINNED_KEYS // max(1, most_layers * self._names.shards))

    def worth(self, tokens: Sequence[int], prompt_tokens: int, priority: int, *, asked: bool = False) -> int:
        """Return how many leading tokens of a request are worth a pin; `asked` for, all
        are."""
        if asked or (self._priority is not None and priority <= self._priority):
            return self._groups.aligned(prompt_tokens)
        beginning = tuple(tokens[: len(self._heads[0])]) if self._heads else ()
        return next((len(head) for head in self._heads if beginning[: len(head)] == head), 0)

    def use(self, hashes: Sequence[str], tokens: int, pin_s: float | None = None) -> None:
        """Note that a request begins with `tokens` tokens worth a pin, for `pin_s` or
        as long as others."""
        end = self._clock() + (self._pin_s if pin_s is None else pin_s)
        for place, group in enumerate(self._groups):
            for block_hash in self._groups.hashes_of(group, group.needed(tokens), hashes):
                block = (place, block_hash)
                if block not in self._ends:
                    self._due[block] = None
                self._ends[block] = max(end, self._ends.get(block, 0.0))
                self._ends.move_to_end(block)
        while len(self._ends) > self._most:
            self._drop(next(iter(self._ends)))

    def go_on(self) -> None:
        """Begin to pin and unpin the blocks that are due, unless that is under way."""
        now = self._clock()
        if now >= self._again_s:
            self._again_s = now + _PIN_AGAIN_S
            for block, end in list(self._ends.items()):
                if end < now:
                    self._drop(block)
            self._due = OrderedDict.fromkeys(self._ends)
        if not self._is_working and (self._due or self._unused):
            self._is_working = True
            ttl_s = max((self._ends[block] for block in self._due), default=now) - now + _LONGER_S
            self._background.start(self._work(list(self._due), list(self._unused), ttl_s))
            self._due = OrderedDict()

    def _drop(self, block: _Block) -> None:
        del self._ends[block]
        self._due.pop(block, None)
        self._unused.append(block)

    def _work(self, due: Sequence[_Block], unused: Sequence[_Block], ttl_s: float) -> Iterator[float]:
        """A task for the background: unpin, and pin for so long at most."""
        try:
            for blocks in self._parts(unused):
                self._store.unpin(self._keys(blocks))
                for _ in blocks:
                    self._unused.popleft()
                yield 0.0
            was_refused = False
            for tries in range(1 + _TRIES):
                if tries:
                    yield _SOON_S
                left: list[_Block] = []
                for blocks in self._parts(due):
                    keys = self._keys(blocks)
                    try:
                        if self._store.pin(keys, ttl_s=ttl_s) < len(keys):
                            left += blocks  # they are being written
                    except LimitExceeded as error:  # others may be smaller, or be pinned already
                        self._record.failed("pin", LimitExceeded(f"{error}; {_REMEDY}"))
                        was_refused = True
                    yield 0.0
                if not left:
                    break
                due = left
            if due and not was_refused:
                self._record.succeeded("pin")
        except InfiniStoreException as error:
            self._record.failed("pin", error)
        finally:
            self._is_working = False

    def _parts(self, blocks: Sequence[_Block]) -> Iterator[Sequence[_Block]]:
        for first in range(0, len(blocks), self._blocks_at_a_time):
            yield blocks[first : first + self._blocks_at_a_time]

    def _keys(self, blocks: Sequence[_Block]) -> list[str]:
        return [key for place, block in blocks for key in self._names.all_keys([block], self._groups[place].layers)]


_ASK_AGAIN_S = 1.0
"""How long the result of a lookup counts for a waiting request."""
_PATIENCE_S: Final = 0.005
"""How long a step in which requests are computed waits for lookups, in all."""


def _at_once(work: Callable[[], Found | None]) -> _Answer:
    done: _Answer = Future()
    done.set_result(work())
    return done


class Request(Protocol):
    """The part of vLLM's `Request` that the scheduler's half uses."""

    request_id: str
    num_computed_tokens: int
    priority: int

    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None:
        """What whoever sent it says about the cache."""

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
    settings: RequestSettings
    found: Found = attrs.field(factory=Found)
    looking: _Answer | None = None
    """A lookup that is under way."""
    kept: list[int] = attrs.field(factory=list)
    """Of each group, the number of leading blocks that are stored, being written, or
    not needed."""
    known_until: float = 0.0
    """Until when the result of the last lookup is valid."""
    loading: Load | None = None
    limit_s: float | None = None
    """After how long its load is given up, if it is only a trial."""
    load_failed: bool = False
    saving: bool = False
    """Whether a worker may still be saving this request's blocks."""
    stale: bool = False
    """Whether it has blocks of before a reset, so that none is saved."""
    unknown: bool = False
    """Whether its lookup failed, so that none is saved: all may be stored, and a link
    that is slow would have no room for lookups any more."""

    @property
    def is_saved(self) -> bool:
        """Whether its blocks may be saved."""
        return self.settings.save and not self.stale and not self.unknown


class SchedulerSide:
    """The scheduler's half of the connector. One thread uses it.

    `groups` are the groups of layers; without any, nothing is read or written. `reads`
    and `writes` follow from `kv_role`. `extra` returns what a block depends on besides
    its tokens.

    `events` collects what is stored and what is gone of the first group that attends to
    all tokens; the store is asked for that in the `background`. `pins` keeps blocks
    from being evicted. `choice` says whether what was found is loaded; without it, it
    always is. `workers` is how many workers tell when they are past a reset.
    `in_thread` calls a function that looks up while requests are computed; without it,
    that is done at once.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        record: Record,
        *,
        groups: Sequence[LayerGroup],
        reads: bool,
        writes: bool,
        save_generated: bool = False,
        boundary_tokens: int = 1024,
        extra: Callable[[Request, int, int], bytes] = lambda request, first, end: b"",
        observations: Observations | None = None,
        events: BlockEvents | None = None,
        pins: Pins | None = None,
        background: Background | None = None,
        choice: LoadChoice | None = None,
        workers: int = 1,
        in_thread: Callable[[Callable[[], Found | None]], _Answer] = _at_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_thread = in_thread
        self._patience_s: float | None = None
        """How long this step may still wait for lookups; None: until they end."""
        self._observed = observations or Observations()
        self._store = store
        self._names = names
        self._groups = LayerGroups(groups)
        self._lookup = Lookup(store, names, self._groups, record) if groups else None
        self._reads = reads
        self._writes = writes and bool(groups)
        self._save_generated = save_generated
        self._boundary_tokens = boundary_tokens
        self._extra = extra
        self._clock = clock
        self._record = record
        self._pins = pins
        self._choice = choice
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
        if self._events is not None and background is not None:
            self._sweeper = Sweeper(
                *(store, record, self._events, self._keys_of_told, self._told_with), background=background, clock=clock
            )

    def learn_layers(self, stages: Iterable[Mapping[int, Sequence[str]]]) -> None:
        """Learn the layers of all stages of a pipeline, in their order: of each stage
        the labels of its layers, by the group's index.
        """
        told = list(stages)
        if self._groups:
            layers = [[label for stage in told for label in stage.get(group.index, ())] for group in self._groups]
            self._groups = LayerGroups(
                attrs.evolve(group, layers=tuple(dict.fromkeys(labels)))
                for group, labels in zip(self._groups, layers, strict=True)
            )
            self._lookup = Lookup(self._store, self._names, self._groups, self._record)
            if self._pins is not None:
                self._pins.learn_groups(self._groups)

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return the number of tokens to read after the first `computed_tokens`; None
        if that is not known yet.

        Both end where a block of each group ends.
        """
        if self._lookup is None or computed_tokens % self._groups.alignment:
            return 0
        tracked = self._track(request)
        if not self.is_past_reset:
            return 0
        if tracked.looking is None and tracked.known_until <= self._clock():
            self._look_up(tracked, self._lookup, computed_tokens)
        if tracked.looking is not None:
            if not self._is_answered(tracked.looking):
                return None
            self._take(tracked, tracked.looking.result(), computed_tokens)
        if not self._reads or not tracked.settings.load or tracked.load_failed:
            return 0
        tokens = max(0, tracked.found.tokens - computed_tokens)
        return tokens if tokens and self._is_worth_loading(tracked, computed_tokens) else 0

    def _is_worth_loading(self, tracked: _Tracked, computed_tokens: int) -> bool:
        if self._choice is None:
            return True
        request = tracked.request
        advice = self._choice.loads(
            request.request_id,
            tokens=request.num_prompt_tokens,
            cached_tokens=computed_tokens,
            stored_tokens=tracked.found.tokens,
            is_on_disk=tracked.found.is_on_disk,
            queued=[
                (other.request.num_computed_tokens, other.request.num_prompt_tokens)
                for other in self._tracked.values()
                if 0 < other.request.num_computed_tokens < other.request.num_prompt_tokens and other.loading is None
            ],
        )
        tracked.limit_s = advice.limit_s
        return advice.load

    def departs_after(self, request: Request) -> int:
        """Return after how many tokens a request departs from what is stored; 0 if it
        does not, or if all of that can be read.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.found.full_tokens <= tracked.found.tokens:
            return 0
        return tracked.found.full_tokens

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], load_tokens: int) -> None:
        """Record a request's blocks, by groups; workers load the last `load_tokens`."""
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
            hashes = self._groups.hashes_of(group, numbers, tracked.chain.hashes)
            parts.append(Blocks(hashes, [ids[number] for number in numbers], place))
        parts = [part for part in parts if part.hashes]
        tracked.loading = Load(request.request_id, parts, load_tokens, tracked.found.is_on_disk, tracked.limit_s)
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
        number = 0 if self._choice is None else self._choice.planned(list(self._prompt_parts(scheduled_tokens)))
        step = Step(
            self._loads,
            preempted=set(preempted),
            computes=bool(scheduled_tokens),
            resets=self._resets,
            number=number,
        )
        self._loads = []
        self._patience_s = _PATIENCE_S if scheduled_tokens else None
        for request_id in step.preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saving = tracked.stale = False
                tracked.known_until = 0.0
                tracked.looking = None
        for upkeep in (self._sweeper, self._pins):
            if upkeep is not None:
                upkeep.go_on()
        if self._writes and self.is_past_reset:
            for request_id, count in scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and tracked.is_saved:
                    step.saves.extend(self._saves(tracked, count, block_ids_of))
            for request_id, offers in (states or {}).items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and tracked.is_saved and request_id not in step.preempted:
                    step.saves.extend(self._states(tracked, offers))
        return step

    def _prompt_parts(self, scheduled_tokens: Mapping[str, int]) -> Iterator[tuple[int, int]]:
        """Yield which parts of prompts a step computes."""
        for request_id, count in scheduled_tokens.items():
            if (tracked := self._tracked.get(request_id)) is not None:
                first, last = tracked.request.num_computed_tokens, tracked.request.num_prompt_tokens
                if first < last:
                    yield first, min(first + count, last)

    def step_ended(self, number: int, links: Mapping[int, LinkReport]) -> None:
        """Record that a step has ended, and what workers have read."""
        if self._choice is not None and number:
            self._choice.ended(number, links)

    def loads_ended(
        self, request_ids: Iterable[str], failed_blocks: Iterable[int], failed_requests: Iterable[str] = ()
    ) -> None:
        """Record ended loads, and blocks and requests that could not be read."""
        for request_id in failed_requests:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.load_failed = True
                if tracked.limit_s is None:
                    tracked.found = Found()
                    tracked.kept = [0] * len(self._groups)
        failed = set(failed_blocks)
        if failed:
            for tracked in self._tracked.values():
                load = tracked.loading
                if load is None or not self._groups.is_uniform or failed.isdisjoint(load.block_ids):
                    continue
                if load.limit_s is None:  # else it may have been given up, and all of it is there
                    first_bad = next(i for i, block_id in enumerate(load.block_ids) if block_id in failed)
                    in_store = tracked.found.tokens // self._groups.hash_tokens
                    good = max(0, in_store - len(load.block_ids) + first_bad)  # nothing, if there was a reset
                    # Another rank may have missed an earlier block, in an earlier step.
                    tracked.kept = [min(good, *tracked.kept) if tracked.load_failed else good]
                    if self._events is not None:
                        self._events.missing([load.parts[0].hashes[first_bad]])
                # Not asked for again: whatever was wrong with it may be wrong the next
                # time.
                tracked.load_failed = True
        for request_id in request_ids:
            if (found := self._tracked.get(request_id)) is not None:
                found.loading = None

    @property
    def is_past_reset(self) -> bool:
        """Whether nothing written before the last reset can be stored any more."""
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
            tracked.looking = None
            tracked.stale = tracked.request.num_computed_tokens > 0  # others have no blocks, or none any more
        if self._events is not None:
            self._events.clear()

    def workers_past(self, counts: Mapping[int, int]) -> None:
        """Record how many more workers are past a reset, by its number."""
        self._past += counts.get(self._resets, 0)

    def finished(self, request: Request) -> bool:
        """Forget a request. True if its blocks must be kept until they are saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if self._choice is not None:
            self._choice.forget(request.request_id)
        # Of one that was preempted since the last step, nothing is computed, and its
        # blocks are not its own any more.
        return tracked is not None and tracked.saving and request.num_computed_tokens > 0

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = PrefixChain(
                self._groups.hash_tokens,
                extra=lambda first, end: self._extra(request, first, end),
                group_blocks=self._names.group_blocks,
            )
            settings = self._settings_of(request)
            tracked = _Tracked(request, chain, settings, kept=[0] * len(self._groups))
            self._tracked[request.request_id] = tracked
        return tracked

    def _settings_of(self, request: Request) -> RequestSettings:
        """Return what a request asks for; if that is wrong, what others do."""
        try:
            return RequestSettings.of(request.kv_transfer_params)
        except ConfigError as error:
            self._record.failed("the settings of a request", error)
            return RequestSettings()

    def _look_up(self, tracked: _Tracked, lookup: Lookup, computed_tokens: int) -> None:
        """Begin to look a request up."""
        tracked.found = Found()
        tokens = tracked.request.all_token_ids
        hashes = list(tracked.chain.extend(tokens))
        if self._pins is not None and not tracked.known_until:
            request, pin_s = tracked.request, tracked.settings.pin_s
            if worth := self._pins.worth(tokens, request.num_prompt_tokens, request.priority, asked=pin_s is not None):
                self._pins.use(hashes, worth, pin_s)
        if not hashes:
            self._take(tracked, Found(), computed_tokens)
            return
        reads = self._reads and tracked.settings.load
        # vLLM computes the last token again, with the window or state before it.
        most = len(tokens) if self._groups.is_uniform else len(tokens) - 1

        def find() -> Found | None:
            with self._record.trying("look-up"), self._observed.timed("look_up"):
                return lookup.find(hashes, computed_tokens, most=most, reads=reads)
            return None

        tracked.looking = (_at_once if self._patience_s is None else self._in_thread)(find)

    def _is_answered(self, looking: _Answer) -> bool:
        """Wait for a lookup as long as this step may; return whether it has ended."""
        if not looking.done() and self._patience_s != 0.0:
            began = self._clock()
            wait([looking], self._patience_s)
            if self._patience_s is not None:
                self._patience_s = max(0.0, self._patience_s - (self._clock() - began))
        return looking.done()

    def _take(self, tracked: _Tracked, found: Found | None, computed_tokens: int) -> None:
        """Take what a lookup has found; None if it failed."""
        is_first = not tracked.known_until
        tracked.looking = None
        tracked.known_until = self._clock() + _ASK_AGAIN_S
        tracked.found = found or Found()
        tracked.unknown = found is None and self._reads  # one that only writes does so for others, which wait
        if found is not None:
            if is_first and tracked.chain.hashes:
                self._observed.count(
                    looked_up_tokens=max(0, len(tracked.request.all_token_ids) - computed_tokens),
                    hit_tokens=max(0, found.tokens - computed_tokens),
                )
            self._tell_found(tracked)
        tracked.kept = [
            tracked.found.full_tokens // group.block_tokens if group.is_full else 0 for group in self._groups
        ]

    def _known_tokens(self, tracked: _Tracked) -> int:
        """Return how many tokens of a request may be stored."""
        return len(tracked.request.all_token_ids) if self._save_generated else tracked.request.num_prompt_tokens

    def _saves(
        self, tracked: _Tracked, count: int, block_ids_of: Callable[[str], Sequence[Sequence[int]]]
    ) -> list[Save]:
        """Return the blocks that `count` more tokens fill, and that are not stored."""
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
                hashes = self._groups.hashes_of(group, numbers, tracked.chain.hashes)
                number = 0
                if self._events is not None and place == self._told:
                    number = self._events.saving(request, hashes, first)
                blocks = Blocks(hashes, [ids[block] for block in numbers], place)
                saves.append(Save(request.request_id, blocks, number, tracked.settings.ttl_s))
        tracked.saving |= bool(saves)
        return saves

    def _tell_found(self, tracked: _Tracked) -> None:
        """Tell what a look-up has found, and which block it has missed."""
        if self._events is None or self._told is None:
            return
        group = self._groups[self._told]
        blocks = len(tracked.chain.hashes) * self._groups.hash_tokens // group.block_tokens
        hashes = self._groups.hashes_of(group, range(blocks), tracked.chain.hashes)
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

    def _wanted(self, tracked: _Tracked, group: LayerGroup, first: int, full: int) -> set[int]:
        """Return which blocks of a group a later request may need."""
        known = self._known_tokens(tracked)
        prompt = tracked.request.num_prompt_tokens
        step = max(self._groups.alignment, self._groups.aligned(self._boundary_tokens))
        last = known + (step if self._save_generated else 0)
        boundaries = {prompt - 1, prompt, tracked.found.full_tokens, *range(step, last + 1, step)}
        wanted: set[int] = set()
        for boundary in boundaries:
            wanted.update(group.needed(self._groups.aligned(boundary)))
        return wanted.intersection(range(first, full))

    def _states(self, tracked: _Tracked, offers: Iterable[tuple[int, int, int]]) -> list[Save]:
        """Return the states that are complete after this step and not stored yet."""
        places = {group.index: place for place, group in enumerate(self._groups) if group.offered}
        saves = []
        for index, block_id, tokens in offers:
            if index not in places or tokens % self._groups.alignment or tokens > self._known_tokens(tracked):
                continue
            group = self._groups[places[index]]
            number = tokens // group.block_tokens - 1
            stored = tracked.found.stored.setdefault(index, set())
            if number not in stored:
                stored.add(number)
                tracked.chain.extend(tracked.request.all_token_ids)
                hashes = self._groups.hashes_of(group, [number], tracked.chain.hashes)
                blocks = Blocks(hashes, [block_id], places[index])
                saves.append(Save(tracked.request.request_id, blocks, ttl_s=tracked.settings.ttl_s))
        tracked.saving |= bool(saves)
        return saves
