"""The settings in `kv_connector_extra_config`; an invalid one stops vLLM at startup."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from infinistore.errors import ConfigError
from infinistore.integrations.internal.settings import RetentionSettings, is_time, known_settings

_URL_EXAMPLE = '"kv_connector_extra_config": {"url": "infinistore://HOST:22345"}'


@attrs.frozen(kw_only=True)
class ConnectorSettings(RetentionSettings):
    """The settings of the connector. Times are in seconds."""

    url: str
    """The URL of the store, with options such as `?token_file=`."""
    namespace: str = ""
    """Part of every key. Engines with different namespaces share nothing."""
    model: str = ""
    """The model's name in keys, for engines with different paths; default: vLLM's."""
    deadline_s: float = 10.0
    """Deadline of a read or write of blocks."""
    lookup_deadline_s: float = 0.5
    """How long the scheduler may wait for a lookup."""
    hold_s: float = 30.0
    """How long found blocks are held until they are read."""
    group_tokens: int = 1024
    """In a cluster, so many tokens in a row are on one node. Part of every key."""
    boundary_tokens: int = 1024
    """How often a sliding window is stored, beside at the end of a prompt."""
    save_generated: bool = False
    """Whether to store blocks of generated tokens, too."""
    load_threads: int = 2
    """Number of requests whose blocks are read concurrently."""
    max_pending_bytes: int = 256 * 1024 * 1024
    """Limit of bytes waiting to be written."""
    when_full: Literal["", "block", "drop"] = ""
    """At that limit: block or drop. Default: a producer blocks, others drop."""
    pin_prompts_file: str = ""
    """A JSON list of prompts, as texts or tokens: of requests that begin with one, that
    part is pinned in the store."""
    pin_priority: int | None = None
    """Requests of this priority, or an earlier one, have their prompts pinned."""
    pin_s: float = 3600.0
    """How long after the last such request they stay pinned."""
    events_dump_endpoint: str = ""
    """Where routers that come late ask which blocks there are, as "tcp://*:5559"."""
    events_dump_blocks: int = 250_000
    """How many blocks are remembered for that."""
    reset: Literal["delete", "keep"] = "delete"
    """What a reset of vLLM's cache does to the blocks in the store. vLLM resets it to
    sleep and to pause, too; with weights that never change, "keep" is right."""
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
        """Check a user's settings.

        Raises:
            ConfigError: the store is missing, or a setting is unknown or invalid.
        """
        known = known_settings(cls)
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"kv_connector_extra_config: unknown setting {name!r}; {hint}")
        return cls(**{"url": "", **given})


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value) <= 200


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_TEXT = ("a text of at most 200 characters", _is_text)
_TIME = ("a number of seconds above 0, at most 1e6", lambda value: is_time(value, 1e6))
_COUNT = ("a whole number above 0", _is_count)
_CHECKS: dict[str, tuple[str, Any]] = {
    "url": ("a text", lambda value: isinstance(value, str)),
    "namespace": _TEXT,
    "model": _TEXT,
    "deadline_s": _TIME,
    "lookup_deadline_s": _TIME,
    "hold_s": _TIME,
    "save_generated": ("true or false", lambda value: isinstance(value, bool)),
    "group_tokens": _COUNT,
    "boundary_tokens": _COUNT,
    "load_threads": _COUNT,
    "max_pending_bytes": _COUNT,
    "pin_prompts_file": ("the path of a file", lambda value: isinstance(value, str) and "\0" not in value),
    "pin_priority": (
        "a whole number, or null",
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
    ),
    "pin_s": _TIME,
    "ttl_s": ("a number of seconds above 0, or null", lambda value: value is None or is_time(value)),
    "events_dump_endpoint": _TEXT,
    "events_dump_blocks": _COUNT,
    "when_full": ('"block" or "drop"', lambda value: value in ("", "block", "drop")),
    "reset": ('"delete" or "keep"', lambda value: value in ("delete", "keep")),
    "verify": ('"always" or "never"', lambda value: value in ("always", "never")),
}
