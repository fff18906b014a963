"""The last act, with a disk: other prompts fill the pool, the server is restarted, and
decode finds what was stored before, on disk.

1. The server is asked to make both prompts durable (`flush`).
2. Prefill stores other prompts, as many as the pool holds. They evict the first ones.
3. The server ends, and another one starts at the same address, on the same disk.
4. Decode asks for prompt A, loads it, and checks every byte, as it did before. Its
   store finds the new server by itself.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

import trio
from attrs import frozen

from infinistore.demo.display import Display
from infinistore.demo.layout import KVLayout, block_keys, chunk_names
from infinistore.demo.messages import DemoError, Job
from infinistore.demo.processes import OwnServer, WorkerProcess
from infinistore.demo.result import RestartResult
from infinistore.demo.settings import CONTEXT_TOKENS
from infinistore.demo.text import VOCABULARY_SIZE, Prompt
from infinistore.demo.watching import watched

if TYPE_CHECKING:
    from infinistore.client import AsyncStore

__all__ = ["RestartAct", "other_prompts"]

_RECOVERY_CHECK_S = 0.02


@frozen
class RestartAct:
    """Those who play, and who shows it. `store` is the router's own connection."""

    server: OwnServer
    store: "AsyncStore"
    layout: KVLayout
    prefill: WorkerProcess
    decode: WorkerProcess
    display: Display

    async def play(self, prompts: Sequence[Prompt], capacity_bytes: int) -> RestartResult:
        """Play it after `prompts` were stored in a pool of this size.

        Raises `DemoError` if a block is missing afterwards, or a byte is wrong.
        """
        first = prompts[0]
        async with watched(self.store, self.display):
            durable_blocks = await self._flush(prompts)
            filled_bytes = await self._fill(first.tokens, capacity_bytes)
            await self._show_what_is_left(first)
        self.display.act("Restart", "the server ends, and another one starts on the same disk")
        await self.server.restart()
        self.display.server_started(self.server)
        recovery_s = await self._recover()
        async with watched(self.store, self.display):
            self.display.prompt_started(Prompt(first.name, "again, after the restart", first.tokens))
            decoded = await self.decode.run(Job(first.name, first.tokens))
        return RestartResult(first, durable_blocks, filled_bytes, capacity_bytes, recovery_s, decoded)

    async def _flush(self, prompts: Sequence[Prompt]) -> int:
        """Wait until all blocks of the prompts are on disk; return how many there
        are.
        """
        self.display.act("Disk", "prefill and decode never wait for it; we do, once")
        keys = list(dict.fromkeys(key for prompt in prompts for key in self._keys(prompt)))
        started = time.perf_counter()
        durable = await self.store.flush(keys)
        if durable < len(keys):
            raise DemoError(
                f"the disk took {durable:,} of {len(keys):,} blocks: it failed, or it is too slow. Give another folder "
                "(TMPDIR), and see whether `infinistore doctor --disk` finds something"
            )
        self.display.flushed(durable, durable * self.layout.block_bytes, time.perf_counter() - started)
        return durable

    async def _fill(self, tokens: Sequence[int], capacity_bytes: int) -> int:
        """Store other prompts, as many as the pool holds; return their bytes."""
        filled_bytes = 0
        for number, other in enumerate(other_prompts(self.layout, tokens, capacity_bytes), 1):
            self.display.prompt_started(Prompt(f"C{number}", "others, to fill the pool", other))
            filled_bytes += (await self.prefill.run(Job(f"C{number}", other))).written_bytes
        return filled_bytes

    async def _show_what_is_left(self, prompt: Prompt) -> None:
        keys = self._keys(prompt)
        found = await self.store.exists_many(keys)
        self.display.left(prompt.name, len(keys), found.in_memory, sum(found))

    async def _recover(self) -> float:
        """Wait until the new server has read the index of its disk; return how long
        that took. It serves meanwhile, but finds less.
        """
        started = time.perf_counter()
        while True:
            statistics = await self.store.stats()
            assert statistics.disk is not None
            if statistics.disk.disks[0].state != "recovering":
                break
            await trio.sleep(_RECOVERY_CHECK_S)
        seconds = time.perf_counter() - started
        self.display.recovered(statistics.store.keys, statistics.disk.disks[0].keys)
        return seconds

    def _keys(self, prompt: Prompt) -> list[str]:
        return block_keys(self.layout, chunk_names(self.layout, prompt.tokens))


def other_prompts(layout: KVLayout, tokens: Sequence[int], capacity_bytes: int) -> Iterator[list[int]]:
    """Yield prompts that fill a pool of `capacity_bytes` together: `tokens` again and
    again, each time behind another token that no text has, so that they share no block.
    """
    chunks = -(-capacity_bytes // layout.chunk_footprint_bytes)
    most = max(1, CONTEXT_TOKENS // layout.chunk_tokens)
    first = VOCABULARY_SIZE
    while chunks > 0:
        yield [first, *islice(cycle(tokens), min(chunks, most) * layout.chunk_tokens - 1)]
        chunks -= most
        first += 1
