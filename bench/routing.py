"""What a scheduler's choice of engine is worth, and what it is worth to compute rather
than to load: a simulation of engines that share a store.

    python bench/routing.py [--trace FILE] [--link-gbit 25] [--loads faster] [--json]

Without --trace it makes up requests like those of Mooncake's conversation trace
(FAST'25): as long, as often with a beginning that came before, all with one common
first block. A trace is a file in Mooncake's format (infinistore/traces.py), one of
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces for example.

The simulation is that of `infinistore simulate` (infinistore/scheduling/simulation.py).
An engine's speed is by default that of Qwen3-32B on two H100 (15,926 tokens/s,
calibrated by llm-d), with 256 KiB of KV cache for a token.

The policies `soonest`, `least-work` and `round-robin` and the advice of `--loads faster`
are those of `infinistore.scheduling`. The others are what routers of other projects do.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from infinistore.errors import ConfigError
from infinistore.scheduling import Engine, Policy, Request, create_policy, policy_names
from infinistore.scheduling.simulation import Fleet, Outcome, Simulation, at_load
from infinistore.traces import TRACE_BLOCK_TOKENS, TracedRequest, read_trace

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
