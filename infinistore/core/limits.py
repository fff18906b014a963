"""The limits of a store, above all on what one client may pin.

Every limit is a setting, has a unit in its name, and is named by its error. The rules
for keys are in `infinistore.keys`.
"""

import attrs
from attrs.validators import ge, gt, instance_of, le, optional

from infinistore.errors import LimitExceeded
from infinistore.keys import MAX_KEY_BYTES
from infinistore.sizes import in_units


@attrs.frozen
class Watermarks:
    """When eviction starts and stops, as fractions of the capacity.

    0 < low <= high <= 1.
    """

    low: float = attrs.field(default=0.8, converter=float, validator=[gt(0.0), le(1.0)])
    high: float = attrs.field(default=0.95, converter=float, validator=[gt(0.0), le(1.0)])

    def __attrs_post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"the low watermark ({self.low}) must not be above the high one ({self.high})")


@attrs.frozen
class CoreLimits:
    """The limits of a `StoreCore`. Bytes are footprints: what blocks take of a pool."""

    max_key_bytes: int = attrs.field(default=MAX_KEY_BYTES, validator=[instance_of(int), ge(1), le(MAX_KEY_BYTES)])
    """The longest key, in bytes of UTF-8. What calls `check_keys` passes it on."""
    max_value_bytes: int | None = attrs.field(default=None, validator=optional(ge(1)))
    """The largest value; None: what the largest arena holds."""
    max_batch_keys: int = attrs.field(default=8192, validator=[instance_of(int), ge(1)])
    """The most keys in one call. Bounds how long a call takes: about 0.5 us per key."""
    max_page_keys: int = attrs.field(default=10_000, validator=[instance_of(int), ge(1)])
    """The most keys in one page of `ListKeys`. The next page begins behind the last."""
    max_pinned_ratio: float = attrs.field(default=0.5, converter=float, validator=[gt(0.0), le(1.0)])
    """The part of the capacity that one client may hold, leased and reserved together.
    A client that holds nothing may always have one batch, however large."""
    max_hold_s: float = attrs.field(default=60.0, converter=float, validator=gt(0.0))
    """The longest time that `hold_prefix` pins, in seconds."""
    max_held_ratio: float = attrs.field(default=0.25, converter=float, validator=[ge(0.0), le(1.0)])
    """The part of the capacity that all holds together may pin, each block counted
    once."""
    max_protected_ratio: float = attrs.field(default=0.25, converter=float, validator=[ge(0.0), le(1.0)])
    """The part of the capacity that all protected keys together may pin."""

    def check_batch(self, count: int) -> None:
        """Raise LimitExceeded if a call names more than `max_batch_keys` keys."""
        if count > self.max_batch_keys:
            raise LimitExceeded(
                f"{count} keys in one batch are more than max_batch_keys={self.max_batch_keys}; split the batch"
            )

    def check_share(self, name: str, pinned_bytes: int, wanted_bytes: int, capacity_bytes: int) -> None:
        """Raise LimitExceeded if client `name` may not pin `wanted_bytes` more.

        It has pinned `pinned_bytes`. A client without pins may have any one batch, and
        any client a batch that takes nothing.
        """
        if pinned_bytes and wanted_bytes and pinned_bytes + wanted_bytes > self.max_pinned_ratio * capacity_bytes:
            raise LimitExceeded(
                f"client {name!r} holds {in_units(pinned_bytes)} leased or reserved and asks for"
                f" {in_units(wanted_bytes)} more, and max_pinned_ratio={self.max_pinned_ratio:g} of"
                f" {in_units(capacity_bytes)} bounds both together; release leases or finish writes first"
            )

    def check_held(self, held_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        """Raise LimitExceeded if all holds together may not pin `held_bytes`.

        `more_bytes` is what the next hold names, pinned already or not.
        """
        bound_bytes = int(self.max_held_ratio * capacity_bytes)
        if held_bytes > bound_bytes:
            raise LimitExceeded(
                f"all holds together would pin {in_units(held_bytes)}, and max_held_ratio={self.max_held_ratio:g}"
                f" allows {in_units(bound_bytes)}; release holds sooner, hold a shorter prefix, or match without a hold"
            )

    def may_protect(self, protected_bytes: int, capacity_bytes: int) -> bool:
        """Whether all protected keys together may pin `protected_bytes`."""
        return protected_bytes <= int(self.max_protected_ratio * capacity_bytes)

    def check_protected(self, protected_bytes: int, more_bytes: int, capacity_bytes: int) -> None:
        """Raise LimitExceeded if all protected keys together may not pin
        `protected_bytes`, of which `more_bytes` are new."""
        if not self.may_protect(protected_bytes, capacity_bytes):
            raise LimitExceeded(
                f"pinned keys would take {in_units(protected_bytes)}, and"
                f" max_protected_ratio={self.max_protected_ratio:g} allows"
                f" {in_units(int(self.max_protected_ratio * capacity_bytes))}; unpin other keys, pin fewer, or give the"
                " server a higher --max-protected-ratio or a larger pool"
            )
