"""Finds out what a prompt's tokens are, and how much of it the store has. Whatever
fails costs knowledge, never the request: then a prompt is judged by its length.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from infinistore.client import AsyncStore
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.prefix_keys import PrefixChain
from infinistore.integrations.vllm.announcements import AnnouncedBlocks
from infinistore.integrations.vllm.blocks import salt_key
from infinistore.routing.fleet import UNANNOUNCED, Member, usual_blocks
from infinistore.routing.http import InThread
from infinistore.routing.metrics import Metrics
from infinistore.routing.prompts import Known, Prompt, TokenMemory, joined
from infinistore.scheduling import Request

_MOST_KEYS: Final = 384
"""How many keys of a prompt the store is asked for; at least two of each block."""
_IN_A_THREAD: Final = 16_384
"""From so many tokens on, hashes are computed beside the loop."""
_PER_TOKEN_S: Final = 2e-6


class Lookups:
    """Looks prompts up. `tokenize` asks an engine; `within_s` bounds that for a short
    prompt, and the store's answer.
    """

    def __init__(
        self,
        store: AsyncStore | None,
        tokenize: Callable[[Member, Mapping[str, Any]], Awaitable[Sequence[int] | None]],
        metrics: Metrics,
        *,
        within_s: float,
        in_thread: InThread = trio.to_thread.run_sync,
        memory: TokenMemory | None = None,
    ) -> None:
        self._store = store
        self._tokenize = tokenize
        self._metrics = metrics
        self._within_s = within_s
        self._in_thread = in_thread
        self._memory = memory or TokenMemory()

    async def request_of(self, prompt: Prompt, members: Sequence[Member]) -> Request:
        """Return what a scheduler wants to know of a prompt for these engines."""
        if any(member.models.get(prompt.model) == "" for member in members):
            return Request(prompt.length)  # an adapter, whose blocks are called otherwise
        blocks = usual_blocks([member.blocks for member in members]) or UNANNOUNCED
        known = await self._known(prompt, members, blocks)
        if known is None:
            self._metrics.prompts.labels("length").inc()
            return Request(prompt.length)
        self._metrics.prompts.labels("tokens").inc()
        chain = (blocks.names.prefix, prompt.salt)
        if known.chain != chain:
            known = attrs.evolve(known, hashes=(), chain=chain)
        if len(known.tokens) - len(known.hashes) * blocks.hash_tokens < _IN_A_THREAD:
            hashes = _hashes(blocks, prompt.salt, known)
        else:
            hashes = await self._in_thread(_hashes, blocks, prompt.salt, known)
        self._memory.add(prompt, attrs.evolve(known, hashes=hashes))
        each = blocks.block_tokens // blocks.hash_tokens
        of_blocks = hashes[each - 1 :: each]
        stored = await self._stored(blocks, of_blocks)
        return Request(max(1, len(known.tokens)), of_blocks, blocks.block_tokens, stored)

    async def _known(self, prompt: Prompt, members: Sequence[Member], blocks: AnnouncedBlocks) -> Known | None:
        """Return the tokens of a prompt, or None."""
        if prompt.tokens:
            return Known(prompt.tokens)
        if prompt.question is None:
            return None
        count, known = self._memory.find(prompt)
        if known is not None and count == len(prompt.marks):
            return known
        idle = min(members, key=lambda member: member.under_way)
        with trio.move_on_after(self._within_s + _PER_TOKEN_S * prompt.length):
            if known is not None and prompt.is_chat:
                rest = await self._tokenize(idle, prompt.rest(count))
                if rest is not None and (whole := joined(known.tokens, rest)) is not None:
                    tokens, same = whole
                    return Known(tokens, known.hashes[: same // blocks.hash_tokens], known.chain)
            found = await self._tokenize(idle, prompt.question)
            return Known(found) if found else None
        return None

    async def _stored(self, blocks: AnnouncedBlocks, hashes: Sequence[str]) -> int:
        """Return how many leading blocks the store has; 0 if it does not say."""
        if self._store is None or blocks is UNANNOUNCED or not hashes:
            return 0
        keys, each = blocks.names.some_keys(hashes, most=_MOST_KEYS)
        try:
            with trio.move_on_after(self._within_s):
                blocks_found: int = await self._store.match_prefix(keys) // each
                return blocks_found
        except InfiniStoreException:
            pass
        self._metrics.store_failures.inc()
        return 0


def _hashes(blocks: AnnouncedBlocks, salt: str, known: Known) -> list[str]:
    chain = PrefixChain(
        blocks.hash_tokens,
        extra=lambda first, end: salt_key(salt, first),
        group_blocks=blocks.names.group_blocks,
        known=known.hashes,
    )
    return chain.extend(known.tokens)
