"""Blocks of prompts that are worth keeping are pinned in the store: of system prompts
in a list, and of requests with a high priority.

A request says which blocks it begins with, so only prompts that are in use are pinned.
They are pinned again every minute: a server that restarts forgets pins, and a block is
there only when it has been written. Those of which no request has begun for `pin_s` are
unpinned, as are the longest unused above a number of blocks. The store has a bound of
its own, and what it refuses is tried again a minute later. Pins outlive the engine by
about `pin_s`, so that it finds these blocks after a restart; then they end by
themselves.
"""

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeAlias

from infinistore.blocking import BlockingStore
from infinistore.errors import ConfigError, InfiniStoreException, LimitExceeded
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames, Group, alignment, hash_tokens
from infinistore.integrations.vllm.lookup import block_hashes

__all__ = ["Pins", "read_prompts"]

_MOST_PROMPTS: Final = 1000
_MOST_KEYS: Final = 1024
"""How many keys one call pins, and at least one block."""
_SOON_S: Final = 1.0
_AGAIN_S: Final = 60.0
_LONGER_S: Final = 2 * _AGAIN_S
"""By how much the store's pins outlive `pin_s`: none ends while it is renewed."""
_TRIES: Final = 10
"""How often a block is tried again that is not there yet, before the next minute."""

_REMEDY: Final = (
    "pins of engines that have ended count until their pin_s is over: `infinistore unpin --prefix vllm/` ends all pins"
    " of vLLM, and engines that compute pin theirs again within a minute"
)

_Block: TypeAlias = tuple[int, str]
"""The place of its group, and its hash."""


def read_prompts(path: str, tokenize: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return the tokens of the prompts in a file: a JSON list of texts and of lists of
    tokens.

    Raises:
        ConfigError: it cannot be read.
    """

    def problem(what: str) -> ConfigError:
        return ConfigError(f"kv_connector_extra_config: pin_prompts_file {path}: {what}")

    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise problem(f"{error.strerror}; give a file that vLLM's scheduler can read") from None
    except ValueError as error:
        raise problem(f"it is no JSON ({error}); write a list of texts, or of lists of tokens") from None
    if not isinstance(found, list) or len(found) > _MOST_PROMPTS:
        raise problem(f"write a list of at most {_MOST_PROMPTS} prompts")
    prompts = []
    for number, prompt in enumerate(found):
        if isinstance(prompt, str) and prompt:
            prompts.append(list(tokenize(prompt)))
        elif isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            prompts.append(prompt)
        else:
            raise problem(f"entry {number} is neither a text nor a list of tokens")
    return prompts


class Pins:
    """What is pinned for one engine, at most `most` blocks. One thread uses it; another
    one asks the store, and waits by `pause`, which returns whether to stop.

    `prompts` are token lists. A request that begins with one has that part pinned; if
    it has at most the priority `priority`, all of its prompt (in vLLM, less is
    earlier).
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        groups: Sequence[Group],
        record: Record,
        *,
        prompts: Sequence[Sequence[int]] = (),
        priority: int | None = None,
        pin_s: float = 3600.0,
        most: int = 100_000,
        clock: Callable[[], float],
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._unit = hash_tokens(groups)
        self._alignment = alignment(groups)
        self._priority = priority
        self._pin_s = pin_s
        self._most = most
        self._clock = clock
        self.learn_groups(groups)
        # The last token of a text can be another one when more text follows.
        ends = {len(prompt): (len(prompt) - 1) // self._alignment * self._alignment for prompt in prompts}
        heads = {tuple(prompt[: ends[len(prompt)]]) for prompt in prompts} - {()}
        self._heads = sorted(heads, key=len, reverse=True)
        self._used: OrderedDict[_Block, float] = OrderedDict()
        """When a request last began with each block, in that order."""
        self._due: OrderedDict[_Block, None] = OrderedDict()
        """What the next job pins."""
        self._unused: deque[_Block] = deque()
        """What it unpins."""
        self._again_s = clock() + _AGAIN_S
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="infinistore-pin")
        self.job: Future[int] | None = None
        """What the thread does, if it does something."""

    def learn_groups(self, groups: Sequence[Group]) -> None:
        """Learn of the layers of other stages of a pipeline."""
        self._groups = list(groups)
        most_layers = max((len(group.layers) for group in groups), default=1)
        self._at_once = max(1, _MOST_KEYS // max(1, most_layers * self._names.shards))

    def worth(self, tokens: Sequence[int], prompt_tokens: int, priority: int) -> int:
        """Return how many leading tokens of a request are worth a pin."""
        if self._priority is not None and priority <= self._priority:
            return prompt_tokens // self._alignment * self._alignment
        beginning = tuple(tokens[: len(self._heads[0])]) if self._heads else ()
        return next((len(head) for head in self._heads if beginning[: len(head)] == head), 0)

    def use(self, hashes: Sequence[str], tokens: int) -> None:
        """Note that a request begins with `tokens` tokens worth a pin; `hashes` are
        those of its blocks.
        """
        now = self._clock()
        for place, group in enumerate(self._groups):
            for block_hash in block_hashes(group, hashes, group.needed(tokens), self._unit):
                block = (place, block_hash)
                if block not in self._used:
                    self._due[block] = None
                self._used[block] = now
                self._used.move_to_end(block)
        while len(self._used) > self._most:
            self._drop(next(iter(self._used)))

    def go_on(self) -> None:
        """Note what the last job has done, and begin the next one if there is one."""
        if self.job is not None and self.job.done():
            for _ in range(self.job.result()):
                self._unused.popleft()
            self.job = None
        now = self._clock()
        if now >= self._again_s:
            self._again_s = now + _AGAIN_S
            for block, used_s in list(self._used.items()):
                if used_s + self._pin_s < now:
                    self._drop(block)
            self._due = OrderedDict.fromkeys(self._used)
        if self.job is None and (self._due or self._unused):
            self.job = self._thread.submit(self._work, list(self._due), list(self._unused))
            self._due = OrderedDict()

    def close(self) -> None:
        """End the thread. What is pinned stays so for a while."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _drop(self, block: _Block) -> None:
        del self._used[block]
        self._due.pop(block, None)
        self._unused.append(block)

    def _work(self, due: Sequence[_Block], unused: Sequence[_Block]) -> int:
        """Unpin and pin, in the thread. Return how many of `unused` were unpinned."""
        unpinned = 0
        try:
            for blocks in self._parts(unused):
                self._store.unpin(self._keys(blocks))
                unpinned += len(blocks)
            left, refused = self._pin(due)
            for _ in range(_TRIES):  # they are being written
                if not left or self._pause(_SOON_S):
                    break
                left, more = self._pin(left)
                refused = refused or more
        except InfiniStoreException as error:
            self._record.failed("pin", error)
        else:
            if due and not refused:
                self._record.succeeded("pin")
        return unpinned

    def _pin(self, due: Sequence[_Block]) -> tuple[list[_Block], bool]:
        """Pin blocks. Return those that are not there, or not all of them, and whether
        the store refused some.
        """
        left: list[_Block] = []
        refused = False
        for blocks in self._parts(due):
            keys = self._keys(blocks)
            try:
                if self._store.pin(keys, ttl_s=self._pin_s + _LONGER_S) < len(keys):
                    left += blocks
            except LimitExceeded as error:  # others may be smaller, or be pinned already
                self._record.failed("pin", LimitExceeded(f"{error}; {_REMEDY}"))
                refused = True
        return left, refused

    def _parts(self, blocks: Sequence[_Block]) -> Iterator[Sequence[_Block]]:
        for first in range(0, len(blocks), self._at_once):
            yield blocks[first : first + self._at_once]

    def _keys(self, blocks: Sequence[_Block]) -> list[str]:
        return [key for place, block in blocks for key in self._names.all_keys([block], self._groups[place].layers)]
