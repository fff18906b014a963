"""What a store with disks may answer: a model of its promises, key by key."""

from collections.abc import Iterable, Mapping

import attrs

__all__ = ["Mark", "Model"]

Mark = int
"""A moment, as the number of writes before it."""


@attrs.define
class _Key:
    """Values by the moment of their put: what reads may give now, and after a crash."""

    now: dict[bytes, Mark] = attrs.field(factory=dict)
    later: dict[bytes, Mark] = attrs.field(factory=dict)
    ever: set[bytes] = attrs.field(factory=set)
    deleted_at: Mark = -1
    must_survive: bool = False
    """Whether a crash leaves one of `later`."""
    must_be_there: bool = False
    """Whether a read gives one of `now`: not so for what was put since, and evicted."""


class Model:
    """Told of every call in the order of the store; `mark` when a call begins that is
    confirmed later."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._writes = 0

    def mark(self) -> Mark:
        """Return this moment."""
        self._writes += 1
        return self._writes

    def _key(self, name: str) -> _Key:
        return self._keys.setdefault(name, _Key())

    def put(self, values: Mapping[str, bytes]) -> None:
        """These became visible."""
        moment = self.mark()
        for name, value in values.items():
            key = self._key(name)
            assert value not in key.ever  # else nobody could tell which put it was
            key.ever.add(value)
            key.now = {value: moment}
            key.later[value] = moment
            key.must_be_there = False

    def delete(self, names: Iterable[str]) -> None:
        """These were removed from both tiers."""
        moment = self.mark()
        for name in names:
            key = self._key(name)
            key.now = {}
            key.must_survive = key.must_be_there = False
            key.deleted_at = moment

    def delete_all(self) -> None:
        """Everything was removed."""
        self.delete(list(self._keys))

    def deletion_is_durable(self, names: Iterable[str], since: Mark) -> None:
        """Nothing put before that moment may come back."""
        for name in names:
            key = self._key(name)
            key.later = {value: moment for value, moment in key.later.items() if moment > since}

    def all_deleted_durably(self, since: Mark) -> None:
        """As `deletion_is_durable`, for every key."""
        self.deletion_is_durable(list(self._keys), since)

    def flushing(self, names: Iterable[str]) -> dict[str, Mark]:
        """A flush begins: return the moment of the oldest block that each key may
        have."""
        return {name: min(self._key(name).now.values()) for name in names if self._key(name).now}

    def flushed(self, flushed: Mapping[str, Mark]) -> None:
        """What these keys had, or got since, is durable."""
        for name, oldest in flushed.items():
            key = self._key(name)
            if key.deleted_at < oldest:
                key.later = {value: moment for value, moment in key.later.items() if moment >= oldest}
                key.must_survive = True
                key.must_be_there = set(key.now) == set(key.later)

    def crash(self, *, orderly: bool = False) -> None:
        """Memory is lost. After an orderly end, what was replaced by a block that was
        in memory only may be missing, too."""
        for key in self._keys.values():
            key.now = dict(key.later)
            if orderly:
                key.must_survive = key.must_be_there
            key.must_be_there = key.must_survive

    def check(self, name: str, value: bytes | None, *, strict: bool = True, must: bool = False) -> None:
        """A read gave this. Without `strict`, disks may have lost deletions; with
        `must`, nothing may have lost what was durable."""
        key = self._key(name)
        if value is None:
            assert not (must and key.must_be_there), f"{name} was durable and is lost"
        elif strict:
            assert value in key.now, f"{name} gives what was replaced or deleted, or never put"
            key.now = {value: key.now[value]}
        else:
            assert value in key.ever, f"{name} gives what was never put"
