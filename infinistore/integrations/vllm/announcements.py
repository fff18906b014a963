"""Says why engines of one name share nothing, in one line at their start.

Keys of blocks have a fingerprint of everything that must be alike, so that an engine
never reads blocks that it cannot use. Nobody sees from a fingerprint what differs. So
each engine leaves a value that says what its own stands for, and reads those of others.
It is as easily evicted as any value: this is a help, and nothing depends on it.
"""

import json
import logging
from collections.abc import Mapping

from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record
from infinistore.integrations.vllm.names import BlockNames

__all__ = ["announce"]

LOG = logging.getLogger("vllm.infinistore")

_MOST_OTHERS = 16
_MOST_CHARACTERS = 80
_WORDS = {"shards": "tensor parallel shards"}


def announce(store: BlockingStore, names: BlockNames, record: Record) -> None:
    """Tell other engines of this name what the fingerprint stands for, and warn of
    those that have another one. Never fails.
    """
    folder = names.announcement.rpartition("/")[0] + "/"
    try:
        others = [key for key in store.keys(folder, limit=_MOST_OTHERS) if key != names.announcement]
        values = store.get_many(others) if others else []
        store.put(names.announcement, json.dumps(dict(names.facts)).encode())
    except InfiniStoreException as error:
        record.failed("announcement", error)
        return
    for value in values:
        if value is not None and (differences := _differences(bytes(value), names.facts)):
            LOG.warning(
                "InfiniStore: an engine of this model has blocks that differ, and neither reads the other's: %s",
                differences,
            )


def _differences(value: bytes, own: Mapping[str, str]) -> str:
    """Return what differs, in words; empty if the value cannot be read."""
    try:
        facts = json.loads(value)
    except ValueError:
        return ""
    if not isinstance(facts, dict) or facts.get("namespace") != own.get("namespace"):
        return ""
    return "; ".join(
        f"{_WORDS.get(name, name)} {_short(facts.get(name))}, here {_short(own.get(name))}"
        for name in sorted({*facts, *own})
        if facts.get(name) != own.get(name)
    )


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
