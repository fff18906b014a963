"""The rules for keys, in one place for clients, protocol and core; batches on the wire.

A key is text: at least one character, no NUL, at most `MAX_KEY_BYTES` bytes of UTF-8. A
batch is a single text on the wire, with its keys joined by NUL. Joining, splitting and
checking a thousand keys thus takes a few calls that run in C, at both ends of every
request.
"""

from collections.abc import Iterable, Sequence
from typing import AnyStr

MAX_KEY_BYTES = 1024
MAX_JOINED_KEYS = 1_000_000
_SEPARATOR = "\0"


class CheckedKeys(list[str]):
    """Valid keys and their joined text, a by-product of the check. Immutable.

    Raises:
        TypeError, ValueError: a key is invalid; the message names the first one.
    """

    __slots__ = ("joined",)

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__(keys)
        try:
            text = "".join(self)
        except TypeError:
            text = _SEPARATOR
        if text.isascii() and _SEPARATOR not in text and all(self):  # the usual case
            self.joined = text if len(self) == 1 else _SEPARATOR.join(self)
            if len(self.joined) <= MAX_KEY_BYTES or _find_long(self.joined, _SEPARATOR, MAX_KEY_BYTES) < 0:
                return
        self.joined = check_keys(self)


def check_keys(keys: Sequence[str], max_key_bytes: int = MAX_KEY_BYTES) -> str:
    """Return the keys as one text.

    Raises:
        TypeError, ValueError: a key is invalid; the message names the first one.
    """
    try:
        text = "".join(keys)
    except TypeError:
        number, key = next((i, k) for i, k in enumerate(keys) if not isinstance(k, str))
        raise TypeError(f"key {number} is {type(key).__name__}, not text (str): {key!r:.60}") from None
    if _SEPARATOR in text:
        number, key = next((i, k) for i, k in enumerate(keys) if _SEPARATOR in k)
        raise ValueError(f"key {number} has a NUL character, which no key may have: {key[:40]!r}")
    joined = _SEPARATOR.join(keys)
    _check_lengths(joined, keys, max_key_bytes)
    return joined


def join_keys(keys: Sequence[str]) -> str:
    """Return valid keys as one text."""
    return keys.joined if isinstance(keys, CheckedKeys) else _SEPARATOR.join(keys)


def split_keys(joined: str) -> list[str]:
    """Return the keys of a text from `join_keys`.

    Raises:
        ValueError: a key is invalid, or there are too many.
    """
    if not joined:
        return []
    keys = joined.split(_SEPARATOR, MAX_JOINED_KEYS)
    if len(keys) > MAX_JOINED_KEYS:
        raise ValueError(f"more than {MAX_JOINED_KEYS} keys in one batch")
    _check_lengths(joined, keys, MAX_KEY_BYTES)
    return keys


def check_distinct(keys: Sequence[str]) -> None:
    """Raise `ValueError` for a duplicate key in a put: which value should win?"""
    if len(set(keys)) == len(keys):
        return
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {key[:60]!r} is named twice in one put")
        seen.add(key)


def _check_lengths(joined: str, keys: Sequence[str], max_key_bytes: int) -> None:
    """Check that no key is empty, too long or not text; `joined` is the joined text."""
    if not all(keys):
        raise ValueError(f"key {list(keys).index('')} is empty; a key has at least one character")
    if joined.isascii() and _find_long(joined, _SEPARATOR, max_key_bytes) < 0:  # the usual case
        return
    try:
        data, is_text = joined.encode(), True
    except UnicodeEncodeError as error:
        data, is_text = joined[: error.start].encode(), False
    start = _find_long(data, b"\0", max_key_bytes)
    if start >= 0:
        number = data.count(b"\0", 0, start)
        raise ValueError(
            f"key {number} has {len(keys[number].encode(errors='replace'))} bytes; at most {max_key_bytes} are allowed,"
            f" so hash long keys: {keys[number][:40]!r}..."
        )
    if not is_text:
        number = data.count(b"\0")
        raise ValueError(f"key {number} has a lone surrogate, which is not text: {keys[number][:40]!r}")


def _find_long(joined: AnyStr, separator: AnyStr, max_length: int) -> int:
    """Return where the first key begins that is longer than `max_length`; -1 if none
    is."""
    start = 0
    while len(joined) - start > max_length:
        end = joined.rfind(separator, start, start + max_length + 1)
        if end < 0:
            return start
        start = end + 1
    return -1


def hash_tag(key: str) -> str:
    """Return the text in the first `{...}` of a key; the key if there is none. Keys
    with one tag are a group, which one node of a cluster owns."""
    start = key.find("{")
    if start >= 0:
        end = key.find("}", start)
        if end > start + 1:
            return key[start + 1 : end]
    return key
