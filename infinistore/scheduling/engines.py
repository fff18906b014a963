"""An inference engine as a scheduler sees it: how long its queue is in seconds, how
long its link to the store is occupied, and which blocks it probably has.

Nobody has to ask the engine for any of it. A scheduler knows what it sent and when the
first token of each answer came; the rates follow from these times. The engine's own
cache is guessed from what it was sent: a list of hashes, as long as the cache is large,
of which the least recently used ones fall out.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Literal

import attrs

from infinistore.scheduling.advice import price_s
from infinistore.scheduling.rates import BusyShare, LinkRate, PrefillRate

__all__ = ["Engine", "Loads", "Plan", "RecentBlocks", "Request"]

Loads = Literal["always", "faster", "never"]
"""When an engine loads what the store has of a prompt: always, if that is cheaper than
to compute it (`infinistore.scheduling.LoadAdvisor`), or never.
"""

_SHARE_OF_LATEST: Final = 0.1
"""What the latest request counts for in the mean of all."""


class RecentBlocks:
    """The blocks that an engine was sent last: a guess of what its prefix cache has."""

    def __init__(self, most: int) -> None:
        """`most` is the number of blocks that the cache holds, 0 for no cache.

        Raises:
            ValueError: it is below 0.
        """
        if most < 0:
            raise ValueError(f"a cache cannot hold {most} blocks")
        self._most = most
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, hashes: Iterable[Hashable]) -> int:
        """Return how many of these are here, counted from the first to the first gap.
        This does not count as use.
        """
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, hashes))

    def add(self, hashes: Sequence[Hashable]) -> None:
        """Add a prompt's blocks, or use them again. The tail of a prompt falls out
        before its head, which other prompts may begin with, too.
        """
        for one in reversed(hashes):
            self._blocks[one] = None
            self._blocks.move_to_end(one)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def discard(self, hashes: Iterable[Hashable]) -> None:
        """Remove blocks that the engine has evicted, where it tells (KV events)."""
        for one in hashes:
            self._blocks.pop(one, None)


@attrs.frozen
class Request:
    """A prompt that is to be sent to one of several engines."""

    tokens: int = attrs.field(validator=attrs.validators.ge(1))
    """Its length."""
    hashes: Sequence[Hashable] = ()
    """One for each full block, which stands for all tokens up to the block's end, as
    the keys in the store do. Empty if the tokens are not known.
    """
    block_tokens: int = attrs.field(default=16, validator=attrs.validators.ge(1))
    """The tokens of a block."""
    stored_blocks: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """How many leading blocks the store has: its answer to `match_prefix`."""

    def tokens_of(self, blocks: int) -> int:
        """Return how many tokens need not be computed with so many leading blocks: the
        last token of a prompt always is, for its result is the first of the answer.
        """
        return min(blocks * self.block_tokens, self.tokens - 1)


@attrs.frozen
class Plan:
    """What a request would do at an engine. Times are seconds from the moment of
    asking.
    """

    cached_tokens: int
    """Leading tokens in the engine's own cache, by guess."""
    reused_tokens: int
    """Leading tokens that are not computed: cached, or loaded."""
    loaded_s: float
    """When they are there; 0 if nothing is loaded."""
    load_s: float
    """How long the link is occupied with them."""
    compute_s: float
    """How long the engine computes the rest."""
    queued_s: float
    """When the engine has computed the prompts that were sent before."""

    @property
    def first_token_s(self) -> float:
        """When the first token of the answer comes."""
        return max(self.queued_s, self.loaded_s) + self.compute_s


@attrs.frozen
class _Sent:
    plan: Plan
    tokens: int
    ready_at: float


class Engine:
    """What a scheduler knows of one engine.

    `now` is seconds of the scheduler's clock in every call, and never goes back. An
    engine computes prompts in the order in which they are ready (first come, first
    served), and loads them beside that, one after the other.
    """

    def __init__(
        self,
        name: str,
        *,
        cache_blocks: int,
        bytes_per_token: int,
        tokens_per_s: float = 10_000.0,
        bytes_per_s: float = 1e9,
        loads: Loads = "always",
    ) -> None:
        """Describe an engine that has nothing to do.

        Args:
            name: what names it to people, for example its URL.
            cache_blocks: the blocks of a `Request` that its own cache holds; vLLM
                prints its size as "GPU KV cache size", in tokens.
            bytes_per_token: the KV cache of a token, in bytes.
            tokens_per_s: how fast it computes prompts, a guess until it was measured.
            bytes_per_s: how fast it reads from the store, likewise.
            loads: whether it loads what the store has.

        Raises:
            ValueError: a number is not above 0, or `loads` is none of the three.
        """
        if loads not in ("always", "faster", "never"):
            raise ValueError(f'loads must be "always", "faster" or "never", not {loads!r}')
        if bytes_per_token <= 0:
            raise ValueError(f"bytes_per_token must be above 0, not {bytes_per_token}")
        self.name = name
        self.cache = RecentBlocks(cache_blocks)
        """What it probably has; where its KV events are known, correct it by them."""
        self.prefill = PrefillRate(tokens_per_s)
        """How fast it computes, measured by the times between first tokens."""
        self.link = LinkRate(bytes_per_s)
        """How fast it reads from the store; report what its connector measures."""
        self._bytes_per_token = bytes_per_token
        self._loads = loads
        self._busy = BusyShare()
        self._sent: dict[Hashable, _Sent] = {}
        self._by_ready: list[tuple[float, int, Hashable, _Sent]] = []
        self._count = itertools.count()
        self._compute_s = 0.0
        self._tokens = 0
        self._began = 0.0
        self._link_free_at = 0.0
        self._usual_s = 0.0
        self._others = 0

    def __repr__(self) -> str:
        return f"<Engine {self.name}: {self.requests} requests without a first token>"

    @property
    def requests(self) -> int:
        """How many requests wait for their first token."""
        return len(self._sent)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens their prompts have."""
        return self._tokens

    def queued_s(self, now: float) -> float:
        """Return how long the prompts that wait there take from now on, in seconds."""
        head, others_s = self._head(), self._others * self._usual_s
        if head is None:
            return others_s
        return others_s + max(0.0, self._compute_s - min(max(0.0, now - self._began_at(head)), head.plan.compute_s))

    def link_queued_s(self, now: float) -> float:
        """Return when the link has loaded all that it was sent, in seconds from now."""
        return max(0.0, self._link_free_at - now) if self._sent else 0.0

    def busy_share(self, now: float) -> float:
        """Return the share of the last minute in which it computed, 0 to 1."""
        head = self._head()
        return self._busy.at(now, busy_since=self._began_at(head) if head is not None else math.inf)

    def plan(self, request: Request, now: float) -> Plan:
        """Return what the request would do here, without sending it."""
        cached = request.tokens_of(self.cache.leading(request.hashes))
        stored = request.tokens_of(request.stored_blocks)
        queued_s = self.queued_s(now)
        compute = Plan(cached, cached, 0.0, 0.0, self.prefill.seconds(cached, request.tokens), queued_s)
        if stored <= cached or self._loads == "never":
            return compute
        load_s = (stored - cached) * self._bytes_per_token / self.link.bytes_per_s
        loaded_s = self.link_queued_s(now) + load_s
        load = Plan(cached, stored, loaded_s, load_s, self.prefill.seconds(stored, request.tokens), queued_s)
        if self._loads == "always":
            return load
        busy = self.busy_share(now)
        return min(load, compute, key=lambda plan: price_s(plan.first_token_s, plan.compute_s, busy))

    def send(self, name: Hashable, request: Request, now: float) -> Plan:
        """Take into account that `request` was sent here, and return its plan. `name`
        stands for it in later calls.

        Raises:
            ValueError: a request of that name waits here already.
        """
        if name in self._sent:
            raise ValueError(f"{self.name} was sent the request {name!r} before, and has not answered yet")
        plan = self.plan(request, now)
        ready_at = now + plan.loaded_s
        if plan.load_s:
            self._link_free_at = ready_at
        sent = self._sent[name] = _Sent(plan, request.tokens, ready_at)
        heapq.heappush(self._by_ready, (ready_at, next(self._count), name, sent))
        self._compute_s += plan.compute_s
        self._usual_s += (plan.compute_s - self._usual_s) * (_SHARE_OF_LATEST if self._usual_s else 1.0)
        self._tokens += request.tokens
        self.cache.add(request.hashes)
        return plan

    def note_others(self, requests: int) -> None:
        """Take into account that so many requests wait there that it was not sent by
        this scheduler. Each counts as what was sent lately in the mean.
        """
        self._others = requests

    def answered(self, name: Hashable, now: float) -> None:
        """Take into account that the first token of a request came. One that is not
        known is ignored.
        """
        sent = self._sent.get(name)
        if sent is None:
            return
        if sent is self._head() and (not sent.plan.load_s or sent.ready_at <= self._began):
            # When it began is known: it had nothing to load, or waited for the engine.
            self.prefill.measured(sent.plan.reused_tokens, sent.tokens, now - self._began_at(sent), now)
        self._end(name, sent, now)

    def lost(self, name: Hashable, now: float) -> None:
        """Take into account that a request ended without a token: it was cancelled, or
        failed. One that is not known is ignored.
        """
        sent = self._sent.get(name)
        if sent is not None:
            self._end(name, sent, now, computed=sent is self._head())

    def _end(self, name: Hashable, sent: _Sent, now: float, *, computed: bool = True) -> None:
        if computed:
            self._busy.busy(self._began_at(sent), now)
            self._began = now
        del self._sent[name]
        self._compute_s = self._compute_s - sent.plan.compute_s if self._sent else 0.0
        self._tokens -= sent.tokens

    def _head(self) -> _Sent | None:
        """Return the prompt that it computes now, or computes first."""
        while self._by_ready:
            _, _, name, sent = self._by_ready[0]
            if self._sent.get(name) is sent:
                return sent
            heapq.heappop(self._by_ready)
        return None

    def _began_at(self, sent: _Sent) -> float:
        """Return when it began with this prompt, if it was the next one."""
        return max(self._began, sent.ready_at)
