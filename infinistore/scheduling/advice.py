"""Whether to load what the store has of a prompt, or to compute it.

A load pays where the link is faster than the engine computes. Which one that is
depends on both, on what waits for either, and on the length of the prompt: so it is
measured, not set. The price of a way is

    t + gpu_s * u / (1 - u)

with `t` the seconds until the first token, `gpu_s` the seconds for which the request
occupies the engine, and `u` the share of the time in which the engine is busy with
prompts: a second of a busy engine is also a second for the requests that wait, and
u / (1 - u) is how many seconds of waiting it adds to others (the mean queue of M/M/1,
Kleinrock 1975). The cheaper way is taken for all that was found, or for nothing of it:
with one link the price is concave in the number of tokens loaded, since the last tokens
of a prompt are the dearest to compute, so that a part is never the best.
"""

import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import attrs

from infinistore.scheduling.rates import BusyShare, LinkRate, PrefillRate

__all__ = ["Advice", "AdviceStatistics", "LoadAdvisor", "Reason", "price_s"]

MOST_BUSY: Final = 0.95
"""The price does not rise beyond this share: at 1 it would be infinite."""


def price_s(first_token_s: float, compute_s: float, busy_share: float) -> float:
    """Return what a way costs all requests together, in seconds.

    `first_token_s` is how long the request itself waits for its first token,
    `compute_s` how long it occupies the engine, and `busy_share`, 0 to 1, the share of
    the time in which the engine computes prompts.
    """
    share = min(busy_share, MOST_BUSY)
    return first_token_s + compute_s * share / (1 - share)


class Reason(enum.Enum):
    """Why a request was advised to load or to compute."""

    NOTHING = "nothing to load"
    UNMEASURED = "unmeasured"
    """No load or no prefill was measured yet: load."""
    CHEAPER = "loading is cheaper"
    DEARER = "computing is cheaper"
    """The only reason not to load."""
    TRIAL = "trial"
    """Computing seems cheaper, but that was not measured lately: load, and give up when
    computing would have taken as long."""


@attrs.frozen
class Advice:
    """What to do for one request, and the figures it follows from, in seconds. They are
    None if they are not known.
    """

    load: bool
    """Whether to load what was found, all of it."""
    reason: Reason
    load_price_s: float | None = None
    compute_price_s: float | None = None
    limit_s: float | None = None
    """After how long to give the load up, and to compute; None: never."""


@attrs.frozen
class AdviceStatistics:
    """What was advised so far. Requests that found nothing count nowhere."""

    loads: int
    """Requests that were advised to load."""
    trials: int
    """Those of them that load only to measure the link."""
    skipped_loads: int
    """Requests that were advised to compute what the store has."""
    skipped_tokens: int
    """The tokens of these that the store has."""


class LoadAdvisor:
    """Advises an engine's requests, by what its workers and its scheduler measure.

    Workers are numbered by their rank. They read their shares of a prompt side by side,
    so the slowest one counts. A store keeps blocks in memory or on disks, which differ
    in speed, so the two are measured apart.

    A request gets the same advice as often as it is asked for, until `forget`. So that
    a link that has recovered is noticed, one request in 20 that should not load does,
    and so does one when the link was not measured for a minute. Such a trial ends when
    computing would have taken as long, so that it costs no more than that.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        rank_bytes_per_token: int,
        ranks: int = 1,
        least_step_tokens: int = 256,
        expires_s: float = 60.0,
        trial_every: int = 20,
        most_remembered: int = 100_000,
    ) -> None:
        """Begin without measurements.

        Args:
            clock: returns seconds, and never goes back.
            rank_bytes_per_token: the KV cache of a token, in bytes, that each rank
                reads: the whole token's divided by the ranks.
            ranks: the number of workers.
            least_step_tokens: steps with fewer prompt tokens are not measured; they
                cost as much as their fixed part.
            expires_s: how long a measurement of a link counts.
            trial_every: of so many requests that should not load, one does.
            most_remembered: the number of requests whose advice is kept; beyond, the
                oldest are forgotten.

        Raises:
            ValueError: a number is not above 0.
        """
        if min(rank_bytes_per_token, ranks, expires_s, trial_every, most_remembered) <= 0:
            raise ValueError("sizes, numbers and times of a LoadAdvisor must be above 0")
        self._clock = clock
        self._rank_bytes_per_token = rank_bytes_per_token
        self._least_step_tokens = least_step_tokens
        self._expires_s = expires_s
        self._trial_every = trial_every
        self._most_remembered = most_remembered
        self._prefill = PrefillRate(10_000)
        self._busy = BusyShare()
        self._memory = [_Medium() for _ in range(ranks)]
        self._disk = [_Medium() for _ in range(ranks)]
        self._given: OrderedDict[Hashable, Advice] = OrderedDict()
        self._untried = 0
        self._loads = self._trials = self._skipped_loads = self._skipped_tokens = 0

    def step(self, began: float, ended: float, chunks: Iterable[tuple[int, int]]) -> None:
        """Report a step of the engine, from `began` to `ended` on the clock.

        `chunks` are the parts of prompts that it computed, each as its first token and
        its end. A step without any only decoded, which says nothing of prefill.
        """
        chunks = [(first, end) for first, end in chunks if end > first]
        if not chunks:
            return
        self._busy.busy(began, ended)
        tokens = sum(end - first for first, end in chunks)
        if tokens >= self._least_step_tokens:
            # One chunk of as many tokens, at the same mean position, costs as much.
            position = sum((end - first) * (first + end) / 2 for first, end in chunks) / tokens
            first = max(0, round(position - tokens / 2))
            self._prefill.measured(first, first + tokens, ended - began, ended)

    def loaded(self, rank: int, size_bytes: int, seconds: float, *, disk: bool = False) -> None:
        """Report that a worker has read `size_bytes` in `seconds`.

        Reads that ran beside each other are one report, with the seconds in which at
        least one was under way. Report long ones while they go on, if only 0 bytes in
        so many seconds: or a link that has become slow is not noticed before they end.
        `disk` tells where the store kept the blocks.
        """
        self._medium(rank, disk).rate.measured(size_bytes, seconds, self._clock())

    def waiting(self, rank: int, size_bytes: int, *, disk: bool = False) -> None:
        """Report that a worker has still to read `size_bytes`, in place of what was
        reported before.
        """
        self._medium(rank, disk).set_waiting(size_bytes, self._clock())

    def compute_s(self, first: int, end: int) -> float:
        """Return how long tokens `first` to `end` of a prompt take to compute."""
        return self._prefill.seconds(first, end)

    @property
    def busy_share(self) -> float:
        """The share of the last minute in which the engine computed prompts, 0 to 1."""
        return self._busy.at(self._clock())

    @property
    def prefers_loading(self) -> bool | None:
        """Whether a prompt of 4,096 tokens loads from the store's memory faster than it
        is computed, if nothing waits: the two sides of the break-even point. None as
        long as one of them is not known.
        """
        now = self._clock()
        load_s = self._load_s(4096, 0, now, queued=False)
        if load_s is None or not self._prefill_is_known() or not self._is_fresh(4096, 0, now):
            return None
        return load_s < self.compute_s(0, 4096)

    @property
    def statistics(self) -> AdviceStatistics:
        """What was advised so far."""
        return AdviceStatistics(self._loads, self._trials, self._skipped_loads, self._skipped_tokens)

    def advise(
        self,
        request: Hashable,
        *,
        tokens: int,
        cached_tokens: int,
        stored_tokens: int,
        disk_tokens: int = 0,
        queued_s: float = 0.0,
    ) -> Advice:
        """Return whether `request` should load what the store has of its prompt.

        Args:
            request: what names it, in every call for it.
            tokens: the length of its prompt.
            cached_tokens: the leading tokens that the engine has itself.
            stored_tokens: the leading tokens that it would have with what the store
                has, the engine's own included.
            disk_tokens: how many of those between the two are on disks.
            queued_s: how long the engine is busy with the prompts before this one.
        """
        given = self._given.get(request)
        if given is not None:
            return given
        advice = self._new_advice(tokens, cached_tokens, stored_tokens, disk_tokens, queued_s)
        self._given[request] = advice
        if len(self._given) > self._most_remembered:
            self._given.popitem(last=False)
        return advice

    def forget(self, request: Hashable) -> None:
        """Forget a request that has ended. One that is not known is ignored."""
        self._given.pop(request, None)

    def _new_advice(self, tokens: int, cached: int, stored: int, on_disk: int, queued_s: float) -> Advice:
        found = stored - cached
        on_disk = min(on_disk, found)
        if found <= 0:
            return Advice(load=False, reason=Reason.NOTHING)
        now = self._clock()
        in_memory = found - on_disk
        load_s, share = self._load_s(in_memory, on_disk, now), 1.0
        if load_s is None or not self._prefill_is_known():
            advice = Advice(load=True, reason=Reason.UNMEASURED)
        else:
            busy = self._busy.at(now)
            rest_s, all_s = self.compute_s(stored, tokens), self.compute_s(cached, tokens)
            load_price = price_s(max(queued_s, load_s) + rest_s, rest_s, busy)
            compute_price = price_s(queued_s + all_s, all_s, busy)
            reason, limit_s = Reason.CHEAPER, None
            if load_price > compute_price:
                reason = Reason.DEARER
                self._untried += 1
                if self._untried >= self._trial_every or not self._is_fresh(in_memory, on_disk, now):
                    self._untried = 0
                    self._trials += 1
                    reason, limit_s = Reason.TRIAL, all_s - rest_s
                    share = min(1.0, limit_s / load_s)
            advice = Advice(reason is not Reason.DEARER, reason, load_price, compute_price, limit_s)
        if advice.load:
            self._loads += 1
            self._expect(share * in_memory, share * on_disk, now)
        else:
            self._skipped_loads += 1
            self._skipped_tokens += found
        return advice

    def _medium(self, rank: int, disk: bool) -> "_Medium":
        return (self._disk if disk else self._memory)[rank]

    def _prefill_is_known(self) -> bool:
        # It does not expire as a link does: an engine that only loads computes nothing
        # by which it could be measured again.
        return self._prefill.measured_at is not None

    def _load_s(self, in_memory: int, on_disk: int, now: float, *, queued: bool = True) -> float | None:
        """Return when the slowest rank has read so many tokens, by the last
        measurements; None if there are none.
        """
        slowest = 0.0
        for memory, disk in zip(self._memory, self._disk, strict=True):
            total = 0.0
            for medium, tokens in ((memory, in_memory), (disk, on_disk)):
                waiting_s = medium.waiting_s(now) if queued else 0.0
                if tokens:
                    if medium.rate.measured_at is None:
                        return None
                    total += tokens * self._rank_bytes_per_token / medium.rate.bytes_per_s
                total += waiting_s
            slowest = max(slowest, total)
        return slowest

    def _is_fresh(self, in_memory: int, on_disk: int, now: float) -> bool:
        """Whether what tokens are read from was measured lately, in all ranks."""
        media = [*(self._memory if in_memory else ()), *(self._disk if on_disk else ())]
        return all(medium.is_fresh(now, self._expires_s) for medium in media)

    def _expect(self, in_memory: float, on_disk: float, now: float) -> None:
        """Count a load as waiting until the workers report again."""
        for media, tokens in ((self._memory, in_memory), (self._disk, on_disk)):
            for medium in media:
                medium.add_waiting(tokens * self._rank_bytes_per_token, now)


class _Medium:
    """Where a rank reads from: its rate, and what is still to be read."""

    def __init__(self) -> None:
        self.rate = LinkRate(1e9)
        self._waiting_bytes = 0.0
        self._since = -math.inf

    def set_waiting(self, size_bytes: float, now: float) -> None:
        self._waiting_bytes = size_bytes
        self._since = now

    def add_waiting(self, size_bytes: float, now: float) -> None:
        self.set_waiting(self.waiting_s(now) * self.rate.bytes_per_s + size_bytes, now)

    def waiting_s(self, now: float) -> float:
        """Return when it is free, if it went on at its rate since the last report."""
        if not self._waiting_bytes:
            return 0.0
        return max(0.0, self._waiting_bytes / self.rate.bytes_per_s - (now - self._since))

    def is_fresh(self, now: float, expires_s: float) -> bool:
        """Whether it was measured lately. While something is being read, the last
        measurement counts on: one long read is no reason to begin more of them.
        """
        measured_at = self.rate.measured_at
        return measured_at is not None and (now - measured_at <= expires_s or self.waiting_s(now) > 0)
