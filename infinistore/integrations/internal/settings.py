"""The settings that every adapter has in its engine's configuration: of the store, and
how long blocks stay in it.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import attrs

from infinistore.errors import ConfigError

_S = TypeVar("_S", bound="RetentionSettings")


def must_be(meaning: str, is_right: Callable[[Any], bool]) -> Any:
    """Return a validator for a setting. `meaning` describes the right values."""

    def check(settings: object, field: "attrs.Attribute[Any]", value: object) -> None:
        if not is_right(value):
            raise ConfigError(f"{field.name} must be {meaning}, not {value!r}")

    return check


def is_time(value: object, longest_s: float = 1e9) -> bool:
    """Whether this is a number of seconds above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= longest_s


TEXT = must_be("a text", lambda value: isinstance(value, str))
TIME_OR_NONE = must_be("a number of seconds above 0, or null", lambda value: value is None or is_time(value))


@attrs.frozen(kw_only=True)
class RetentionSettings:
    """How long the blocks of an adapter stay in the store, in seconds."""

    ttl_s: float | None = attrs.field(default=None, validator=TIME_OR_NONE)
    """How long after it was stored a block ends, as if deleted; None: not at all."""
    pin_s: float | None = attrs.field(default=None, validator=TIME_OR_NONE)
    """How long after its last use a block is kept from being evicted; None: no longer
    than others."""


def known_settings(cls: type[RetentionSettings]) -> list[str]:
    """Return the names of all settings, those that every adapter has at the end."""
    return [field.name for field in sorted(attrs.fields(cls), key=lambda field: field.inherited)]


def with_url(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a user's settings with the URL of the store: their `url`, or else that of
    the variable INFINISTORE_URL.

    Raises:
        ConfigError: neither is there.
    """
    url = given.get("url") or os.environ.get("INFINISTORE_URL")
    if not url:
        raise ConfigError(
            f"{where} names no store; set url, or the variable INFINISTORE_URL, to infinistore://HOST:22345"
        )
    return {**given, "url": url}


def read_settings(cls: type[_S], given: Mapping[str, Any], where: str) -> _S:
    """Check a user's settings. `where` names their source in messages.

    Raises:
        ConfigError: a setting is unknown, or its value is invalid.
    """
    known = known_settings(cls)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown setting {name!r}; {hint}")
    try:
        return cls(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@attrs.frozen(kw_only=True)
class StoreSettings(RetentionSettings):
    """Where the store is, and how an adapter uses it.

    An engine waits for its lookups, so a call takes at most 5 s unless the URL or
    `deadline_s` says otherwise. `hold_s` is how long the blocks that a lookup found are
    held for the load that follows, in seconds; the server limits it. Every key begins
    with `key_prefix`.
    """

    url: str = attrs.field(validator=TEXT)
    key_prefix: str = attrs.field(validator=TEXT)
    deadline_s: float | None = attrs.field(default=None, validator=TIME_OR_NONE)
    hold_s: float = attrs.field(default=10.0, validator=must_be("a number of seconds above 0", is_time))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], *, where: str, key_prefix: str) -> "StoreSettings":
        """Read settings from an engine's configuration, as `read_settings`."""
        return read_settings(cls, {"key_prefix": key_prefix, **with_url(given, where)}, where)

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
