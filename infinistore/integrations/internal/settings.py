"""The settings that every adapter has in its engine's configuration: of the store, and
how long blocks stay in it.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs

from infinistore.errors import ConfigError


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


@attrs.frozen(kw_only=True)
class StoreSettings(RetentionSettings):
    """Where the store is, and how an adapter uses it.

    An engine waits for its lookups, so a call takes at most 5 s unless the URL or
    `deadline_s` says otherwise. `hold_s` is how long the blocks that a lookup found are
    held for the load that follows, in seconds; the server limits it. Every key begins
    with `key_prefix`.
    """

    url: str
    key_prefix: str
    deadline_s: float | None = None
    hold_s: float = 10.0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], *, where: str, key_prefix: str) -> "StoreSettings":
        """Read settings from an engine's configuration.

        `where` names the source in messages.

        Raises:
            ConfigError: `url` is missing, a setting is unknown, or a value is invalid.
        """
        known = known_settings(cls)
        for name in given:
            if name not in known:
                raise ConfigError(f"{where} has no setting {name!r}; known are {', '.join(known)}")
        if not isinstance(given.get("url"), str):
            raise ConfigError(f"{where} names no store; set url to infinistore://HOST:22345")
        for name in ("deadline_s", "hold_s", "ttl_s", "pin_s"):
            value = given.get(name)
            if value is not None and not is_time(value):
                raise ConfigError(f"{where}: {name} must be a number of seconds above 0, not {value!r}")
        if not isinstance(given.get("key_prefix", ""), str):
            raise ConfigError(f"{where}: key_prefix must be a text, not {given['key_prefix']!r}")
        return cls(**{"key_prefix": key_prefix, **given})

    def prefix_of(self, model: str, weights: str, *, default: str) -> str:
        """Return the prefix of the keys of a model with these weights, of which nothing
        is told if they are not known. `default` is the usual `key_prefix`.

        Raises:
            ConfigError: they are not known, and the user gave no prefix of their own.
        """
        if not weights and self.key_prefix == default:
            raise ConfigError(
                f"it is not known what the weights of {model} are, so that those of others could be taken for them: set"
                f" key_prefix, to another one for other weights, as {default}second/"
            )
        return f"{self.key_prefix}{weights}/" if weights else self.key_prefix

    @property
    def options(self) -> Any:
        """The keyword arguments for `open_store`. The server need not be running."""
        options: dict[str, Any] = {"lazy": True}
        if self.deadline_s is not None:
            options["deadline_s"] = self.deadline_s
        elif "deadline_s" not in parse_qs(urlsplit(self.url).query):
            options["deadline_s"] = 5.0
        return options
