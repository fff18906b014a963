"""What an engine says of itself in the store: to other engines of its model, which warn
in one line if they share no blocks with it, and to routers.

Keys of blocks contain a fingerprint of everything that two engines must have in common,
so that an engine never reads blocks that it cannot use. A fingerprint does not show
which setting differs. So each engine stores the settings behind its fingerprint, and
compares them with those of the others. The value lasts three minutes, and is renewed
every minute, so that nobody is warned of an engine that has ended. It can be evicted
like any other value; no function of an engine depends on it.

A router reads from the same value how the engine's blocks are called, and from a second
one at which URL the engine is. Whoever may write to the store can write both: what
cannot be right is read as if it were not there.

All of it is done in the background: an engine without requests does nothing by itself,
and a listing takes a store with many keys a while.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames
from infinistore.integrations.vllm.settings import is_engine_url
from infinistore.keys import check_keys

LOG = logging.getLogger("vllm.infinistore")

ANNOUNCED_PREFIX: Final = "vllm-engines"
"""Both kinds of keys begin with it: a listing looks at every key of the store."""
ENGINES_PREFIX: Final = "vllm-engines/"
"""Keys of what engines say of their blocks begin with it."""
URLS_PREFIX: Final = "vllm-engines-at/"
"""Keys of what engines say of themselves begin with it; their URL follows."""
READER: Final = "/reader"
"""The end of the key of an engine that writes no blocks."""
_LASTS_S: Final = 180.0
_AGAIN_S: Final = 60.0
_LOOKS: Final = 10
"""How often an engine that only reads looks for one that writes its blocks."""
_MOST_CHARACTERS: Final = 80
_SHARDS: Final = "shards"
_WORDS: Final = {_SHARDS: "tensor parallel shards"}
_MOST_BYTES: Final = 4 * 1024 * 1024
_MOST_KEYS: Final = 100_000
"""Limit of the keys of one block."""
_MOST_TOKENS: Final = 1_000_000
"""Limit of the tokens of a block, and of the blocks with one hash tag."""
_MOST: Final = 2**50
_LONGEST_HASH: Final = "{" + "0" * 16 + "}" + "0" * 32


@attrs.frozen
class AnnouncedBlocks:
    """What a router needs to ask the store for the blocks of a prompt: those of the
    first group of layers that attends to all tokens.
    """

    names: BlockNames
    """The names of the blocks of that group; `facts` are written and not read."""
    block_tokens: int
    hash_tokens: int
    """How many tokens a hash stands for."""
    bytes_per_token: int
    """Size of one token in all groups of layers and in all ranks together."""

    @classmethod
    def read(cls, value: bytes) -> "AnnouncedBlocks | None":
        """Return what is in a value; None if that is nothing, or cannot be right."""
        told = _object(value).get("blocks")
        if not isinstance(told, dict) or not isinstance(told.get("layers"), list):
            return None
        try:
            names = BlockNames(told["prefix"], tuple(told["layers"]), told["shards"], told["group_blocks"])
            blocks = cls(names, told["block_tokens"], told["hash_tokens"], told["bytes_per_token"])
        except KeyError:
            return None
        return blocks if blocks._can_be_right() else None

    def write(self) -> bytes:
        """Return the value for `names.announcement`."""
        names = self.names
        told = {
            "prefix": names.prefix,
            "layers": names.layers,
            "shards": names.shards,
            "group_blocks": names.group_blocks,
            "block_tokens": self.block_tokens,
            "hash_tokens": self.hash_tokens,
            "bytes_per_token": self.bytes_per_token,
        }
        return _value(names, told)

    def _can_be_right(self) -> bool:
        names = self.names
        return (
            _is_count(names.shards, _MOST_KEYS)
            and 0 < names.keys_per_block <= _MOST_KEYS
            and _is_count(names.group_blocks, _MOST_TOKENS, least=0)
            and _is_count(self.block_tokens, _MOST_TOKENS)
            and _is_count(self.hash_tokens, _MOST_TOKENS)
            and _is_count(self.bytes_per_token, _MOST)
            and self.block_tokens % self.hash_tokens == 0
            and _are_keys(names.layers)
            and isinstance(names.prefix, str)
            and names.prefix.startswith("vllm/")
            and _are_keys([names.key(_LONGEST_HASH, names.shards, max(names.layers, key=_bytes_of))])
        )


@attrs.frozen
class AnnouncedEngine:
    """Where an engine is."""

    url: str
    announcement: str
    """The key of what engines with the same blocks say of them; `READER` follows in
    those that only read."""
    cache_tokens: int
    """About how many tokens its own KV cache holds; 0: none."""

    @property
    def key(self) -> str:
        """The key of this."""
        return URLS_PREFIX + self.url

    @classmethod
    def read(cls, key: str, value: bytes) -> "AnnouncedEngine | None":
        """Return what is in a value; None if it cannot be right."""
        told = _object(value)
        url, announcement, cache_tokens = key.removeprefix(URLS_PREFIX), told.get("engine"), told.get("cache_tokens")
        is_right = (
            key.startswith(URLS_PREFIX)
            and is_engine_url(url)
            and isinstance(announcement, str)
            and announcement.startswith(ENGINES_PREFIX)
            and _are_keys([announcement + READER])
            and _is_count(cache_tokens, _MOST, least=0)
        )
        return cls(url, str(announcement), int(cache_tokens or 0)) if is_right else None

    def write(self) -> bytes:
        """Return the value for `key`."""
        return json.dumps({"engine": self.announcement, "cache_tokens": self.cache_tokens}).encode()


def _object(value: bytes) -> dict[str, Any]:
    """Return the object in a value; an empty one if it is none."""
    if len(value) > _MOST_BYTES:
        return {}
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _value(names: BlockNames, blocks: Mapping[str, object] | None) -> bytes:
    return json.dumps({"facts": dict(names.facts), "blocks": blocks}).encode()


def _is_count(value: object, most: int, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_keys(texts: Sequence[Any]) -> bool:
    try:
        check_keys(texts)
    except (TypeError, ValueError):
        return False
    return True


def _bytes_of(text: str) -> int:
    return len(text.encode())


class Announcement:
    """Announces one engine to the others of its model, and warns of those that differ.
    Never fails.

    `writes`: this engine writes blocks. `blocks` and `engine` are for routers.
    """

    def __init__(
        self,
        store: BlockingStore,
        names: BlockNames,
        record: Record,
        *,
        writes: bool,
        blocks: AnnouncedBlocks | None = None,
        engine: AnnouncedEngine | None = None,
    ) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._writes = writes
        self._looks = 1 if writes else _LOOKS
        self._key = names.announcement + ("" if writes else READER)
        self._values = {self._key: _value(names, None) if blocks is None else blocks.write()}
        if engine is not None:
            self._values[engine.key] = engine.write()

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
            for key, value in self._values.items():
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
    return key.endswith(READER)


def _differences(value: bytes, own: Mapping[str, str]) -> str:
    """Return what differs, in words; empty if the value cannot be read."""
    facts = _object(value).get("facts")
    if not isinstance(facts, dict) or facts.get("namespace") != own.get("namespace"):
        return ""
    differing = [name for name in sorted({*facts, *own}) if facts.get(name) != own.get(name)]
    told = "; ".join(
        f"{_WORDS.get(name, name)} {_short(facts.get(name))}, here {_short(own.get(name))}" for name in differing
    )
    same = "start both with the same --tensor-parallel-size, or set shards to the same number in both"
    return f"{told} ({same})" if _SHARDS in differing else told


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
