"""What a store refuses: keys that are no keys, and bounds on what one client may hold.

Every bound is a setting, has a unit in its name, and is named by the error that it raises.
"""

from collections.abc import Sequence

import attrs
from attrs.validators import ge, gt, instance_of, le, optional

from infinistore.errors import LimitExceeded

__all__ = ["MAX_KEY_BYTES", "CoreLimits", "Watermarks", "check_keys"]

MAX_KEY_BYTES = 1024
"""The longest key that a store may be set to accept, in bytes of UTF-8."""


@attrs.frozen
class Watermarks:
    """When eviction starts and where it stops, as parts of the capacity: 0 < low <= high <= 1."""

    low: float = attrs.field(default=0.8, converter=float, validator=[gt(0.0), le(1.0)])
    high: float = attrs.field(default=0.95, converter=float, validator=[gt(0.0), le(1.0)])

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"the low watermark ({self.low}) must not be above the high one ({self.high})")


@attrs.frozen
class CoreLimits:
    """The bounds of a `StoreCore`. Bytes are counted by footprint: what a block takes of the pool."""

    max_key_bytes: int = attrs.field(default=MAX_KEY_BYTES, validator=[instance_of(int), ge(1), le(MAX_KEY_BYTES)])
    """The longest key, in bytes of UTF-8. What calls `check_keys` passes it on."""
    max_value_bytes: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """The largest value; None: what the largest arena holds."""
    max_batch_keys: int = attrs.field(default=8192, validator=[instance_of(int), ge(1)])
    """The most keys in one call. Bounds how long a call takes: about 0.5 us per key."""
    max_pinned_ratio: float = attrs.field(default=0.5, converter=float, validator=[gt(0.0), le(1.0)])
    """The part of the capacity that one client may hold, leased and reserved together. A client that holds nothing may
    always have one batch, however large."""
    max_hold_s: float = attrs.field(default=60.0, converter=float, validator=gt(0.0))
    """The longest time that `hold_prefix` pins, in seconds."""
    max_held_ratio: float = attrs.field(default=0.25, converter=float, validator=[ge(0.0), le(1.0)])
    """The part of the capacity that all holds together may pin, each block counted once."""

    def check_batch(self, count: int) -> None:
        """Raise LimitExceeded if a call names more than `max_batch_keys` keys."""
        if count > self.max_batch_keys:
            raise LimitExceeded(
                f"{count} keys in one batch are more than max_batch_keys={self.max_batch_keys}; split the batch"
            )

    def check_share(self, name: str, held_bytes: int, wanted_bytes: int, capacity_bytes: int) -> None:
        """Raise LimitExceeded if client `name`, which holds `held_bytes`, may not have `wanted_bytes` more.

        A client that holds nothing may have any one batch, and any client a batch that takes nothing.
        """
        if held_bytes and wanted_bytes and held_bytes + wanted_bytes > self.max_pinned_ratio * capacity_bytes:
            raise LimitExceeded(
                f"client {name!r} holds {held_bytes} bytes leased or reserved and asks for {wanted_bytes} more, and"
                f" max_pinned_ratio={self.max_pinned_ratio:g} of {capacity_bytes} bytes bounds both together; release"
                " leases or finish writes first"
            )


def check_keys(keys: Sequence[str], max_key_bytes: int = MAX_KEY_BYTES) -> None:
    """Raise ValueError unless every key is a non-empty str of at most `max_key_bytes` bytes of UTF-8.

    Called once, where keys enter: by each client before it sends, and by the server on what it receives. The store
    itself does not look again. About 40 us per 1,000 keys.
    """
    # Whole-batch tests in C first; which key it was is looked up only when one failed.
    if not keys:
        return
    try:
        if (
            list(map(type, keys)).count(str) == len(keys)
            and all(keys)
            and "".join(keys).isascii()
            and len(max(keys, key=len)) <= max_key_bytes
        ):
            return
    except TypeError:
        pass
    for key in keys:
        _check_key(key, max_key_bytes)


def _check_key(key: object, max_key_bytes: int) -> None:
    if type(key) is not str:
        raise ValueError(f"a key must be a str, not {type(key).__name__}: {key!r:.80}")
    if not key:
        raise ValueError("a key must not be empty")
    try:
        length = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError(f"a key must be text that UTF-8 can say, without lone surrogates: {key!r:.80}") from None
    if length > max_key_bytes:
        raise ValueError(
            f"a key must be at most {max_key_bytes} bytes of UTF-8, not {length}: {key!r:.80}; hash long keys"
        )
