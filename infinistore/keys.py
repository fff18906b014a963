"""What a key may be, checked in one place for the clients, the protocol and the core.

A key is text: at least one character, at most `MAX_KEY_BYTES` bytes of UTF-8. Batches of a thousand keys are checked by
a handful of calls that run in C, because this happens on every request.
"""

from collections.abc import Sequence

__all__ = ["MAX_KEY_BYTES", "check_distinct", "check_keys"]

MAX_KEY_BYTES = 1024


def check_keys(keys: Sequence[str], max_key_bytes: int | None = MAX_KEY_BYTES) -> None:
    """Raise `TypeError` or `ValueError`, naming the first offender, unless every key is one that a store takes.

    `max_key_bytes=None` leaves the length out, for keys that a decoder has bounded already.
    """
    try:
        joined = "".join(keys)
    except TypeError:
        number, key = next((i, k) for i, k in enumerate(keys) if not isinstance(k, str))
        raise TypeError(f"key {number} is {type(key).__name__}, not text (str): {key!r:.60}") from None
    if "" in keys:
        raise ValueError(f"key {list(keys).index('')} is empty; a key has at least one character")
    if max_key_bytes is None or (joined.isascii() and len(joined) <= max_key_bytes):
        return
    if joined.isascii():
        longest = max(map(len, keys))
    else:
        longest = max(len(_utf8(number, key)) for number, key in enumerate(keys))
    if longest > max_key_bytes:
        number, key = next((i, k) for i, k in enumerate(keys) if len(k.encode()) > max_key_bytes)
        raise ValueError(f"key {number} has {len(key.encode())} bytes; at most {max_key_bytes} are allowed: {key[:40]!r}...")


def check_distinct(keys: Sequence[str]) -> None:
    """Raise `ValueError` if a key stands twice in a put: which of the two values should win?"""
    if len(set(keys)) == len(keys):
        return
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"the key {key[:60]!r} is named twice in one put")
        seen.add(key)


def _utf8(number: int, key: str) -> bytes:
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"key {number} has a lone surrogate, which is not text: {key[:40]!r}") from None
