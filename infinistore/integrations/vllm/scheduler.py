"""The scheduler's half: looks up a request's blocks, and plans reads and writes.

It runs in the scheduler's thread, where a lookup delays all requests. Lookups therefore
have a short deadline, and the client's circuit breaker protects against a store that
does not answer. Every failure is a miss.

The blocks found by a lookup are held in the store until a worker has read them. A
lookup has two steps. The first one checks the keys that are written last, one or a few
per block; it is the only one if nothing is stored. The second one checks all keys of
the blocks to read, and places the hold. If some of these are on disk only, the store is
told to read them while vLLM allocates memory for them and waits for its turn.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import InfiniStoreException, LimitExceeded
from infinistore.integrations.internal.blocking_read_ahead import read_ahead
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.names import BlockNames
from infinistore.integrations.vllm.step import Load, Save, Step

__all__ = ["Request", "SchedulerSide"]

_ASK_AGAIN_S = 1.0
"""How long a lookup that failed counts as a miss for a waiting request."""


class Request(Protocol):
    """The part of vLLM's `Request` that the scheduler's half uses."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The tokens of the prompt, and the generated ones."""


@attrs.define
class _Tracked:
    """The state of one request. Counts are of its leading blocks."""

    request: Request
    chain: PrefixChain
    in_store: int = 0
    kept: int = 0
    """Number of blocks that are stored or being written."""
    known_until: float = 0.0
    """Until when the result of the last lookup is valid."""
    hold: str = ""
    loading: Load | None = None
    load_failed: bool = False
    saving: bool = False
    """Whether a worker may still be saving this request's blocks."""


class SchedulerSide:
    """The scheduler's half of the connector. One thread uses it.

    `reads` and `writes` follow from `kv_role`. `extra` returns what a block depends on
    besides its tokens.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        record: Record,
        *,
        block_tokens: int,
        reads: bool,
        writes: bool,
        hold_s: float = 30.0,
        save_generated: bool = False,
        extra: Callable[[Request, int, int], bytes] = lambda request, first, end: b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._names = names
        self._block_tokens = block_tokens
        self._reads = reads
        self._writes = writes
        self._hold_s = hold_s
        self._save_generated = save_generated
        self._extra = extra
        self._clock = clock
        self._record = record
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []

    def loadable_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return the number of tokens to read after the first `computed_tokens`.

        It is a multiple of the block size.
        """
        tracked = self._track(request)
        now = self._clock()
        if tracked.known_until <= now:
            self._look_up(tracked, computed_tokens // self._block_tokens, now)
        if not self._reads or tracked.load_failed:
            return 0
        return max(0, tracked.in_store * self._block_tokens - computed_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], load_tokens: int) -> None:
        """Record a request's blocks; workers will load the last `load_tokens` found
        tokens.
        """
        tracked = self._track(request)
        if not load_tokens:
            self._release(tracked)
            return
        end = tracked.in_store
        first = end - load_tokens // self._block_tokens
        hashes = tracked.chain.hashes[first:end]
        tracked.loading = Load(request.request_id, hashes, list(block_ids[first:end]), tracked.hold)
        tracked.hold = ""
        tracked.saving = False  # it was preempted if it ever saved, and its writes have been waited for
        self._loads.append(tracked.loading)

    def plan(
        self,
        scheduled_tokens: Mapping[str, int],
        preempted: Iterable[str],
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> Step:
        """Return the workers' tasks in a step that computes these tokens."""
        step = Step(self._loads, preempted=set(preempted), computes=bool(scheduled_tokens))
        self._loads = []
        for request_id in step.preempted:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.saving = False
                tracked.known_until = 0.0
        if self._writes:
            for request_id, count in scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None and (save := self._save(tracked, count, block_ids_of)) is not None:
                    step.saves.append(save)
        return step

    def loads_ended(self, request_ids: Iterable[str], failed_blocks: Iterable[int]) -> None:
        """Record which loads have ended, and which blocks could not be read."""
        failed = set(failed_blocks)
        if failed:
            for tracked in self._tracked.values():
                load = tracked.loading
                if load is not None and not failed.isdisjoint(load.block_ids):
                    first_bad = next(i for i, block_id in enumerate(load.block_ids) if block_id in failed)
                    # Not asked for again: whatever was wrong with it may be wrong the
                    # next time.
                    tracked.load_failed = True
                    tracked.kept = tracked.in_store - len(load.block_ids) + first_bad
        for request_id in request_ids:
            if (found := self._tracked.get(request_id)) is not None:
                found.loading = None

    def finished(self, request: Request) -> bool:
        """Forget a request. True if its blocks must be kept until they are saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._release(tracked)
        return tracked.saving

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = PrefixChain(
                self._block_tokens,
                extra=lambda first, end: self._extra(request, first, end),
                group_blocks=self._names.group_blocks,
            )
            tracked = self._tracked[request.request_id] = _Tracked(request, chain)
        return tracked

    def _look_up(self, tracked: _Tracked, computed_blocks: int, now: float) -> None:
        self._release(tracked)
        tracked.in_store = 0
        tracked.known_until = now + _ASK_AGAIN_S
        first = computed_blocks if self._reads else 0
        hashes = tracked.chain.extend(tracked.request.all_token_ids)
        try:
            present = self._store.match_prefix(self._names.last_keys(hashes)) // self._names.shards if hashes else 0
            tracked.in_store = min(present, first)
            if present > first:
                keys = self._names.all_keys(hashes[first:present])
                match = self._match(keys)
                tracked.hold = match.hold
                tracked.in_store = first + match // self._names.keys_per_block
                if self._reads:
                    read_ahead(self._store, match, keys[:match], self._record)
            tracked.known_until = now + self._hold_s / 2
        except InfiniStoreException as error:
            self._record.failed("look-up", error)
        else:
            self._record.succeeded("look-up")
        if tracked.in_store <= first:
            self._release(tracked)
        tracked.kept = tracked.in_store

    def _match(self, keys: list[str]) -> PrefixMatch:
        try:
            return self._store.match_prefix(keys, hold_s=self._hold_s if self._reads else 0)
        except LimitExceeded as error:
            self._record.failed("hold", error)
            return self._store.match_prefix(keys)

    def _release(self, tracked: _Tracked) -> None:
        hold, tracked.hold = tracked.hold, ""
        if hold:
            try:
                self._store.release_hold(hold)
            except InfiniStoreException as error:
                self._record.failed("release of a hold", error)

    def _save(self, tracked: _Tracked, count: int, block_ids_of: Callable[[str], Sequence[int]]) -> Save | None:
        """Return the blocks that `count` more tokens fill and that are not
        stored yet.
        """
        request = tracked.request
        known = len(request.all_token_ids) if self._save_generated else request.num_prompt_tokens
        full = min(request.num_computed_tokens + count, known) // self._block_tokens
        if full <= tracked.kept:
            return None
        first, tracked.kept = tracked.kept, full
        tracked.saving = True
        hashes = tracked.chain.extend(request.all_token_ids)[first:full]
        return Save(request.request_id, hashes, list(block_ids_of(request.request_id)[first:full]))
