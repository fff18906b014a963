"""The settings in `kv_connector_extra_config`, of which an invalid one stops vLLM at
startup; and those of a request, of which it is ignored.
"""

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs

from infinistore.errors import ConfigError
from infinistore.integrations.internal.settings import (
    TEXT,
    RetentionSettings,
    is_time,
    must_be,
    read_settings,
    with_url,
)


def is_engine_url(value: object) -> bool:
    """Whether this can be the URL of an engine: http or https, a host, perhaps a port
    and a path, and nothing else.
    """
    if not isinstance(value, str) or len(value) > 200 or not value.isascii() or not value.isprintable():
        return False
    try:
        parts = urlsplit(value)
        return (
            value.startswith(("http://", "https://"))
            and bool(parts.hostname)
            and parts.port != 0
            and not any(character in value for character in " @?#\\")
        )
    except ValueError:  # the port is no number, or a bracket is missing
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NAME = must_be(
    "a text of at most 200 characters", lambda value: isinstance(value, str) and "\0" not in value and len(value) <= 200
)
_TIME = must_be("a number of seconds above 0, at most 1e6", lambda value: is_time(value, 1e6))
_COUNT = must_be("a whole number above 0", lambda value: _is_whole(value) and value > 0)
_COUNT_OR_NONE = must_be("a whole number, at least 0", lambda value: _is_whole(value) and value >= 0)
_PATH = must_be("the path of a file", lambda value: isinstance(value, str) and "\0" not in value)
_ENGINE_URL = must_be(
    'the URL at which clients reach this engine, such as "http://10.0.0.1:8000", of at most 200 characters, or empty',
    lambda value: value == "" or is_engine_url(value),
)
_PRIORITY = must_be("a whole number, or null", lambda value: value is None or _is_whole(value))
_SWITCH = must_be("true or false", lambda value: isinstance(value, bool))


def _one_of(*words: str) -> Any:
    return must_be(" or ".join(f'"{word}"' for word in words if word), lambda value: value in words)


@attrs.frozen(kw_only=True)
class ConnectorSettings(RetentionSettings):
    """The settings of the connector. Times are in seconds."""

    url: str = attrs.field(validator=TEXT)
    """The URL of the store, with options such as `?token_file=`. Default: the variable
    INFINISTORE_URL."""
    namespace: str = attrs.field(default="", validator=_NAME)
    """Part of every key. Engines with different namespaces share nothing."""
    model: str = attrs.field(default="", validator=_NAME)
    """The model's name in keys, for engines with different paths; default: vLLM's."""
    load: Literal["always", "faster"] = attrs.field(default="always", validator=_one_of("always", "faster"))
    """Whether found blocks are always loaded, or only if that is faster than to compute
    them."""
    deadline_s: float = attrs.field(default=10.0, validator=_TIME)
    """Deadline of a read or write of blocks."""
    lookup_deadline_s: float = attrs.field(default=0.5, validator=_TIME)
    """How long the scheduler may wait for a lookup."""
    hold_s: float = attrs.field(default=30.0, validator=_TIME)
    """How long found blocks are held until they are read."""
    shards: int = attrs.field(default=0, validator=_COUNT_OR_NONE)
    """As how many shards each layer is stored, by its KV heads. Engines with the same
    number share blocks; it is a multiple of their tensor parallel sizes. Default: 0,
    one for each rank with heads of its own."""
    group_tokens: int = attrs.field(default=1024, validator=_COUNT)
    """In a cluster, so many tokens in a row are on one node. Part of every key."""
    boundary_tokens: int = attrs.field(default=1024, validator=_COUNT)
    """How often a sliding window is stored, beside at the end of a prompt."""
    save_generated: bool = attrs.field(default=False, validator=_SWITCH)
    """Whether to store blocks of generated tokens, too."""
    load_threads: int = attrs.field(default=2, validator=_COUNT)
    """Number of requests whose blocks are read concurrently."""
    max_pending_bytes: int = attrs.field(default=256 * 1024 * 1024, validator=_COUNT)
    """Limit of bytes waiting to be written."""
    when_full: Literal["", "block", "drop"] = attrs.field(default="", validator=_one_of("", "block", "drop"))
    """At that limit: block or drop. Default: a producer blocks, others drop."""
    pin_prompts_file: str = attrs.field(default="", validator=_PATH)
    """A JSON list of prompts, as texts or tokens: of requests that begin with one, that
    part is pinned in the store."""
    pin_priority: int | None = attrs.field(default=None, validator=_PRIORITY)
    """Requests of this priority, or an earlier one, have their prompts pinned."""
    pin_s: float = attrs.field(default=3600.0, validator=_TIME)
    """How long after the last such request they stay pinned."""
    events_dump_endpoint: str = attrs.field(default="", validator=_NAME)
    """Where routers that come late ask which blocks there are, as "tcp://*:5559"."""
    events_dump_blocks: int = attrs.field(default=250_000, validator=_COUNT)
    """How many blocks are remembered for that."""
    announce_url: str = attrs.field(default="", validator=_ENGINE_URL)
    """The URL at which clients reach this engine, such as "http://10.0.0.1:8000", for
    `infinistore route --announced`."""
    reset: Literal["delete", "keep"] = attrs.field(default="delete", validator=_one_of("delete", "keep"))
    """What a reset of vLLM's cache does to the blocks in the store. vLLM resets it to
    sleep and to pause, too; with weights that never change, "keep" is right."""
    verify: Literal["always", "never"] = attrs.field(default="always", validator=_one_of("always", "never"))
    """Whether blocks carry checksums."""

    @classmethod
    def from_extra_config(cls, given: Mapping[str, Any]) -> "ConnectorSettings":
        """Check a user's settings.

        Raises:
            ConfigError: the store is missing, or a setting is unknown or invalid.
        """
        where = "kv_connector_extra_config"
        return read_settings(cls, with_url(given, f"{where} of --kv-transfer-config"), where)


@attrs.frozen(kw_only=True)
class RequestSettings(RetentionSettings):
    """What a request asks for: `kv_transfer_params={"infinistore": {...}}`. `pin_s`
    pins its prompt for so long.
    """

    load: bool = attrs.field(default=True, validator=_SWITCH)
    """Whether its blocks may be read from the store."""
    save: bool = attrs.field(default=True, validator=_SWITCH)
    """Whether its blocks may be written to the store."""

    @classmethod
    def of(cls, params: object) -> "RequestSettings":
        """Return the settings in a request's `kv_transfer_params`.

        Raises:
            ConfigError: one is unknown or invalid.
        """
        given = params.get("infinistore") if isinstance(params, Mapping) else None
        if given is None:
            return cls()
        where = "kv_transfer_params: infinistore"
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} must be an object with settings, not {given!r}")
        return read_settings(cls, given, where)
