"""The scheduler's half: which of a request's blocks are in the store, which to read, and which to write.

It runs in the scheduler's thread, so that a look-up holds up everybody: it has a short deadline of its own, and a store
that does not answer is left alone for a while (the client sees to that). Whatever goes wrong is a miss.

Blocks that a look-up found are held in the store until a worker has read them. It asks in two steps: first for what is
written last of each block, a key or a few per block, which is all when nothing is there; then for everything of the
blocks that would be read, together with the hold.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import InfiniStoreException, LimitExceeded
from infinistore.integrations.prefix_keys import PrefixChain
from infinistore.integrations.record import Record
from infinistore.integrations.vllm.names import BlockNames
from infinistore.integrations.vllm.step import Load, Save, Step

__all__ = ["Request", "SchedulerSide"]

_ASK_AGAIN_S = 1.0
"""How long the answer "nothing, the store is away" counts for a request that waits."""


class Request(Protocol):
    """What the scheduler's half needs to know of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the prompt has."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt, and the tokens that were generated."""


@attrs.define
class _Tracked:
    """What is known of one request. Counts are of its leading blocks."""

    request: Request
    chain: PrefixChain
    in_store: int = 0
    kept: int = 0
    """How many are in the store, or are being written."""
    known_until: float = 0.0
    """Until when the answer of the last look-up counts."""
    hold: str = ""
    loading: Load | None = None
    load_failed: bool = False
    saving: bool = False
    """Whether a worker may still be reading from this request's blocks, to write them."""


class SchedulerSide:
    """The scheduler's half of the connector. One thread uses it.

    `reads` and `writes` say what this engine does: `kv_role`. `extra` returns what a block depends on besides its
    tokens.
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
        """Return how many tokens after the first `computed_tokens` can be read: a multiple of the block size."""
        tracked = self._track(request)
        now = self._clock()
        if tracked.known_until <= now:
            self._look_up(tracked, computed_tokens // self._block_tokens, now)
        if not self._reads or tracked.load_failed:
            return 0
        return max(0, tracked.in_store * self._block_tokens - computed_tokens)

    def allocated(self, request: Request, block_ids: Sequence[int], load_tokens: int) -> None:
        """Learn that a request has got blocks; the workers are to fill the last `load_tokens` tokens that it found."""
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
        """Return what the workers are to do in a step that computes so many tokens of each request."""
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
        """Learn from the workers which requests' loads are over, and which blocks could not be read."""
        failed = set(failed_blocks)
        if failed:
            for tracked in self._tracked.values():
                load = tracked.loading
                if load is not None and not failed.isdisjoint(load.block_ids):
                    first_bad = next(i for i, block_id in enumerate(load.block_ids) if block_id in failed)
                    # Not asked for again: whatever was wrong with it may be wrong the next time.
                    tracked.load_failed = True
                    tracked.kept = tracked.in_store - len(load.block_ids) + first_bad
        for request_id in request_ids:
            if (found := self._tracked.get(request_id)) is not None:
                found.loading = None

    def finished(self, request: Request) -> bool:
        """Forget a request. True if its blocks must be kept until the workers say that it is saved."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._release(tracked)
        return tracked.saving

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            chain = PrefixChain(self._block_tokens, extra=lambda first, end: self._extra(request, first, end))
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
                match = self._match(self._names.all_keys(hashes[first:present]))
                tracked.hold = match.hold
                tracked.in_store = first + match // self._names.keys_per_block
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
        """Return the blocks that are full after `count` more tokens, and neither in the store nor on their way."""
        request = tracked.request
        known = len(request.all_token_ids) if self._save_generated else request.num_prompt_tokens
        full = min(request.num_computed_tokens + count, known) // self._block_tokens
        if full <= tracked.kept:
            return None
        first, tracked.kept = tracked.kept, full
        tracked.saving = True
        hashes = tracked.chain.extend(request.all_token_ids)[first:full]
        return Save(request.request_id, hashes, list(block_ids_of(request.request_id)[first:full]))
