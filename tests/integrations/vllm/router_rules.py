"""What routers whose parsers are written in Go ask of a batch, as rules in Python.

The rules were read in their public source: llm-d's in `pkg/kvevents` of llm-d-router,
August 2026, AIBrix's in `pkg/cache/kvcache`, in the version that reads events as maps.
They are no substitute for running these parsers, which happens nowhere here.
"""

from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec

__all__ = ["Read", "read_as_aibrix", "read_as_llm_d"]

_PREFIX_KINDS: Final = ("full_attention", "mla_attention", "sink_full_attention")


@attrs.frozen
class Read:
    """What a router makes of an event: hashes are of 64 bits there."""

    kind: str
    hashes: list[int]
    medium: str
    parent: int | None = None
    tokens: int = 0


def read_as_llm_d(batch: bytes) -> list[Read]:
    """Raise ValueError where llm-d refuses a batch, or leaves out an event."""
    time_s, events, *rank = msgspec.msgpack.decode(batch)
    _check(isinstance(time_s, float), "the time is a fraction of 64 bits")
    _check(not rank or rank[0] is None or (_is_int(rank[0]) and rank[0] >= 0), "the rank is none, or 0 or more")
    return [_read_by_llm_d(event) for event in events]


def _read_by_llm_d(event: dict[str, Any]) -> Read:
    kind, medium = event["type"], event.get("medium")
    hashes = [_hash(name, slice(-8, None)) for name in event["block_hashes"]]
    group = event.get("group_idx")
    _check(medium is None or isinstance(medium, str), "a medium is a text")
    _check(group is None or (_is_int(group) and group >= 0), "a group is a number")
    tier = (medium or "gpu").lower()
    if kind == "BlockRemoved":
        return Read(kind, hashes, tier)
    _check(kind == "BlockStored", "there are two kinds of events of blocks")
    _check(group is None or event.get("kv_cache_spec_kind") in _PREFIX_KINDS, "a group says what it is")
    _check_tokens(event)
    _check(event.get("lora_id") is None or _is_int(event["lora_id"]), "an adapter has a number, or none")
    _check(event.get("lora_name") is None or isinstance(event["lora_name"], str), "its name is a text")
    _check_extra_keys(event)
    parent = event.get("parent_block_hash")
    return Read(kind, hashes, tier, None if parent is None else _hash(parent, slice(-8, None)), len(event["token_ids"]))


def read_as_aibrix(batch: bytes) -> list[Read]:
    """Raise ValueError where AIBrix refuses a batch."""
    time_s, events, *rank = msgspec.msgpack.decode(batch)
    _check(isinstance(time_s, float), "the time is a fraction of 64 bits")
    _check(not rank or (len(rank) == 1 and _is_int(rank[0])), "the rank, if any, is a number, and nothing follows")
    return [_read_by_aibrix(event) for event in events]


def _read_by_aibrix(event: dict[str, Any]) -> Read:
    kind = event["type"]
    _check(kind in ("BlockStored", "BlockRemoved"), "there are two kinds of events of blocks")
    optional: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(["lora_id", "group_idx", "kv_cache_spec_sliding_window"], _is_int),
        **dict.fromkeys(
            ["medium", "lora_name", "kv_cache_spec_kind", "locality"], lambda value: isinstance(value, str)
        ),
    }
    for name, is_right in optional.items():
        _check(event.get(name) is None or is_right(event[name]), f"{name} has a type")
    hashes = [_hash(name, slice(8)) for name in event["block_hashes"]]
    if kind == "BlockRemoved":
        return Read(kind, hashes, event.get("medium") or "")
    _check_tokens(event)
    _check_extra_keys(event)
    parent = event.get("parent_block_hash")
    return Read(
        kind,
        hashes,
        event.get("medium") or "",
        None if parent is None else _hash(parent, slice(8)),
        len(event["token_ids"]),
    )


def _check_tokens(event: dict[str, Any]) -> None:
    tokens, size = event["token_ids"], event["block_size"]
    _check(all(_is_int(token) and 0 <= token < 1 << 32 for token in tokens), "tokens are of 32 bits")
    _check(_is_int(size) and size > 0, "a block has tokens")
    _check(len(tokens) == size * len(event["block_hashes"]), "each block has all its tokens")


def _check_extra_keys(event: dict[str, Any]) -> None:
    extra_keys = event.get("extra_keys")
    _check(extra_keys is None or isinstance(extra_keys, list), "extra keys are a list")
    _check(all(keys is None or isinstance(keys, list) for keys in extra_keys or ()), "each block has a list, or none")


def _hash(name: object, some: slice) -> int:
    """A number of 64 bits, or some eight bytes of a longer name."""
    if isinstance(name, bytes):
        _check(len(name) >= 8, "a name has eight bytes")
        return int.from_bytes(name[some], "big")
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < 1 << 64:
        return name
    raise ValueError(f"{name!r} names no block")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(is_right: bool, rule: str) -> None:
    if not is_right:
        raise ValueError(f"not so: {rule}")
