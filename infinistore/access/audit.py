"""Who came, as whom, who was refused and why, and administrative acts: as events.

An event says how many, never which keys, and no secret. Of each kind, a burst is noted
and then a few a second, whoever causes them; and of each tenant and each place of
origin, some more. So a flood of refused logins fills no disk, and hides neither another
kind nor what somebody else does. What is left out is counted, and said with the next
event of its kind and source, or by `sum_up`.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import attrs

Fields: TypeAlias = Mapping[str, object]
_BURST: Final = 100
_PER_S: Final = 5.0
_BURST_OF_SOURCE: Final = 20
_PER_S_OF_SOURCE: Final = 0.1
MOST_SOURCES: Final = 1024
"""How many sources of a kind are told apart; the others are one together."""
_MOST_TEXT: Final = 300


@attrs.define
class _Bucket:
    """What may still be noted."""

    most: float
    per_s: float
    counted_at: float
    credit: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.credit = self.most

    def take(self, now: float) -> bool:
        self.credit = min(self.most, self.credit + (now - self.counted_at) * self.per_s)
        self.counted_at = now
        if self.credit < 1:
            return False
        self.credit -= 1
        return True

    def is_full(self, now: float) -> bool:
        return self.credit + (now - self.counted_at) * self.per_s >= self.most


@attrs.define
class _Source:
    """Somebody who causes events of a kind: `says` names it in sums."""

    own: _Bucket
    says: Fields
    left_out: int = 0


@attrs.define
class _Kind:
    shared: _Bucket
    others: _Source
    sources: dict[object, _Source] = attrs.field(factory=dict)
    forgot_at: float = float("-inf")

    def source(self, key: object, says: Fields, now: float) -> _Source:
        """Return a source; that of all others if there are too many."""
        found = self.sources.get(key)
        if found is None:
            if len(self.sources) >= MOST_SOURCES and not self._forget(now):
                return self.others
            found = self.sources[key] = _Source(_Bucket(_BURST_OF_SOURCE, _PER_S_OF_SOURCE, now), says)
        return found

    def _forget(self, now: float) -> bool:
        """Forget those who have been quiet for so long that it makes no difference."""
        if now - self.forgot_at < 1:  # the next event would look at all of them again
            return False
        self.forgot_at = now
        quiet = [key for key, one in self.sources.items() if not one.left_out and one.own.is_full(now)]
        for key in quiet:
            del self.sources[key]
        return bool(quiet)


class Audit:
    """Passes events on. `write` gets the fields of each, `clock` returns seconds."""

    def __init__(self, write: Callable[[Fields], None] | None = None, clock: Callable[[], float] | None = None) -> None:
        self._write = write
        self.clock = clock or (lambda: 0.0)
        self._kinds: dict[str, _Kind] = {}

    @property
    def listens(self) -> bool:
        """Whether events go anywhere: else nobody has to gather what they say."""
        return self._write is not None

    def note(self, event: str, **fields: object) -> None:
        """Note an event, or count it. Its source is the `tenant` among the fields, else
        the `origin` without its port.
        """
        if self._write is None or not self.listens:
            return
        now = self.clock()
        kind = self._kinds.get(event)
        if kind is None:
            others = _Source(_Bucket(_BURST_OF_SOURCE, _PER_S_OF_SOURCE, now), {})
            kind = self._kinds[event] = _Kind(_Bucket(_BURST, _PER_S, now), others)
        says = _source_of(fields)
        source = kind.source(tuple(says.values()), says, now)
        if not (source.own.take(now) or kind.shared.take(now)):
            source.left_out += 1
            self._left_out()
            return
        left_out = {"left_out": source.left_out} if source.left_out else {}
        source.left_out = 0
        self._write({"event": event, **{name: _short(value) for name, value in fields.items()}, **left_out})

    def sum_up(self) -> None:
        """Say how many events of each kind and source were left out."""
        for event, kind in self._kinds.items():
            for source in (*kind.sources.values(), kind.others):
                if source.left_out and self._write is not None:
                    left_out, source.left_out = source.left_out, 0
                    self._write({"event": event, **source.says, "left_out": left_out})

    def _left_out(self) -> None:
        """Hear that there is something to sum up."""


def _source_of(fields: Fields) -> Fields:
    """Return the fields that say who causes an event; none if it is not known."""
    if "tenant" in fields:
        return {"tenant": fields["tenant"]}
    if isinstance(origin := fields.get("origin"), str):
        host, colon, _ = origin.rpartition(":")
        return {"origin": _short(host if colon else origin.partition(",")[0])}  # of a user, whatever its process is
    return {}


def _short(value: object) -> object:
    return value[:_MOST_TEXT] if isinstance(value, str) else value
