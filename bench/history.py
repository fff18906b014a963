"""How many tokens a turn computes when a conversation is longer than the model allows.

    python bench/history.py
    python bench/history.py --limit 32768 --turn 400

A conversation with a system prompt of 1,000 tokens goes on until it is six times as long
as the limit. The lengths of its turns are log-normal (sigma 0.6) with a mean of `--turn`
tokens, from a fixed seed. All that was computed once is in the store, so that a turn computes
what comes after the longest beginning it shares with the turn before. Whole blocks are
not counted: an engine computes up to one block more.

Nothing is timed: the figures do not depend on the machine.
"""

import argparse
import random
from typing import Final

from infinistore.integrations.history import cut

__all__ = ["computed_tokens", "conversation"]

_SYSTEM_TOKENS: Final = 1000
_ROWS: Final = ((8192, 200), (24_576, 200), (24_576, 600), (131_072, 200))


def conversation(limit: int, turn: int, *, seed: int = 1) -> list[int]:
    """Return the tokens of the system prompt and of each turn."""
    chance = random.Random(seed)
    turns = 6 * limit // turn
    return [_SYSTEM_TOKENS, *(max(16, int(chance.lognormvariate(-0.18, 0.6) * turn)) for _ in range(turns))]


def computed_tokens(lengths: list[int], limit: int, keep: float) -> tuple[float, float]:
    """Return what a turn computes on average, and the tokens of its prompt."""
    before: list[int] = []
    computed = sent = 0
    for count in range(2, len(lengths) + 1):
        kept = cut(lengths[:count], limit, keep=keep)
        shared = next((place for place, pair in enumerate(zip(before, kept, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(before), len(kept)) if shared is None else shared
        computed += sum(lengths[number] for number in kept[shared:])
        sent += sum(lengths[number] for number in kept)
        before = kept
    turns = len(lengths) - 1
    return computed / turns, sent / turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, help="tokens that a prompt may have")
    parser.add_argument("--turn", type=int, default=200, help="tokens of a turn, on average (default: 200)")
    options = parser.parse_args()
    rows = _ROWS if options.limit is None else ((options.limit, options.turn),)
    print("Tokens computed a turn (and, of cuts, the part of what sliding computes)\n")
    print("| limit | tokens a turn | no store | sliding | cut to 75 % | cut to 50 % | prompt at 75 % |")
    print("|---|---|---|---|---|---|---|")
    for limit, turn in rows:
        lengths = conversation(limit, turn)
        sliding, without = computed_tokens(lengths, limit, 1.0)
        three_quarters, prompt = computed_tokens(lengths, limit, 0.75)
        half, _ = computed_tokens(lengths, limit, 0.5)
        print(
            f"| {limit:,} | {turn} | {without:,.0f} | {sliding:,.0f} "
            f"| {three_quarters:,.0f} ({three_quarters / sliding:.3f}) | {half:,.0f} ({half / sliding:.3f}) "
            f"| {prompt / without:.2f} of sliding's |"
        )


if __name__ == "__main__":
    main()
