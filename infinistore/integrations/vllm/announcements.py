"""Warns at the start of an engine, in one line, why it shares no blocks with other
engines of the same model.

Keys of blocks contain a fingerprint of everything that two engines must have in common,
so that an engine never reads blocks that it cannot use. A fingerprint does not show
which setting differs. So each engine stores the settings behind its fingerprint, and
compares them with those of the others. The value lasts three minutes, and is renewed
every minute, so that nobody is warned of an engine that has ended. It can be evicted
like any other value; no function depends on it.

All of it is done in the background: an engine without requests does nothing by itself,
and a listing takes a store with many keys a while.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Final

from infinistore.blocking import BlockingStore, key_pages
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.blocks import BlockNames

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


class Announcement:
    """Announces one engine to the others of its model, and warns of those that differ.
    Never fails.

    `writes`: this engine writes blocks.
    """

    def __init__(self, store: BlockingStore, names: BlockNames, record: Record, *, writes: bool) -> None:
        self._store = store
        self._names = names
        self._record = record
        self._writes = writes
        self._looks = 1 if writes else _LOOKS
        self._key = names.announcement + ("" if writes else _READER)

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
            self._store.put(self._key, json.dumps(dict(self._names.facts)).encode(), ttl_s=_LASTS_S)
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
    try:
        facts = json.loads(value)
    except ValueError:
        return ""
    if not isinstance(facts, dict) or facts.get("namespace") != own.get("namespace"):
        return ""
    differing = [name for name in sorted({*facts, *own}) if facts.get(name) != own.get(name)]
    told = "; ".join(
        f"{_WORDS.get(name, name)} {_short(facts.get(name))}, here {_short(own.get(name))}" for name in differing
    )
    return f"{told} (start both with the same --tensor-parallel-size)" if _SHARDS in differing else told


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
