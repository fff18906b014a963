"""What `kv_connector_extra_config` may say, checked when vLLM starts: what is wrong or unknown stops it there."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from infinistore.errors import ConfigError

__all__ = ["ConnectorSettings"]

_URL_EXAMPLE = '"kv_connector_extra_config": {"url": "infinistore://HOST:22345"}'


@attrs.frozen(kw_only=True)
class ConnectorSettings:
    """The settings of the connector. Times are in seconds."""

    url: str
    """The store, as `open_store` takes it; options such as `?token_file=` included."""
    namespace: str = ""
    """Part of every key. Engines share blocks if this and all that makes blocks interchangeable are the same."""
    model: str = ""
    """What to call the model in keys, for engines that have it under different paths; vLLM's name of it if empty."""
    deadline_s: float = 10.0
    """How long a read or write of blocks may take."""
    lookup_deadline_s: float = 0.5
    """How long the scheduler may wait for a look-up."""
    hold_s: float = 30.0
    """How long blocks that were found are kept from being evicted before they are read."""
    save_generated: bool = False
    """Whether blocks of generated tokens are stored, too, not only those of prompts."""
    load_threads: int = 2
    """How many requests' blocks are read at a time."""
    max_pending_bytes: int = 256 * 1024 * 1024
    """How much may wait to be written."""
    when_full: Literal["", "block", "drop"] = ""
    """At that bound: wait, or leave blocks out. Unless given, a producer waits and the others leave out."""
    verify: Literal["always", "never"] = "always"
    """Whether blocks carry checksums."""

    def __attrs_post_init__(self) -> None:
        if not self.url:
            raise ConfigError(f"the connector's settings name no store; add {_URL_EXAMPLE} to --kv-transfer-config")
        for field in attrs.fields(type(self)):
            self._check(field.name, getattr(self, field.name), _CHECKS[field.name])

    def _check(self, name: str, value: object, check: tuple[str, Any]) -> None:
        meaning, is_right = check
        if not is_right(value):
            raise ConfigError(f"kv_connector_extra_config: {name} must be {meaning}, not {value!r}")

    @classmethod
    def from_extra_config(cls, given: Mapping[str, Any]) -> "ConnectorSettings":
        """Check what a user wrote.

        Raises:
            ConfigError: no store is named, or a setting is unknown or cannot be used.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config: unknown setting {name!r}; {hint}")
        return cls(**{"url": "", **given})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= 200


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e6


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_TEXT = ("a text of at most 200 characters", _is_text)
_TIME = ("a number of seconds above 0, at most 1e6", _is_time)
_COUNT = ("a whole number above 0", _is_count)
_CHECKS: dict[str, tuple[str, Any]] = {
    "url": ("a text", lambda value: isinstance(value, str)),
    "namespace": _TEXT,
    "model": _TEXT,
    "deadline_s": _TIME,
    "lookup_deadline_s": _TIME,
    "hold_s": _TIME,
    "save_generated": ("true or false", lambda value: isinstance(value, bool)),
    "load_threads": _COUNT,
    "max_pending_bytes": _COUNT,
    "when_full": ('"block" or "drop"', lambda value: value in ("", "block", "drop")),
    "verify": ('"always" or "never"', lambda value: value in ("always", "never")),
}
