"""`infinistore simulate`: what a pool, a link and engines would give for a trace."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import rich_click as click

from infinistore.cli.options import SIZE, json_option
from infinistore.cli.output import print_json, print_line
from infinistore.errors import ConfigError
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.scheduling.simulation import Fleet, Outcome
    from infinistore.traces import TracedRequest

_SHARES: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Of all that a trace has, the pools that are tried unless others are given."""
_BAR: Final = 30
_POSITIVE: Final = click.FloatRange(min=0, min_open=True)


@click.command("simulate", short_help="Simulate what a pool of some size would give for a trace.")
@click.argument("trace", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--pool-size", "pools", metavar="SIZE", type=SIZE, multiple=True, help="A pool to try; repeat it for more."
)
@click.option("--engines", metavar="COUNT", type=click.IntRange(min=1), default=8, show_default=True, help="Engines.")
@click.option(
    "--tokens-per-s", metavar="COUNT", type=_POSITIVE, default=15_926, show_default=True,
    help="How fast one computes prompts. The default is Qwen3-32B on two H100, by llm-d.",
)  # fmt: skip
@click.option(
    "--bytes-per-token", metavar="SIZE", type=SIZE, default="256KiB", show_default=True,
    help="The KV cache of a token, all layers together.",
)  # fmt: skip
@click.option(
    "--cache-tokens", metavar="COUNT", type=click.IntRange(min=0), default=302_080, show_default=True,
    help='What an engine caches by itself; vLLM prints it as "GPU KV cache size".',
)  # fmt: skip
@click.option(
    "--link-gbit", metavar="GBIT", type=_POSITIVE, default=25, show_default=True,
    help="Each engine's link to the store, in Gbit/s.",
)  # fmt: skip
@click.option(
    "--load", metavar="SHARE", type=_POSITIVE,
    help="Have requests come so much faster or slower that, without any reuse, they would take this share of the "
    "engines' time. Default: as in the trace.",
)  # fmt: skip
@click.option(
    "--policy", metavar="NAME", default="soonest", show_default=True,
    help="Which engine a request goes to: soonest, least-work, round-robin, or another package's.",
)  # fmt: skip
@click.option("--requests", metavar="COUNT", type=click.IntRange(min=2), help="Take so many, from the first.")
@json_option
def command(
    *,
    trace: Path,
    pools: tuple[int, ...],
    engines: int,
    tokens_per_s: float,
    bytes_per_token: int,
    cache_tokens: int,
    link_gbit: float,
    load: float | None,
    policy: str,
    requests: int | None,
    as_json: bool,
) -> None:
    """Simulate engines that share a store, for several sizes of its pool: how many
    tokens need not be computed, and when first tokens come.

    TRACE is written by `infinistore route --record`, or has a JSON object on each
    line, as the traces published with Mooncake:
    {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS,
    "hash_ids": [an id for each 512 tokens of the prompt]}.

    \b
        infinistore simulate trace.jsonl --engines 8 --link-gbit 100
    """
    from infinistore.scheduling import create_policy
    from infinistore.scheduling.simulation import Fleet, Simulation, at_load
    from infinistore.traces import TRACE_BLOCK_TOKENS

    create_policy(policy)  # an error of it is known before a long run
    asked = _read(trace)[:requests]
    fleet = Fleet(
        engines=engines,
        tokens_per_s=tokens_per_s,
        bytes_per_token=bytes_per_token,
        cache_blocks=cache_tokens // TRACE_BLOCK_TOKENS,
        link_gbit=link_gbit,
    )
    if asked[0].arrived_s == asked[-1].arrived_s:
        raise ConfigError(f"{trace}: give at least two requests that come one after the other")
    if load is not None:
        asked = at_load(asked, load, fleet)
    block_bytes = bytes_per_token * TRACE_BLOCK_TOKENS
    all_blocks = len({block for request in asked for block in request.blocks})
    sizes = sorted(pools) or [math.ceil(share * all_blocks) * block_bytes for share in _SHARES]
    rows: dict[int, Outcome] = {}
    for size in (0, *sizes):
        blocks = size // block_bytes
        one = attrs.evolve(fleet, store_blocks=blocks, link_gbit=link_gbit if blocks else None)
        rows[size] = Simulation(one, create_policy(policy)).run(asked)
    if as_json:
        print_json({"working_set_bytes": all_blocks * block_bytes, "pools": [_figures(*row) for row in rows.items()]})
    else:
        _print(rows, asked, fleet, all_blocks * block_bytes)


def _read(file: Path) -> "list[TracedRequest]":
    from infinistore.traces import read_trace

    try:
        with file.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: it is no text") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _figures(pool_bytes: int, outcome: "Outcome") -> dict[str, float]:
    times = {name: getattr(outcome, name) for name in ("mean_s", "p50_s", "p90_s", "p99_s")}
    return {"pool_bytes": pool_bytes, "reused_ratio": 1 - outcome.computed, "busy_ratio": outcome.busy, **times}


def _print(rows: "dict[int, Outcome]", asked: "list[TracedRequest]", fleet: "Fleet", all_bytes: int) -> None:
    print_line(
        f"{len(asked):,} requests, {sum(one.tokens for one in asked) / len(asked):,.0f} tokens in the mean,"
        f" {describe_size(all_bytes)} in all; {fleet.engines} engines, {fleet.load_of(asked):.2f} of their time without"
        " reuse"
    )
    print_line(f"{'pool':>10}  {'tokens not computed':<{_BAR + 6}}  first token: mean, 90 % within")
    most = max(1 - outcome.computed for outcome in rows.values())
    for size, outcome in rows.items():
        share = 1 - outcome.computed
        bar = "#" * round(share / most * _BAR) if most else ""
        name = describe_size(size) if size else "no store"
        print_line(f"{name:>10}  {share:5.1%} {bar:<{_BAR}}  {outcome.mean_s:8.2f} s {outcome.p90_s:8.2f} s")
