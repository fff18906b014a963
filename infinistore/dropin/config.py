"""`ClientConfig` and `ServerConfig`, settings in the names and units of the original;
and `Logger`, its logger, on top of `logging`.

Both configurations take keywords, can be changed by attribute afterwards, and are
checked by `verify()`. Unknown keywords are ignored, as in the original, whose programs
pass all flags of their command line. A keyword that looks like a misspelt setting is an
error.

Messages go to the logger `infinistore`. The program configures their destination
(`logging.basicConfig`); until then, Python prints warnings and errors to stderr.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from infinistore import config as native
from infinistore.client import StoreOptions
from infinistore.client.extension import is_cluster_url, parse_cluster_url, parse_url
from infinistore.config import server_settings
from infinistore.errors import ConfigError
from infinistore.settings import near
from infinistore.sizes import GIB, KIB

LOG_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_package_log = logging.getLogger("infinistore")


class Logger:
    """Logs any object as text."""

    @staticmethod
    def info(msg: object) -> None:
        """Log at level INFO."""
        _package_log.info("%s", msg)

    @staticmethod
    def debug(msg: object) -> None:
        """Log at level DEBUG."""
        _package_log.debug("%s", msg)

    @staticmethod
    def error(msg: object) -> None:
        """Log at level ERROR."""
        _package_log.error("%s", msg)

    @staticmethod
    def warn(msg: object) -> None:
        """Log at level WARNING."""
        _package_log.warning("%s", msg)

    @staticmethod
    def set_log_level(level: str) -> None:
        """Set the lowest level to log: "error", "warning", "info" or "debug".

        Raises:
            ConfigError: an unknown level.
        """
        if level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
        _package_log.setLevel(LOG_LEVELS[level])


TYPE_RDMA: Final = "RDMA"
TYPE_TCP: Final = "TCP"
LINK_ETHERNET: Final = "Ethernet"
LINK_IB: Final = "IB"

_log = logging.getLogger("infinistore.dropin")
_LARGEST_PORT: Final = 65535
_LARGEST_INDEX: Final = 255  # of a port of an adapter, and of a GID
_LONGEST_S: Final = 1e9
_LOOKS_MISSPELT: Final = 0.8


class ClientConfig:
    """How to reach a server. Its attributes may change until the connection is made.

    The token for a server that requires one comes from INFINISTORE_TOKEN.

    Args:
        connection_type: `TYPE_RDMA`: the best transport, RDMA, shared memory or TCP;
            `TYPE_TCP`: TCP.
        host_addr: name or address of the server; or the URL of a cluster.
        service_port: port of the server; without effect for a cluster.
        dev_name: RDMA device, such as "mlx5_0"; None selects the first that works. It
            has no effect without RDMA.
        ib_port: port of that device, from 1.
        link_type: `LINK_IB` or `LINK_ETHERNET`.
        hint_gid_index: preferred GID; -1 for no preference.
        log_level: "error", "warning", "info" or "debug". INFINISTORE_LOG_LEVEL takes
            precedence. Without either, the logger is left unchanged.
        ca: file with the authorities to trust, in PEM: with it or `cert`, the
            connection is by TLS (docs/security.md), and uses no RDMA. INFINISTORE_CA
            takes precedence, and so do INFINISTORE_CERT and INFINISTORE_KEY.
        cert: file with the certificate of this client, in PEM.
        key: file with its key; None for the file of `cert`.
        ttl_s: how many seconds after it was written a block ends, as if deleted.
            INFINISTORE_TTL_S takes precedence. Without either, blocks do not end.

    Raises:
        ConfigError: a keyword looks like a misspelt setting.
    """

    def __init__(self, **given: Any) -> None:
        _pass_over_unknown(given, _CLIENT_SETTINGS)
        self.connection_type: str | None = given.get("connection_type")
        self.host_addr: str | None = given.get("host_addr")
        self.service_port: int | None = given.get("service_port")
        self.dev_name: str | None = given.get("dev_name")
        self.ib_port: int = given.get("ib_port", 1)
        self.link_type: str = given.get("link_type", LINK_IB)
        self.hint_gid_index: int = given.get("hint_gid_index", -1)
        self.log_level: str | None = os.environ.get("INFINISTORE_LOG_LEVEL") or given.get("log_level")
        self.ca: str | None = os.environ.get("INFINISTORE_CA") or given.get("ca")
        self.cert: str | None = os.environ.get("INFINISTORE_CERT") or given.get("cert")
        self.key: str | None = os.environ.get("INFINISTORE_KEY") or given.get("key")
        self.ttl_s: float | None = _seconds("INFINISTORE_TTL_S", given.get("ttl_s"))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _CLIENT_SETTINGS)
        return f"ClientConfig({settings})"

    def verify(self) -> None:
        """Check the settings, as `InfinityConnection` does.

        Raises:
            ConfigError: a setting is invalid.
        """
        _check_one_of("connection_type", self.connection_type, (TYPE_RDMA, TYPE_TCP))
        if not isinstance(self.host_addr, str) or not self.host_addr.strip():
            raise ConfigError(f"host_addr must be the name or address of a server, not {self.host_addr!r}")
        if not is_cluster_url(self.host_addr):
            _check_integer("service_port", self.service_port, 1, _LARGEST_PORT)
        _check_integer("ib_port", self.ib_port, 1, _LARGEST_INDEX)
        _check_integer("hint_gid_index", self.hint_gid_index, -1, _LARGEST_INDEX)
        if self.dev_name is not None and not isinstance(self.dev_name, str):
            raise ConfigError(f"dev_name must be the name of a device, or None for any, not {self.dev_name!r}")
        if self.connection_type == TYPE_RDMA:
            _check_one_of("link_type", self.link_type, (LINK_IB, LINK_ETHERNET))
        if self.log_level is not None:
            _check_one_of("log_level", self.log_level, tuple(LOG_LEVELS))
        if self.ttl_s is not None and not 0 < self.ttl_s <= _LONGEST_S:
            raise ConfigError(f"ttl_s must be a number of seconds above 0, at most 1e9, not {self.ttl_s!r}")
        parse_cluster_url(self.url) if is_cluster_url(self.url) else parse_url(self.url)

    @property
    def options(self) -> StoreOptions:
        """The options for `open_store`."""
        given = {"ca": self.ca, "cert": self.cert, "key": self.key}
        files = cast(StoreOptions, {name: Path(file) for name, file in given.items() if file})
        if files or self.connection_type == TYPE_TCP:
            return files
        return {"device": self.dev_name or "", "ib_port": self.ib_port, "gid_index": self.hint_gid_index}

    @property
    def url(self) -> str:
        """The URL for `open_store`."""
        scheme = "tcp" if self.connection_type == TYPE_TCP else "infinistore"
        if is_cluster_url(str(self.host_addr)):
            return str(self.host_addr)
        host = str(self.host_addr).strip().strip("[]")
        return f"{scheme}://[{host}]:{self.service_port}" if ":" in host else f"{scheme}://{host}:{self.service_port}"


_CLIENT_SETTINGS: Final = (
    "connection_type", "host_addr", "service_port", "dev_name", "ib_port", "link_type", "hint_gid_index", "log_level",
    "ca", "cert", "key", "ttl_s",
)  # fmt: skip


class ServerConfig(native.ServerConfig):
    """The settings of a server, under either of two sets of names.

    This package's names take sizes in bytes and times in seconds: `prealloc_bytes`,
    `minimal_allocate_bytes`, `evict_interval_s`. The original's names, which are also
    the names of the flags, take the values of flags: `prealloc_size=16` is 16 GiB,
    `minimal_allocate_size=64` is 64 KiB, and `"512MiB"` has its own unit. Both can be
    read and written as attributes. docs/configuration.md explains every setting.

    Raises:
        ConfigError: a value is invalid, values contradict each other, or a keyword
            looks like a misspelt setting.
    """

    # mypy uses the constructor of the parent, which has names and types.
    if not TYPE_CHECKING:

        def __init__(self, **given: Any) -> None:
            super().__init__(**_native_settings(given))

        def __setattr__(self, name: str, value: Any) -> None:  # which the parent refuses
            for attribute, parsed in _native_settings({name: value}).items():
                object.__setattr__(self, attribute, parsed)

    @property
    def prealloc_size(self) -> float:
        """The memory allocated at startup, in GiB."""
        return _in_units(self.prealloc_bytes, GIB)

    @property
    def minimal_allocate_size(self) -> float:
        """The allocation unit of the pool, in KiB."""
        return _in_units(self.minimal_allocate_bytes, KIB)

    @property
    def evict_interval(self) -> float:
        """Time between two periodic evictions, in seconds."""
        return self.evict_interval_s

    def verify(self) -> None:
        """Check the settings again after changes.

        Raises:
            ConfigError: a setting is invalid, or settings contradict each other.
        """
        for name, port in (("service_port", self.service_port), ("manage_port", self.manage_port)):
            if port == 0:
                raise ConfigError(f"{name} must be between 1 and {_LARGEST_PORT}, so that clients know it")
        attrs.evolve(self)  # which checks all of it again


_BY_KEY: Final = {setting.key: setting for setting in server_settings()}
_ATTRIBUTES: Final = frozenset(setting.attribute for setting in server_settings())
_NO_LONGER_USED: Final = ("num_stream", "start_delay", "warmup")
"""Settings that the original once accepted and later ignored."""


def _native_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under either name as arguments of the parent class."""
    _pass_over_unknown(given, (*_BY_KEY, *_ATTRIBUTES, *_NO_LONGER_USED))
    found: dict[str, Any] = {name: value for name, value in given.items() if name in _ATTRIBUTES}
    for name, value in given.items():
        if name in _BY_KEY and value is not None:
            setting = _BY_KEY[name]
            try:
                parsed = setting.kind.parse(value)
                setting.kind.check(parsed)
            except ValueError as error:
                raise ConfigError(f"{name}: {value!r} {error}") from None
            found[setting.attribute] = parsed
    return found


def _pass_over_unknown(given: Iterable[str], known: Iterable[str]) -> None:
    known = tuple(known)
    unknown = [name for name in given if name not in known]
    for name in unknown:
        if meant := near(name, known, cutoff=_LOOKS_MISSPELT):
            raise ConfigError(f"there is no setting {name!r}{meant}")
    if unknown:
        _log.warning("settings that mean nothing here: %s", ", ".join(unknown))


def _seconds(variable: str, given: float | None) -> float | None:
    """Return the number in an environment variable, or else `given`."""
    text = os.environ.get(variable)
    try:
        return float(text) if text else given
    except ValueError:
        raise ConfigError(f"{variable} must be a number of seconds, not {text!r}") from None


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be {' or '.join(allowed)}, not {value!r}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number between {low} and {high}, not {value!r}")


def _in_units(size_bytes: int, unit_bytes: int) -> float:
    whole, rest = divmod(size_bytes, unit_bytes)
    return size_bytes / unit_bytes if rest else whole
