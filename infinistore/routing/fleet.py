"""The engines behind a router: which of them are up, what they serve, and how their
blocks are called. No I/O and no clock: the caller says what happened, and when.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal, TypeAlias

from infinistore.integrations.vllm.announcements import AnnouncedBlocks, AnnouncedEngine
from infinistore.integrations.vllm.blocks import BlockNames
from infinistore.routing.http import Address
from infinistore.scheduling import Engine

Role: TypeAlias = Literal["both", "prefill", "decode"]
"""What an engine does: everything, prompts alone, or answers."""
FAILURES: Final = 3
"""After so many in a row, an engine counts as down until it answers a probe."""
UNANNOUNCED: Final = AnnouncedBlocks(BlockNames("", ()), block_tokens=16, hash_tokens=16, bytes_per_token=131_072)
"""What is guessed of the blocks of engines that do not say how theirs are called."""
_CACHE_TOKENS: Final = 262_144
"""What is guessed of their own caches."""
_MOST_TIMES: Final = 100
_WAITING: Final = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? ([0-9]+)", re.MULTILINE)


class Member:
    """One engine: its address, and what is known of it."""

    def __init__(self, address: Address, role: Role = "both") -> None:
        self.address = address
        self.role: Role = role
        self.is_up = False
        """Whether requests may go there: it has answered, and not failed since."""
        self.problem = "it has not answered yet"
        """Why it is down."""
        self.models: Mapping[str, str] = {}
        """What it serves, by name: the path of the model, or nothing for an adapter."""
        self.cards: Mapping[str, Mapping[str, Any]] = {}
        """What it says of each of them."""
        self.blocks: AnnouncedBlocks | None = None
        """How its blocks are called, if it has said so."""
        self.engine = self._new_engine(None, _CACHE_TOKENS, loads=False)
        """What is known of its queue, its cache and its speed."""
        self.under_way = 0
        """How many requests of this router it answers just now."""
        self.picked: Counter[str] = Counter()
        """How many requests it was sent, by the reason."""
        self.failed_requests = 0
        """How many it did not answer."""
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=_MOST_TIMES)
        """The times to the first token of the last streams, in seconds: as predicted,
        and as it was."""
        self._failures = 0
        self._announced: object = None

    def __repr__(self) -> str:
        return f"<Member {self.address.url}{'' if self.is_up else ', down'}>"

    def _new_engine(self, blocks: AnnouncedBlocks | None, cache_tokens: int, *, loads: bool) -> Engine:
        return Engine(
            self.address.url,
            cache_blocks=cache_tokens // (blocks or UNANNOUNCED).block_tokens,
            bytes_per_token=(blocks or UNANNOUNCED).bytes_per_token,
            loads="always" if loads else "never",
        )

    def answered(self) -> bool:
        """Note that it has answered. Return whether it was down."""
        was_down, self.is_up, self.problem, self._failures = not self.is_up, True, "", 0
        return was_down

    def status(self, now: float) -> dict[str, Any]:
        """Return what people want to see of it."""
        predicted, real = zip(*self.first_tokens, strict=True) if self.first_tokens else ((), ())
        return {
            "url": self.address.url,
            "role": self.role,
            "up": self.is_up,
            "problem": self.problem,
            "models": sorted(self.models),
            "blocks": "" if self.blocks is None else self.blocks.names.prefix,
            "requests": self.under_way,
            "waiting": self.engine.requests,
            "queue_s": round(self.engine.queued_s(now), 6),
            "link_queue_s": round(self.engine.link_queued_s(now), 6),
            "busy_ratio": round(self.engine.busy_share(now), 6),
            "first_token_s": median(real) if real else None,
            "predicted_first_token_s": median(predicted) if predicted else None,
            "picks": dict(self.picked),
            "failed": self.failed_requests,
        }

    def failed(self, problem: str) -> bool:
        """Note that it did not answer. Return whether it is down by that, or still down
        for another reason.
        """
        self._failures += 1
        if self._failures >= FAILURES or not self.is_up:
            is_news = self.is_up or problem != self.problem
            self.is_up, self.problem = False, problem
            return is_news
        return False

    def announced(self, blocks: AnnouncedBlocks | None, cache_tokens: int, *, loads: bool) -> None:
        """Note how its blocks are called, how many tokens its own cache holds, and
        whether it loads what the store is asked for.
        """
        about = (blocks, cache_tokens, loads)
        if about != self._announced:
            self._announced, self.blocks = about, blocks
            self.engine = self._new_engine(blocks, cache_tokens, loads=loads)

    def told_queue(self, metrics: str) -> None:
        """Note how many requests wait there, by the engine's own metrics. Those beyond
        this router's are others', of another router for example.
        """
        waiting = [float(count) for count in _WAITING.findall(metrics)]
        self.engine.note_others(max(0, round(sum(waiting)) - self.engine.requests))


class Fleet:
    """All engines, in the order in which they were named."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def update(self, wanted: Mapping[str, tuple[Address, Role]]) -> tuple[list[Member], list[Member]]:
        """Have these engines, by their URLs. Return those that are new, and those that
        are no more.
        """
        gone = [member for url, member in self._members.items() if url not in wanted or wanted[url][1] != member.role]
        for member in gone:
            del self._members[member.address.url]
        new = [Member(address, role) for url, (address, role) in wanted.items() if url not in self._members]
        self._members.update((member.address.url, member) for member in new)
        return new, gone

    def cards(self) -> dict[str, Mapping[str, Any]]:
        """Return what engines that are up say of their models, the first of each."""
        cards: dict[str, Mapping[str, Any]] = {}
        for member in self:
            if member.is_up:
                cards = {**member.cards, **cards}
        return cards

    def able(self, model: str) -> list[Member]:
        """Return the engines that are up and serve a model; an empty name is any."""
        able = [one for one in self if one.is_up]
        return [one for one in able if not model or model in one.models or not one.models]

    def learn(self, engines: Iterable[AnnouncedEngine], blocks: Mapping[str, AnnouncedBlocks]) -> list[str]:
        """Take into account what engines have announced: `blocks` by the key. Return
        what is wrong, for people.

        An engine that has announced its URL is known by that. One that has not is taken
        for one of its model, if there is but one kind. The blocks of most engines are
        asked for; those that have others are judged by lengths alone.
        """
        by_url = {engine.url.rstrip("/"): engine for engine in engines}
        found: dict[Member, tuple[AnnouncedBlocks | None, int]] = {}
        problems = []
        for member in self:
            engine = by_url.get(member.address.url)
            if engine is not None and engine.announcement in blocks:
                found[member] = blocks[engine.announcement], engine.cache_tokens
                continue
            paths = {path.rstrip("/").rpartition("/")[2] for path in member.models.values()} - {""}
            kinds = {one.names.prefix: one for one in blocks.values() if one.names.prefix.split("/")[-2] in paths}
            found[member] = next(iter(kinds.values())) if len(kinds) == 1 else None, _CACHE_TOKENS
            if len(kinds) > 1:
                problems.append(
                    f"{member.address.url} may be any of {len(kinds)} kinds of engines that announce its model, so the"
                    ' store is not asked for it: set "announce_url" in its kv_connector_extra_config'
                )
        for member, (own, cache_tokens) in found.items():
            peers = [blocks for other, (blocks, _) in found.items() if other.models.keys() & member.models.keys()]
            usual = usual_blocks(peers)
            if own is not None and usual is not None and own.names.prefix != usual.names.prefix:
                problems.append(
                    f"{member.address.url} has blocks that most engines of its model do not read"
                    f" ({own.names.prefix}, not {usual.names.prefix}), so it is judged by lengths alone"
                )
            member.announced(own, cache_tokens, loads=own == usual)
        return problems


def usual_blocks(kinds: Sequence[AnnouncedBlocks | None]) -> AnnouncedBlocks | None:
    """Return the most frequent of these, of equal ones the first."""
    by_prefix = {kind.names.prefix: kind for kind in kinds if kind is not None}
    counts = Counter(kind.names.prefix for kind in kinds if kind is not None)
    return by_prefix[counts.most_common(1)[0][0]] if counts else None
