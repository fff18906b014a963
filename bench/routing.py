"""What a scheduler's choice of engine is worth, and what it is worth to compute rather
than to load: a simulation of engines that share a store.

    python bench/routing.py [--trace FILE] [--link-gbit 25] [--loads faster] [--json]

Without --trace it makes up requests like those of Mooncake's conversation trace
(FAST'25): as long, as often with a beginning that came before, all with one common
first block. A trace is a file in Mooncake's format (infinistore/traces.py), one of
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces for example.

An engine computes prompts one after the other, in the order in which they are ready. It
has a prefix cache of its own, and a link to the store of its own, which loads beside
the computation, one prompt after the other. What it computed is in the store from then
on. Its speed is by default that of Qwen3-32B on two H100 (15,926 tokens/s, calibrated by
llm-d), with 256 KiB of KV cache for a token. Of the time to the first token, the answer
itself, chunked prefill and the router's own time are missing.

The policies `soonest`, `least-work` and `round-robin`, the engines as they see them, and
the advice of `--loads faster` are those of `infinistore.scheduling`: they know what they
sent and when the first tokens came, and measure the rest. The others are what routers of
other projects do.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from infinistore.errors import ConfigError
from infinistore.scheduling import (
    Engine,
    LoadAdvisor,
    Loads,
    Policy,
    RecentBlocks,
    Request,
    create_policy,
    policy_names,
)
from infinistore.traces import TRACE_BLOCK_TOKENS, TracedRequest, read_trace

GOODPUT: Final = 0.93
"""What TCP gets of an Ethernet link's bits."""

# The first 4,000 requests of Mooncake's conversation trace. A distribution is points
# (share, value); between two, the logarithm of the value is taken to be linear.
REQUESTS_PER_S: Final = 3.07
TICK_S: Final = 3.0  # its times have steps of three seconds
GOES_ON: Final = 0.36
"""The share of requests whose conversation goes on, so that as many blocks come again."""
FRESH_TOKENS: Final = (
    *((0, 890), (0.1, 913), (0.25, 1_619), (0.5, 5_780), (0.75, 13_985), (0.9, 26_888), (0.95, 41_053)),
    *((0.98, 72_966), (0.99, 92_455), (1, 122_889)),
)
"""The length of a prompt that begins a conversation."""
ADDED_TOKENS: Final = (
    *((0, 1), (0.1, 320), (0.25, 554), (0.5, 875), (0.75, 3_845), (0.9, 9_913), (0.95, 16_017)),
    *((0.98, 22_466), (0.99, 28_082), (1, 92_318)),
)
"""What the next turn has beyond the full blocks of the one before."""
PAUSE_S: Final = ((0, 6), (0.1, 48), (0.25, 72), (0.5, 129), (0.75, 276), (0.9, 459), (0.95, 594), (1, 1_026))
LONGEST: Final = 126_000


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
        return ((end - first) + self.attention * (end * end - first * first) / 2) / self.tokens_per_s

    @property
    def bytes_per_s(self) -> float:
        return math.inf if self.link_gbit is None else self.link_gbit * GOODPUT * 1e9 / 8

    def load_of(self, trace: Sequence[TracedRequest]) -> float:
        """Return the share of the engines' time that a trace takes without any reuse."""
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
    """Runs a trace once."""

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
        reused = max(cached, stored)
        if fleet.loads == "faster" and stored > cached:
            waiting = (*engine.ready, *engine.coming.values(), *([engine.computing] if engine.computing else ()))
            queued_s = sum(engine.advisor.compute_s(job.reused, job.request.tokens) for job in waiting)
            advice = engine.advisor.advise(
                number, tokens=traced.tokens, cached_tokens=cached, stored_tokens=stored, queued_s=queued_s
            )
            if not advice.load:
                reused = cached
                self._skipped += 1
        engine.cache.add(full)
        compute_s = self._takes(fleet.compute_s(reused, traced.tokens))
        load_bytes = (reused - cached) * fleet.bytes_per_token
        load_s = self._takes(load_bytes / fleet.bytes_per_s)
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


class _LeastOf:
    """Chooses the engine with the least of something, and of equal ones any."""

    def __init__(self, value: Callable[[Request, Engine], float]) -> None:
        self._value = value
        self._chance = random.Random(1)

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        return min(engines, key=lambda engine: (self._value(request, engine), self._chance.random()))


class _TwoChoices:
    """The one with fewer requests of two that are drawn (Mitzenmacher 2001)."""

    def __init__(self) -> None:
        self._chance = random.Random(1)

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        return min(self._chance.sample(engines, min(2, len(engines))), key=lambda engine: engine.requests)


class _CacheAware:
    """As the router of SGLang, and vLLM's, with their defaults: the engine that has most
    of the prompt, if that is half of it at least and the engines are not too unequal
    (by 32 requests and a tenth); else the one with the fewest requests.
    """

    def __init__(self) -> None:
        self._fewest = _LeastOf(_requests)

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        requests = [engine.requests for engine in engines]
        unequal = max(requests) - min(requests) > 32 and max(requests) > 1.1 * min(requests)
        best = max(engines, key=lambda engine: engine.cache.leading(request.hashes))
        if not unequal and _cached(request, best) >= 0.5 * request.tokens:
            return best
        return self._fewest.pick(request, engines, now)


def _requests(request: Request, engine: Engine) -> float:
    return engine.requests


def _cached(request: Request, engine: Engine) -> int:
    return engine.cache.leading(request.hashes) * request.block_tokens


OTHERS: Final[dict[str, Callable[[], Policy]]] = {
    "two-choices": _TwoChoices,
    "least-requests": lambda: _LeastOf(_requests),
    "least-tokens": lambda: _LeastOf(lambda request, engine: engine.prompt_tokens),
    "cache-aware": _CacheAware,
    "uncached-times-requests": lambda: _LeastOf(
        lambda request, engine: (request.tokens - _cached(request, engine)) * (engine.requests + 1)
    ),
    "most-cached": lambda: _LeastOf(lambda request, engine: -_cached(request, engine)),
}
"""The policies of other routers: prompt tokens, uncached tokens times requests (llm-d),
and most cached whatever the load (vLLM's production stack) among them.
"""


def policy_of(name: str) -> Policy:
    return OTHERS[name]() if name in OTHERS else create_policy(name)


def drawn(points: Sequence[tuple[float, float]], chance: random.Random) -> float:
    """Draw from a distribution that is given by points of it."""
    share = chance.random()
    for (below, low), (above, high) in itertools.pairwise(points):
        if share <= above:
            return math.exp(math.log(low) + (math.log(high / low)) * (share - below) / (above - below))
    raise AssertionError("the last share is 1")


def generate(requests: int, seed: int = 1) -> list[TracedRequest]:
    """Make up conversations like those of Mooncake's conversation trace: as long, with
    as much that came before (32.6 % of the blocks), and all with the same first block.
    """
    chance = random.Random(seed)
    numbers = itertools.count(1)
    due: list[tuple[float, int, tuple[int, ...]]] = []
    made = []
    now = 0.0
    for number in range(requests):
        now += chance.expovariate(REQUESTS_PER_S)
        if due and due[0][0] <= now:
            kept = heapq.heappop(due)[2]
            tokens = min(len(kept) * TRACE_BLOCK_TOKENS + round(drawn(ADDED_TOKENS, chance)), LONGEST)
        else:
            kept, tokens = (0,), round(drawn(FRESH_TOKENS, chance))
        kept = kept[: tokens // TRACE_BLOCK_TOKENS]
        blocks = kept + tuple(next(numbers) for _ in range(math.ceil(tokens / TRACE_BLOCK_TOKENS) - len(kept)))
        made.append(TracedRequest(now // TICK_S * TICK_S, tokens, 350, blocks))
        if chance.random() < GOES_ON:
            # The rest of a block gets another hash when it has grown.
            full = blocks[: tokens // TRACE_BLOCK_TOKENS]
            heapq.heappush(due, (now + drawn(PAUSE_S, chance), number, full))
    return made


def at_load(trace: Sequence[TracedRequest], load: float, fleet: Fleet) -> list[TracedRequest]:
    """Return a trace that comes faster or slower, so that it offers this load."""
    factor = fleet.load_of(trace) / load
    return [attrs.evolve(request, arrived_s=request.arrived_s * factor) for request in trace]


def table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """Return the outcomes by policy and link, as a table in Markdown."""
    links = list(next(iter(outcomes.values())))
    lines = [f"| policy | {' | '.join(links)} |", "|---" * (len(links) + 1) + "|"]
    for policy, by_link in outcomes.items():
        cells = (f"{outcome.mean_s:,.2f} / {outcome.p90_s:,.1f}" for outcome in by_link.values())
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [*(name for name in policy_names() if name not in OTHERS), *OTHERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format; made-up requests unless given")
    parser.add_argument("--requests", type=int, default=4000, help="take so many, from the first; 0 for all")
    parser.add_argument("--load", type=float, default=1.12, help="offered load without any reuse; 0: as in the trace")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=15_926.0, help="of prefill, by one engine")
    parser.add_argument("--bytes-per-token", type=int, default=262_144, help="of KV cache")
    parser.add_argument("--cache-blocks", type=int, default=590, help="of 512 tokens in an engine's own cache")
    parser.add_argument("--store-blocks", type=int, default=10**9, help="of 512 tokens in the store")
    parser.add_argument("--link-gbit", type=float, nargs="+", default=[25.0], help="of each engine; 0: no store")
    parser.add_argument("--loads", choices=("always", "faster"), default="always", help="faster: only if advised")
    parser.add_argument("--noise", type=float, default=0.0, help="sigma of the logarithm of each time; 0.3 is a lot")
    parser.add_argument("--policies", nargs="+", choices=names, default=names, metavar="POLICY", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print an object for each policy; for one link")
    parser.add_argument("--details", action="store_true", help="print all figures of each run")
    options = parser.parse_args(arguments)
    if options.json and len(options.link_gbit) > 1:
        parser.error("--json takes one --link-gbit")
    if options.trace:
        try:
            with options.trace.open() as lines:
                trace = read_trace(lines)
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            parser.error(f"--trace {options.trace}: {error}")
        trace = trace[: options.requests or None]
    else:
        trace = generate(options.requests or 4000, options.seed)
    if not trace or trace[0].arrived_s == trace[-1].arrived_s:
        parser.error("give at least two requests that come one after the other: they make the load")
    outcomes: dict[str, dict[str, Outcome]] = {name: {} for name in options.policies}
    for gbit in options.link_gbit:
        fleet = Fleet(
            engines=options.engines,
            tokens_per_s=options.tokens_per_s,
            bytes_per_token=options.bytes_per_token,
            cache_blocks=options.cache_blocks,
            link_gbit=gbit or None,
            store_blocks=options.store_blocks,
            loads=options.loads,
            noise=options.noise,
        )
        timed = at_load(trace, options.load, fleet) if options.load else trace
        link = f"{gbit:g} Gbit/s" if gbit else "no store"
        for name in options.policies:
            outcomes[name][link] = outcome = Simulation(fleet, policy_of(name), options.seed).run(timed)
            if options.details:
                figures = " ".join(f"{key} {value:.3f}" for key, value in attrs.asdict(outcome).items())
                print(f"{name:24} {link:>10} {figures}", file=sys.stderr, flush=True)
    if options.json:
        found: dict[str, Any] = {name: attrs.asdict(next(iter(by_link.values()))) for name, by_link in outcomes.items()}
        print(json.dumps(found, indent=2))
    else:
        reused = "always loading" if options.loads == "always" else "loading if that is faster"
        print(f"Mean / 90th percentile of the time to the first token, in seconds, {reused}:\n")
        print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
