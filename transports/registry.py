"""Transports that other packages bring, found by their entry points.

A package adds one with an entry point:

    [project.entry-points."infinistore.transports"]
    loopback = "some_package:LOOPBACK"

The object behind it is a `Transport`, which names both of its halves: what moves blocks
in the client, and what moves them in the server. The names of the built-in transports
cannot be taken over. Modules are imported only when somebody asks for their transport.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import attrs

from infinistore.errors import ConfigError

ENTRY_POINT_GROUP: Final = "infinistore.transports"
BUILT_IN: Final = ("rdma", "shm", "inline")
"""The transports of client and server themselves, which no entry point replaces."""


@attrs.frozen
class Transport:
    """A way for blocks to travel, as two factories. A half that needs no code is None.

    The factories are typed loosely because this module knows neither side:
    `infinistore.client.movers.base` and `infinistore.server.movers.base` say what they
    take and what they return.
    """

    name: str
    """The name of the entry point, and the name under which statistics show it."""
    client_mover: Callable[..., Any] | None = None
    server_mover: Callable[..., Any] | None = None


def _entry_points() -> dict[str, EntryPoint]:
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: point for point in found if point.name not in BUILT_IN}


def transport_names() -> list[str]:
    """Return the names of the transports that other packages bring, sorted."""
    return sorted(_entry_points())


def load_transport(name: str) -> Transport:
    """Import the transport that another package brings under this name.

    Raises:
        ConfigError: no package brings it, or it cannot be loaded.
    """
    point = _entry_points().get(name)
    if point is None:
        known = ", ".join(transport_names()) or "none"
        raise ConfigError(f"no package brings a transport called {name!r}; installed: {known}")
    return _load(point)


def installed_transports() -> list[Transport]:
    """Import all transports that other packages bring, sorted by name.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    points = _entry_points()
    return [_load(points[name]) for name in sorted(points)]


def _load(point: EntryPoint) -> Transport:
    where = f"the transport {point.name!r} ({point.value})"
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}") from error
    if not isinstance(loaded, Transport):
        raise ConfigError(f"{where} is not an infinistore.transports.Transport")
    if loaded.name != point.name:
        raise ConfigError(f"{where} calls itself {loaded.name!r}; both names must be the same")
    return loaded
