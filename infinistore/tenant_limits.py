"""What a tenant may take of a server: its size in the pool, its keys, its rates and its
connections.

A tenant belongs to a trust group, whose pool it shares with the other tenants of that
group. Sizes are footprints: what blocks take of the pool, which is at least their
length.
"""

import math
import re
from collections.abc import Callable
from typing import Final

import attrs

_MAX_NAME_LENGTH: Final = 64
DEFAULT_GROUP: Final = "default"
"""The trust group of a tenant whose group is not named."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_MOST: Final = (1 << 63) - 1
_MAX_WEIGHT: Final = 1_000_000


def check_tenant_name(name: object) -> None:
    """Raise ValueError unless this can be the name of a tenant or of a group.

    Names are 1 to 64 letters, digits, hyphens and underscores of ASCII, and begin with
    a letter or digit: so they can stand in tokens, labels of metrics and paths.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise ValueError(
            f"must be 1 to {_MAX_NAME_LENGTH} letters, digits, hyphens and underscores, and begin with a letter or"
            f" digit, not {name!r:.80}"
        )


def why_no_places(tenants: int, connections: int) -> str:
    """Return why not each of so many tenants can have one of so many connections; empty
    if each can."""
    if tenants <= connections:
        return ""
    return (
        f"{tenants} tenants cannot share {connections} connections, of which each needs one; raise --max-connections,"
        " and the limit of open files (ulimit -n) if that is lower"
    )


def _check_name(limits: "TenantLimits", attribute: "attrs.Attribute[str]", value: object) -> None:
    try:
        check_tenant_name(value)
    except ValueError as error:
        raise ValueError(f"{attribute.name} {error}") from None


def _check_whole(least: int, most: int = _MOST) -> Callable[..., None]:
    def check(limits: "TenantLimits", attribute: "attrs.Attribute[int | None]", value: object) -> None:
        if value is None and attribute.default is None:
            return
        if type(value) is not int or not least <= value <= most:  # not bool, which is an int
            raise ValueError(f"{attribute.name} must be a whole number from {least} to {most}, not {value!r:.80}")

    return check


def _check_rate(limits: "TenantLimits", attribute: "attrs.Attribute[float | None]", value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{attribute.name} must be a number above 0, not {value!r:.80}")


@attrs.frozen
class TenantLimits:
    """The limits of one tenant. ValueError, naming the attribute, for a bad value."""

    tenant: str = attrs.field(validator=_check_name)
    """Its name."""
    group: str = attrs.field(default=DEFAULT_GROUP, validator=_check_name)
    """Its trust group: whose pool it uses, and with whom it shares mapped memory."""
    reserved_bytes: int = attrs.field(default=0, validator=_check_whole(0))
    """What no other tenant takes from it: at or below this size it loses no block to
    others."""
    max_bytes: int | None = attrs.field(default=None, validator=_check_whole(1))
    """The most that it may take of the pool; None: as much as there is. At this size it
    evicts its own blocks."""
    max_keys: int | None = attrs.field(default=None, validator=_check_whole(1))
    """The most keys that it may have; None: as many as fit."""
    weight: int = attrs.field(default=1, validator=_check_whole(1, _MAX_WEIGHT))
    """Its share of what nobody reserved, relative to the weights of the others."""
    requests_per_s: float | None = attrs.field(default=None, validator=_check_rate)
    """How many requests a second are read from its connections together; None: any."""
    bytes_per_s: float | None = attrs.field(default=None, validator=_check_rate)
    """How many bytes of payload a second its requests may move; None: any."""
    max_connections: int | None = attrs.field(default=None, validator=_check_whole(1))
    """How many connections it may have open; None: any number that leaves the other
    tenants their share."""
    disk_max_bytes: int | None = attrs.field(default=None, validator=_check_whole(1))
    """What its blocks may take of all disks together, beside what is in the pool; None:
    they are in the pool only."""

    def divided(self, parts: int) -> "TenantLimits":
        """Return the limits in one of `parts` equal parts of a server: together, these
        are within the limits here, but for what is too small to be divided. Every part
        has connections of its own: clients connect to all."""
        if parts == 1:
            return self
        return attrs.evolve(
            self,
            reserved_bytes=self.reserved_bytes // parts,
            max_bytes=None if self.max_bytes is None else max(1, self.max_bytes // parts),
            max_keys=None if self.max_keys is None else max(1, self.max_keys // parts),
            disk_max_bytes=None if self.disk_max_bytes is None else max(1, self.disk_max_bytes // parts),
            requests_per_s=None if self.requests_per_s is None else self.requests_per_s / parts,
            bytes_per_s=None if self.bytes_per_s is None else self.bytes_per_s / parts,
        )

    def __attrs_post_init__(self) -> None:
        if self.max_bytes is not None and self.reserved_bytes > self.max_bytes:
            raise ValueError(
                f"reserved_bytes ({self.reserved_bytes}) must not be above max_bytes ({self.max_bytes}) of tenant"
                f" {self.tenant!r}"
            )
