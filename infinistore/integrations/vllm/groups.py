"""The groups of layers of a model, each with a table of blocks of its own.

What a group needs after n tokens decides what is stored and read. Full attention needs
every block; a sliding window, the blocks of the last tokens; local attention, those of
the current chunk; a state (Mamba, linear attention), the one after the last block.
"""

import math
from collections.abc import Iterable, Sequence

import attrs

__all__ = ["Group", "alignment", "hash_tokens", "is_uniform"]


@attrs.frozen
class Group:
    """Layers with the same table of blocks.

    At most one of `window`, `chunk` and `state` is set; without any, the layers attend
    to all tokens.
    """

    layers: tuple[str, ...]
    """The labels of its layers, in computation order."""
    block_tokens: int
    index: int = 0
    """Its place among vLLM's tables of blocks."""
    window: int = 0
    """How many tokens back its layers attend, the current one included, plus what vLLM
    keeps besides."""
    chunk: int = 0
    """Its layers attend within chunks of so many tokens."""
    state: bool = False
    """Its layers keep one state, not keys and values of tokens."""
    offered: bool = False
    """vLLM says which states are complete; the table of blocks does not."""

    @property
    def is_full(self) -> bool:
        """Whether its layers attend to all tokens."""
        return not (self.window or self.chunk or self.state)

    def needed(self, tokens: int) -> range:
        """Return the numbers of the blocks that the token after `tokens` needs.

        `tokens` is a multiple of the block size.
        """
        end = tokens // self.block_tokens
        if self.state:
            first = max(0, tokens - 1)
        elif self.window:
            first = max(0, tokens - self.window + 1)
        else:
            first = tokens // self.chunk * self.chunk if self.chunk else 0
        return range(min(first // self.block_tokens, end), end)


def is_uniform(groups: Sequence[Group]) -> bool:
    """Whether there is one group, which attends to all tokens."""
    return len(groups) == 1 and groups[0].is_full


def hash_tokens(groups: Iterable[Group]) -> int:
    """Return how many tokens a hash stands for: each block ends with such a hash."""
    return math.gcd(*(group.block_tokens for group in groups))


def alignment(groups: Iterable[Group]) -> int:
    """Return what a number of tokens to read is a multiple of: blocks of each group end
    there.
    """
    return math.lcm(*(group.block_tokens for group in groups))
