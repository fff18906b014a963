"""A simulation of engines that share a store, behind a scheduler: what a policy, a link
and the size of a pool are worth for a trace.

An engine computes prompts one after the other, in the order in which they are ready. It
has a prefix cache of its own, and a link to the store of its own, which loads beside
the computation, one prompt after the other. What it computed is in the store from then
on, which keeps what was used last. Of the time to the first token, the answer itself,
chunked prefill and the scheduler's own time are missing.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from infinistore.scheduling.advice import LoadAdvisor
from infinistore.scheduling.engines import Engine, Loads, RecentBlocks, Request
from infinistore.scheduling.policies import Policy
from infinistore.traces import TRACE_BLOCK_TOKENS, TracedRequest

__all__ = ["Fleet", "Outcome", "Simulation", "at_load"]

_GOODPUT: Final = 0.93
"""What TCP gets of an Ethernet link's bits."""


@attrs.frozen(kw_only=True)
class Fleet:
    """The engines, their links, and their store."""

    engines: int = 8
    tokens_per_s: float = 15_926.0
    attention: float = 3.3e-5
    """How much dearer a token is for each token before it, as a share of the first."""
    bytes_per_token: int = 262_144
    cache_blocks: int = 590
    """The blocks of 512 tokens in an engine's own cache."""
    link_gbit: float | None = 25.0
    """Of each engine; None without a store."""
    store_blocks: int = 10**9
    loads: Loads = "always"
    noise: float = 0.0
    """The standard deviation of the logarithm of what things take, by what is usual."""

    def compute_s(self, first: int, end: int) -> float:
        """Return the seconds that an engine computes tokens `first` to `end`."""
        return ((end - first) + self.attention * (end * end - first * first) / 2) / self.tokens_per_s

    @property
    def bytes_per_s(self) -> float:
        """What an engine loads in a second."""
        return math.inf if self.link_gbit is None else self.link_gbit * _GOODPUT * 1e9 / 8

    def load_of(self, trace: Sequence[TracedRequest]) -> float:
        """Return the share of the engines' time that a trace takes without reuse."""
        span_s = trace[-1].arrived_s - trace[0].arrived_s
        return sum(self.compute_s(0, request.tokens) for request in trace) / self.engines / span_s


@attrs.frozen
class Outcome:
    """Times to the first token, in seconds, and where the prompts came from."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    computed: float
    """The share of all tokens that was computed."""
    busy: float
    """The share of the time in which engines computed."""
    skipped: float
    """The share of requests that computed what the store had."""
    misjudged: float
    """The median of how far the router's prediction was off, by the time it took."""


@attrs.define(eq=False)
class _Job:
    number: int
    request: TracedRequest
    arrived_s: float
    reused: int
    compute_s: float
    load_bytes: int
    load_s: float
    predicted_s: float


class _SimulatedEngine:
    """What an engine does, as opposed to what a router believes."""

    def __init__(self, fleet: Fleet, number: int, clock: Callable[[], float]) -> None:
        self.cache = RecentBlocks(fleet.cache_blocks)
        self.link_free_at = 0.0
        self.link_bytes = 0
        self.ready: deque[_Job] = deque()
        self.computing: _Job | None = None
        self.coming: dict[int, _Job] = {}
        self.view = Engine(
            f"engine-{number}",
            cache_blocks=fleet.cache_blocks,
            bytes_per_token=fleet.bytes_per_token,
            loads="never" if fleet.link_gbit is None else fleet.loads,
        )
        self.advisor = LoadAdvisor(clock, rank_bytes_per_token=fleet.bytes_per_token)


class Simulation:
    """Runs a trace once. The policy and the advice are those of a real scheduler: they
    know what they sent and when first tokens came, and measure the rest.
    """

    def __init__(self, fleet: Fleet, policy: Policy, seed: int = 1) -> None:
        self._fleet = fleet
        self._policy = policy
        self._chance = random.Random(seed)
        self._now = 0.0
        self._engines = [_SimulatedEngine(fleet, number, lambda: self._now) for number in range(fleet.engines)]
        self._by_view = {id(engine.view): engine for engine in self._engines}
        self._views = [engine.view for engine in self._engines]
        self._store = RecentBlocks(0 if fleet.link_gbit is None else fleet.store_blocks)
        self._events: list[tuple[float, int, Callable[[_SimulatedEngine, _Job], None], _SimulatedEngine, _Job]] = []
        self._order = itertools.count()
        self._ttft: list[float] = []
        self._off: list[float] = []
        self._busy_s = 0.0
        self._computed = self._skipped = 0

    def run(self, trace: Sequence[TracedRequest]) -> Outcome:
        """Run a trace of at least two requests, in the order of their arrival."""
        for number, request in enumerate(trace):
            self._advance(request.arrived_s)
            self._arrive(number, request)
        self._advance(math.inf)
        times = sorted(self._ttft)
        mean, p50, p90, p99 = sum(times) / len(times), *(times[int(p * len(times))] for p in (0.5, 0.9, 0.99))
        span_s = max(trace[-1].arrived_s - trace[0].arrived_s, 1e-9)
        return Outcome(
            *(mean, p50, p90, p99),
            self._computed / sum(request.tokens for request in trace),
            self._busy_s / span_s / self._fleet.engines,
            self._skipped / len(trace),
            sorted(self._off)[len(self._off) // 2],
        )

    def _advance(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, what, engine, job = heapq.heappop(self._events)
            what(engine, job)
        if until < math.inf:
            self._now = until

    def _at(
        self, time: float, what: Callable[[_SimulatedEngine, _Job], None], engine: _SimulatedEngine, job: _Job
    ) -> None:
        heapq.heappush(self._events, (time, next(self._order), what, engine, job))

    def _takes(self, usual_s: float) -> float:
        return usual_s * self._chance.lognormvariate(0.0, self._fleet.noise) if self._fleet.noise else usual_s

    def _arrive(self, number: int, traced: TracedRequest) -> None:
        fleet, now = self._fleet, self._now
        full = traced.blocks[: traced.tokens // TRACE_BLOCK_TOKENS]
        request = Request(traced.tokens, full, TRACE_BLOCK_TOKENS, self._store.leading(full))
        view = self._policy.pick(request, self._views, now)
        engine = self._by_view[id(view)]
        predicted = view.send(number, request, now).first_token_s
        cached = request.tokens_of(engine.cache.leading(full))
        stored = request.tokens_of(request.stored_blocks)
        reused, limit_s = max(cached, stored), math.inf
        if fleet.loads == "faster" and stored > cached:
            waiting = (*engine.ready, *engine.coming.values(), *([engine.computing] if engine.computing else ()))
            queued_s = sum(engine.advisor.compute_s(job.reused, job.request.tokens) for job in waiting)
            advice = engine.advisor.advise(
                number, tokens=traced.tokens, cached_tokens=cached, stored_tokens=stored, queued_s=queued_s
            )
            limit_s = 0.0 if not advice.load else math.inf if advice.limit_s is None else advice.limit_s
        engine.cache.add(full)
        load_bytes = (reused - cached) * fleet.bytes_per_token
        load_s = self._takes(load_bytes / fleet.bytes_per_s)
        if load_s > limit_s:  # given up then, and computed
            load_bytes, load_s, reused = round(load_bytes * limit_s / load_s), limit_s, cached
            self._skipped += 1
        compute_s = self._takes(fleet.compute_s(reused, traced.tokens))
        job = _Job(number, traced, now, reused, compute_s, load_bytes, load_s, predicted)
        self._computed += traced.tokens - reused
        if load_bytes:
            engine.coming[number] = job
            engine.link_free_at = max(engine.link_free_at, now) + load_s
            engine.link_bytes += load_bytes
            self._at(engine.link_free_at, self._loaded, engine, job)
        else:
            engine.ready.append(job)
            self._begin(engine)

    def _loaded(self, engine: _SimulatedEngine, job: _Job) -> None:
        engine.link_bytes -= job.load_bytes
        engine.view.link.measured(job.load_bytes, job.load_s, self._now)
        engine.advisor.loaded(0, job.load_bytes, job.load_s)
        engine.advisor.waiting(0, engine.link_bytes)
        engine.ready.append(engine.coming.pop(job.number))
        self._begin(engine)

    def _begin(self, engine: _SimulatedEngine) -> None:
        if engine.computing is None and engine.ready:
            job = engine.computing = engine.ready.popleft()
            self._busy_s += job.compute_s
            self._at(self._now + job.compute_s, self._answer, engine, job)

    def _answer(self, engine: _SimulatedEngine, job: _Job) -> None:
        now = self._now
        engine.computing = None
        engine.view.answered(job.number, now)
        engine.advisor.step(now - job.compute_s, now, [(job.reused, job.request.tokens)])
        engine.advisor.forget(job.number)
        if self._fleet.link_gbit is not None:
            self._store.add(job.request.blocks[: job.request.tokens // TRACE_BLOCK_TOKENS])
        took = now - job.arrived_s
        self._ttft.append(took)
        self._off.append(abs(job.predicted_s - took) / took)
        self._begin(engine)


def at_load(trace: Sequence[TracedRequest], load: float, fleet: Fleet) -> list[TracedRequest]:
    """Return a trace that comes faster or slower, so that it offers this load."""
    factor = fleet.load_of(trace) / load
    return [attrs.evolve(request, arrived_s=request.arrived_s * factor) for request in trace]
