"""The settings of a server that is a node of a cluster, and what does not go together
with them.
"""

from typing import Any, Final, Protocol

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port
from infinistore.settings import Kind, declare, integer, number, size, text
from infinistore.sizes import GIB, KIB, MIB

__all__ = [
    "conflicts_of_cluster",
    "registers_in_etcd",
]

_CLUSTER: Final = "Cluster"
_MOST_BYTES: Final = 1 << 50
_EVERYWHERE: Final = ("0.0.0.0", "::", "*", "[::]")
_MOST_NAME: Final = 200
"""Other nodes take 256 characters, and a shard's id has its number behind it."""


def _name(metavar: str = "NAME") -> Kind:
    """A text that other processes take from this one."""

    def check(value: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("must be Unicode") from None
        if len(value) > _MOST_NAME:
            raise ValueError(f"must have at most {_MOST_NAME} characters")

    return Kind(metavar, text().parse, check)


def _cluster() -> Any:
    """Where to register: the URL of a cluster."""

    def check(value: str) -> None:
        from infinistore.cluster.locate import parse_cluster_url  # late: most servers are in none

        parse_cluster_url(value)

    help_text = "URL of the cluster to join, such as infinistore+etcd://h1:2379,h2:2379/CLUSTER"
    kind = Kind("URL", text().parse, check)
    return declare("cluster", kind, None, help_text, group=_CLUSTER, default_text="no cluster")


def _node_id() -> Any:
    """The name of the node."""
    help_text = "Name of this server in its cluster. Another server must not have it. Shards are ID/0, ID/1 and so on"
    return declare("node_id", _name("ID"), None, help_text, group=_CLUSTER, default_text="the address it advertises")


def _advertise() -> Any:
    """Where others reach the node."""

    def check(value: str) -> None:
        host_and_port(value, DEFAULT_SERVICE_PORT)

    return declare(
        "advertise",
        Kind("HOST:PORT", text().parse, check),
        None,
        "Address at which the clients of the cluster reach this server. Without a port, it is that for clients; shards "
        "have PORT, PORT+1 and so on",
        group=_CLUSTER,
        default_text="--host and --service-port",
    )


def _node_weight() -> Any:
    """The share of the node."""
    help_text = "Share of the keys, relative to the other servers of the cluster; 0 for none. Shards divide it"
    return declare("node_weight", integer(0, 10_000), "100", help_text, group=_CLUSTER)


def _node_zone() -> Any:
    """Where the node stands."""
    help_text = "Name of the zone or rack; copies are kept in different ones if there are several"
    return declare("node_zone", _name(), None, help_text, group=_CLUSTER, default_text="none")


def _node_warm_up() -> Any:
    """How long the weight grows."""
    help_text = "How long the weight of a server that joins others grows, in five steps"
    return declare("node_warm_up", number(0, 86400, "SECONDS", "seconds"), "30", help_text, group=_CLUSTER)


def _node_drain_size() -> Any:
    """How much a node passes on."""
    help_text = (
        "How much of its hottest blocks a server passes on that drains by `infinistore cluster drain`, in GB or with "
        "a unit"
    )
    kind = size(0, _MOST_BYTES, bare_unit_bytes=GIB, bare_unit="GB")
    return declare("node_drain_size", kind, None, help_text, group=_CLUSTER, default_text="half of the pool")


def _node_drain_rate() -> Any:
    """How fast it does that."""
    help_text = "How much of that it passes on each second, in MB or with a unit"
    kind = size(KIB, _MOST_BYTES, bare_unit_bytes=MIB, bare_unit="MB")
    return declare("node_drain_rate", kind, "256MiB", help_text, group=_CLUSTER)


class _Settings(Protocol):
    @property
    def cluster(self) -> str | None: ...
    @property
    def advertise(self) -> str | None: ...
    @property
    def host(self) -> str: ...


def conflicts_of_cluster(config: _Settings) -> list[tuple[tuple[str, ...], str]]:
    """Return what does not go together, as (keys of settings, problem)."""
    found: list[tuple[tuple[str, ...], str]] = []
    if registers_in_etcd(config.cluster):
        if config.advertise is None and config.host in _EVERYWHERE:
            problem = f"--host {config.host} is no address that others can connect to; add --advertise HOST:PORT"
            found.append((("cluster", "host"), problem))
        if config.advertise is not None and host_and_port(config.advertise, 1)[0] in _EVERYWHERE:
            problem = "is no address that others can connect to; name this machine"
            found.append((("advertise",), problem))
    return found


def registers_in_etcd(cluster: str | None) -> bool:
    """Whether a server with this URL of a cluster registers in etcd."""
    return (cluster or "").partition("://")[0].endswith("+etcd")
