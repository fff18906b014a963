"""Warns at the start of an engine, in one line, why it shares no blocks with other
engines of the same model.

Keys of blocks contain a fingerprint of everything that two engines must have in common,
so that an engine never reads blocks that it cannot use. A fingerprint does not show
which setting differs. So each engine stores the settings behind its fingerprint, and
compares them with those of the others. The value lasts three minutes, and is renewed
every minute, so that nobody is warned of an engine that has ended. It can be evicted
like any other value; no function depends on it.

A router (`infinistore.routing`) reads the same values: each also says how the engine's
blocks are called. An engine that knows its URL puts one value more, under that.

All of it is done in the background: an engine without requests does nothing by itself,
and a listing takes a store with many keys a while.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames

ENGINES_PREFIX: Final = "vllm-engines/"
"""Of the keys of what engines have in common."""
URLS_PREFIX: Final = "vllm-urls/"
"""Of the keys of engines that know their URLs."""
_MOST: Final = 2**40
_MOST_LAYERS: Final = 100_000

LOG = logging.getLogger("vllm.infinistore")

_LASTS_S: Final = 180.0
_AGAIN_S: Final = 60.0
_LOOKS: Final = 10
"""How often an engine that only reads looks for one that writes its blocks."""
_MOST_CHARACTERS: Final = 80
_SHARDS: Final = "shards"
_WORDS: Final = {_SHARDS: "tensor parallel shards"}
_READER: Final = "/reader"
"""The end of the key of an engine that writes no blocks."""


@attrs.frozen
class AnnouncedBlocks:
    """How the blocks of engines are called: those of their first group of layers that
    attends to all tokens.
    """

    names: BlockNames
    """With the layers of this group."""
    block_tokens: int
    """The tokens of a block: a multiple of `hash_tokens`."""
    hash_tokens: int
    """How many tokens a hash stands for; each block ends with one."""
    bytes_per_token: int
    """What a token takes, all groups and ranks together, if none had a window."""

    def value(self) -> dict[str, object]:
        """Return what an announcement says of them."""
        names = self.names
        return {
            "prefix": names.prefix,
            "layers": names.layers,
            "shards": names.shards,
            "group_blocks": names.group_blocks,
            "block_tokens": self.block_tokens,
            "hash_tokens": self.hash_tokens,
            "bytes_per_token": self.bytes_per_token,
        }

    @classmethod
    def read(cls, value: bytes) -> "AnnouncedBlocks | None":
        """Return what an announcement says of them; None if that is nothing, or not in
        order: whoever may write to the store can put anything there.
        """
        said = _object(_object(value).get("blocks"))
        prefix, layers = said.get("prefix"), _labels(said.get("layers"))
        shards, group = _number(said.get("shards")), _number(said.get("group_blocks"))
        block, of_hash = _number(said.get("block_tokens")), _number(said.get("hash_tokens"))
        size = _number(said.get("bytes_per_token"))
        if not isinstance(prefix, str) or prefix.count("/") < 2 or not layers:
            return None
        if not (shards and block and of_hash and size) or block % of_hash:
            return None
        return cls(BlockNames(prefix, layers, shards, group), block, of_hash, size)


@attrs.frozen
class AnnouncedEngine:
    """An engine that knows where clients reach it."""

    url: str
    announcement: str
    """The key under which it says how its blocks are called."""
    cache_tokens: int
    """How many tokens its own cache holds."""

    @property
    def key(self) -> str:
        """The key of this value."""
        return URLS_PREFIX + self.url

    def value(self) -> bytes:
        """Return what is put there."""
        return json.dumps({"engine": self.announcement, "cache_tokens": self.cache_tokens}).encode()

    @classmethod
    def read(cls, key: str, value: bytes) -> "AnnouncedEngine | None":
        """Return the engine of a key and its value; None if that is none."""
        said = _object(value)
        announcement, tokens = said.get("engine"), _number(said.get("cache_tokens"))
        url = key.removeprefix(URLS_PREFIX)
        if url == key or not isinstance(announcement, str) or not tokens:
            return None
        return cls(url, announcement, tokens)


def _object(value: object) -> Mapping[str, Any]:
    """Return an object of JSON, or of JSON's text; an empty one if it is none."""
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int:
    """Return a number that can be meant; 0 for anything else."""
    return value if type(value) is int and 0 < value <= _MOST else 0


def _labels(value: object) -> tuple[str, ...]:
    """Return the labels of layers; none for anything else."""
    if not isinstance(value, list) or len(value) > _MOST_LAYERS:
        return ()
    return tuple(value) if all(isinstance(one, str) for one in value) else ()


class Announcement:
    """Announces one engine to the others of its model, and warns of those that differ.
    Never fails.

    `writes`: this engine writes blocks, which are called like `blocks`. `url`: where
    clients reach it, if it knows, and `cache_tokens` is the size of its own cache.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        record: Record,
        *,
        writes: bool,
        blocks: AnnouncedBlocks | None = None,
        url: str = "",
        cache_tokens: int = 0,
    ) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._writes = writes
        self._looks = 1 if writes else _LOOKS
        self._key = names.announcement + ("" if writes else _READER)
        said = {"facts": dict(names.facts), "blocks": blocks and blocks.value()}
        self._values = [(self._key, json.dumps(said).encode())]
        if url:
            engine = AnnouncedEngine(url, self._key, max(1, cache_tokens))
            self._values.append((engine.key, engine.value()))

    def renewing(self) -> Iterator[float]:
        """A task for the background: announce, again and again."""
        while True:
            self.announce()
            yield _AGAIN_S

    def announce(self) -> None:
        """Announce once, and warn of others if they are not known yet."""
        # A success is not recorded: it has more time than a lookup, and says nothing of
        # those. First of all it is put: of two engines that start together, one at
        # least sees the other.
        try:
            for key, value in self._values:
                self._store.put(key, value, ttl_s=_LASTS_S)
        except InfiniStoreException as error:
            self._record.failed("announcement", error)
        if self._looks:
            try:
                others = dict(self._others())
            except InfiniStoreException as error:
                self._record.failed("announcement", error)
            else:
                self._looks -= 1
                self._tell(others)

    def _others(self) -> Iterator[tuple[str, bytes]]:
        folder = self._names.announcement.rpartition("/")[0] + "/"
        for page in key_pages(self._store, folder):
            for key, value in zip(page, self._store.get_many(page), strict=True):
                if value is not None and key != self._key:
                    yield key, bytes(value)

    def _tell(self, others: Mapping[str, bytes]) -> None:
        """Warn of engines that differ, if one writes what the other asks for."""
        if self._names.announcement in others:
            self._looks = 0
        if self._writes:
            for value in others.values():
                if differences := _differences(value, self._names.facts):
                    LOG.warning(
                        "InfiniStore: an engine of this model has blocks that differ, and neither reads the"
                        " other's: %s",
                        differences,
                    )
        elif self._names.announcement not in others:
            told = [_differences(value, self._names.facts) for key, value in others.items() if not _is_reader(key)]
            if differing := [differences for differences in told if differences]:
                self._looks = 0
                LOG.warning(
                    "InfiniStore: this engine reads nothing and computes every prompt: it only reads, and no engine"
                    " that writes has blocks that suit it: %s",
                    " / ".join(differing),
                )


def _is_reader(key: str) -> bool:
    return key.endswith(_READER)


def _differences(value: bytes, own: Mapping[str, str]) -> str:
    """Return what differs, in words; empty if the value cannot be read."""
    facts = _object(_object(value).get("facts"))
    if not facts or facts.get("namespace") != own.get("namespace"):
        return ""
    differing = [name for name in sorted({*facts, *own}) if facts.get(name) != own.get(name)]
    told = "; ".join(
        f"{_WORDS.get(name, name)} {_short(facts.get(name))}, here {_short(own.get(name))}" for name in differing
    )
    return f"{told} (start both with the same --tensor-parallel-size)" if _SHARDS in differing else told


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
