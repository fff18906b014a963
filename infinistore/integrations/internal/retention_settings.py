"""How long blocks stay in the store: settings that every adapter has."""

import attrs

__all__ = ["RetentionSettings", "is_time", "known_settings"]


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """How long what an adapter stores and uses stays there, in seconds."""

    ttl_s: float | None = None
    """How long after it was stored a block ends, as if deleted; None: not at all."""
    pin_s: float | None = None
    """How long after its last use a block is kept from being evicted; None: no longer
    than others."""


def known_settings(cls: type[RetentionSettings]) -> list[str]:
    """Return the names of all settings, those that every adapter has at the end."""
    return [field.name for field in sorted(attrs.fields(cls), key=lambda field: field.inherited)]


def is_time(value: object, longest_s: float = 1e9) -> bool:
    """Whether this is a number of seconds above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= longest_s
