"""The settings of a server, and how they are put together.

`ServerConfig` is the one place where a setting is named, explained, defaulted and
bounded. Flags, environment variables, YAML keys and the table in
`docs/configuration.md` all derive from it. Precedence: command line, then
`INFINISTORE_*` variables, then the YAML file, then the default. A configuration that
cannot be used does not exist: building one raises `ConfigError`, which names the
setting, where its value came from, and what would do.

Opening sockets and devices is left to those who use the settings; the layers are read
by `config_sources.py`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import attrs

from infinistore import cluster_settings, limit_settings, security_settings
from infinistore.addresses import DEFAULT_SERVICE_PORT, default_socket_path, socket_place
from infinistore.config_sources import load
from infinistore.disk_settings import ADMISSIONS, DiskPlace, disk_places
from infinistore.host import numa_node as declare_numa_node
from infinistore.settings import (
    VARIABLE_PREFIX,
    RefusedSetting,
    Setting,
    choice,
    declare,
    integer,
    integer_or_off,
    near,
    number,
    settings_of,
    size,
    spinning,
    switch,
    text,
)
from infinistore.shard_settings import MOST_SHARDS, SMALLEST_POOL_BYTES, conflicts_of_shards
from infinistore.sizes import GIB, KIB, MIB, format_size

__all__ = [
    "ServerConfig",
    "load_server_config",
    "misspelt_variables",
    "server_settings",
]

_LARGEST_POOL_BYTES: Final = 1 << 50
_CONFIG_VARIABLE: Final = VARIABLE_PREFIX + "CONFIG"
# Not settings of a server: clients read the first two, `load_server_config` the last.
_OTHER_VARIABLES: Final = (VARIABLE_PREFIX + "URL", VARIABLE_PREFIX + "TOKEN", _CONFIG_VARIABLE)

_NETWORK, _SHARDS, _MEMORY, _DISK, _EVICTION = "Network", "Shards", "Memory", "Disk", "Eviction"
_RDMA, _LIMITS, _LOGGING = "RDMA", "Limits", "Logging"


def _default_pool_bytes() -> int:
    """16 GiB, but at most half of the memory available, in whole MiB."""
    from infinistore.host import available_memory  # late: only a server needs it

    available_bytes = available_memory().available_bytes
    return max(MIB, min(16 * GIB, available_bytes // 2 // MIB * MIB))


_POOL_SIZE: Final = size(SMALLEST_POOL_BYTES, _LARGEST_POOL_BYTES, bare_unit_bytes=GIB, bare_unit="GB")
_VALUE_SIZE: Final = size(1, _LARGEST_POOL_BYTES, bare_unit_bytes=MIB, bare_unit="MB")


@attrs.frozen(kw_only=True)
class ServerConfig:
    """Everything that can be set about a server. Sizes are in bytes, times in seconds.

    Raises ConfigError for a value that cannot be used, or for values that do not go
    together.
    """

    host: str = declare(
        "host",
        text("HOST"),
        "127.0.0.1",
        "Address to listen on. Beyond loopback it requires --token-file, --tenants or --insecure",
        group=_NETWORK,
    )
    service_port: int = declare(
        "service_port",
        integer(0, 65535, "PORT"),
        str(DEFAULT_SERVICE_PORT),
        "Port for clients; 0 selects a free port",
        group=_NETWORK,
    )
    manage_host: str = declare(
        "manage_host",
        text("HOST"),
        "127.0.0.1",
        "Address of the management API. Beyond loopback it requires --token-file, --tenants or --insecure",
        group=_NETWORK,
    )
    manage_port: int | None = declare(
        "manage_port",
        integer_or_off(0, 65535, "PORT"),
        "18080",
        "Port of the management API (HTTP): metrics, health, purge, evict; 0 selects a free port",
        group=_NETWORK,
    )
    unix_socket: str = declare(
        "unix_socket",
        socket_place(),
        "auto",
        "Unix socket for clients on this machine, required for shared memory. auto creates it in a folder that only "
        "this user can enter: $XDG_RUNTIME_DIR/infinistore/PORT.sock, or /tmp/infinistore-UID/PORT.sock",
        group=_NETWORK,
    )
    unix_socket_access: str = declare(
        "unix_socket_access",
        choice("user", "group", "all"),
        "user",
        "Who may open the Unix socket: only the user of the server, also its group, or all users who can enter the "
        "folder. group and all require --unix-socket PATH",
        group=_NETWORK,
    )
    shm_writes: str = declare(
        "shm_writes",
        choice("auto", "on", "off"),
        "auto",
        "Whether clients on this machine may write to the pool; if not, they send their puts. Auto: unless several "
        "tenants share it",
        group=_NETWORK,
    )
    take_over: bool = declare(
        "take_over",
        switch(),
        "off",
        "Take the place of the server that listens on the Unix socket, with its cache; without one, start empty",
        group=_NETWORK,
    )
    drain_timeout_s: float = declare(
        "drain_timeout",
        number(0, 86400, "SECONDS", "seconds"),
        "10",
        "How long a server that is told to stop waits for running requests",
        group=_NETWORK,
    )
    spin_us: int | Literal["adaptive", "off"] | None = declare(
        "spin_time",
        spinning(10_000),
        None,
        "How long to spin for the next request of a fast client before sleeping. Adaptive: up to 400 microseconds, "
        "while that pays and takes the processor from nobody",
        group=_NETWORK,
        default_text="adaptive; with --shards off, unless there are two cores for each",
    )
    shards: int = declare(
        "shards",
        integer(1, MOST_SHARDS, "N"),
        "1",
        "Number of processes that share the work. Each has a part of the pool and a part of each disk. They "
        "listen on PORT, PORT+1 and so on; a client finds all of them through any",
        group=_SHARDS,
    )
    pin_cores: bool = declare(
        "pin_cores",
        switch(),
        "on",
        "Keep each shard on a core of its own, if there are two cores for each",
        group=_SHARDS,
    )
    prealloc_bytes: int = declare(
        "prealloc_size",
        _POOL_SIZE,
        _default_pool_bytes,
        "Memory allocated at startup, in GB or with a unit (512MiB, 2GiB, 0.5)",
        group=_MEMORY,
        default_text="16, or half of the available memory if that is less",
    )
    minimal_allocate_bytes: int = declare(
        "minimal_allocate_size",
        size(64, GIB, bare_unit_bytes=KIB, bare_unit="KB", multiple_of_bytes=64),
        "64",
        "Allocation unit of the pool, in KB or with a unit; every value takes a whole number of units",
        group=_MEMORY,
    )
    auto_increase: bool = declare(
        "auto_increase",
        switch(),
        "off",
        "Grow the pool when it is full, up to --max-pool-size",
        group=_MEMORY,
    )
    max_pool_bytes: int | None = declare(
        "max_pool_size",
        _POOL_SIZE,
        None,
        "Largest pool that --auto-increase may reach, in GB or with a unit",
        group=_MEMORY,
        default_text="the available memory of the machine",
    )
    allocator: str = declare("allocator", text(), "bitmap", "Strategy that places blocks in the pool", group=_MEMORY)
    huge_pages: bool = declare(
        "huge_pages",
        switch(),
        "off",
        "Back the pool with huge pages, which must be reserved on the machine",
        group=_MEMORY,
    )
    numa_node: int | None = declare_numa_node()
    disks: tuple[DiskPlace, ...] = declare(
        "disk",
        disk_places(),
        tuple,
        "Folder for blocks that memory has no room for, and how much it may take, in GB or with a unit. May be given "
        "several times, once for each disk; elsewhere with commas between them",
        group=_DISK,
        default_text="no disk",
    )
    disk_admission: str = declare(
        "disk_admission",
        choice(*ADMISSIONS),
        "lazy",
        "When a block is written to disk: lazy once a quarter of the pool has been put after it, eager at once, "
        "second-use when it was read once",
        group=_DISK,
    )
    disk_wait_s: float = declare(
        "disk_wait",
        number(0, 86400, "SECONDS", "seconds", above=True),
        "5",
        "How long a read waits for blocks on disk; then they count as missing",
        group=_DISK,
    )
    cluster: str | None = cluster_settings._cluster()
    node_id: str | None = cluster_settings._node_id()
    advertise: str | None = cluster_settings._advertise()
    node_weight: int = cluster_settings._node_weight()
    node_zone: str | None = cluster_settings._node_zone()
    node_warm_up_s: float = cluster_settings._node_warm_up()
    node_drain_bytes: int | None = cluster_settings._node_drain_size()
    node_drain_bytes_per_s: int = cluster_settings._node_drain_rate()
    enable_periodic_evict: bool = declare(
        "enable_periodic_evict",
        switch(),
        "off",
        "Evict every --evict-interval seconds, not only when a put needs space",
        group=_EVICTION,
    )
    evict_interval_s: float = declare(
        "evict_interval",
        number(0.001, 86400, "SECONDS", "seconds"),
        "5",
        "Time between two periodic evictions",
        group=_EVICTION,
    )
    evict_min_threshold: float = declare(
        "evict_min_threshold",
        number(0, 1, "FRACTION"),
        "0.6",
        "Periodic eviction stops when this fraction of the pool is in use",
        group=_EVICTION,
    )
    evict_max_threshold: float = declare(
        "evict_max_threshold",
        number(0, 1, "FRACTION"),
        "0.8",
        "Periodic eviction starts when more than this fraction of the pool is in use",
        group=_EVICTION,
    )
    dev_name: str | None = declare(
        "dev_name",
        text("DEVICE"),
        None,
        "RDMA device, such as mlx5_0",
        group=_RDMA,
        default_text="the first that works, if any",
    )
    ib_port: int = declare("ib_port", integer(1, 255), "1", "Port of the RDMA device", group=_RDMA)
    link_type: str | None = declare(
        "link_type",
        choice("IB", "Ethernet"),
        None,
        "Link type of the RDMA device: InfiniBand, or Ethernet for RoCE",
        group=_RDMA,
        default_text="as reported by the device",
    )
    hint_gid_index: int = declare(
        "hint_gid_index",
        integer(-1, 255, "INDEX"),
        "-1",
        "GID to prefer if it is usable; -1 means no preference",
        group=_RDMA,
    )
    require_rdma: bool = declare(
        "require_rdma",
        switch(),
        "off",
        "Refuse to start without RDMA, instead of serving only TCP and shared memory",
        group=_RDMA,
    )
    rdma_timeout_s: float = declare(
        "rdma_timeout",
        number(0.01, 60, "SECONDS", "seconds"),
        "0.25",
        "How long an RDMA peer may be silent before it counts as lost; some devices take four times as long",
        group=_RDMA,
    )
    token_file: Path | None = security_settings._token_file()  # noqa: RUF009
    tenants: Path | None = security_settings._tenants()  # noqa: RUF009
    insecure: bool = security_settings._insecure()
    manage_allowed_hosts: tuple[str, ...] = security_settings._manage_allowed_hosts()
    tls_cert: Path | None = security_settings._tls_cert()  # noqa: RUF009
    tls_key: Path | None = security_settings._tls_key()  # noqa: RUF009
    tls_client_ca: Path | None = security_settings._tls_client_ca()  # noqa: RUF009
    audit_log: str | None = security_settings._audit_log()
    tls_peer_ca: Path | None = security_settings._tls_peer_ca()  # noqa: RUF009
    peer_token_file: Path | None = security_settings._peer_token_file()  # noqa: RUF009
    unix_socket_group: str | None = security_settings._unix_socket_group()
    max_connections: int = declare(
        "max_connections",
        integer(1, 1_000_000),
        "1024",
        "Maximum number of concurrent connections; further ones are refused",
        group=_LIMITS,
    )
    max_value_bytes: int = declare(
        "max_value_size", _VALUE_SIZE, "1GiB", "Maximum length of a value, in MB or with a unit", group=_LIMITS
    )
    max_batch_bytes: int = declare(
        "max_batch_size",
        _VALUE_SIZE,
        "1GiB",
        "Maximum payload of one request, in MB or with a unit; clients split larger batches",
        group=_LIMITS,
    )
    max_batch_keys: int = declare(
        "max_batch_keys",
        integer(1, 1_000_000),
        "8192",
        "Maximum number of keys in one request; clients split larger batches",
        group=_LIMITS,
    )
    max_key_bytes: int = limit_settings._max_key_bytes()
    max_protected_ratio: float = limit_settings._max_protected_ratio()
    log_level: str = declare(
        "log_level",
        choice("error", "warning", "info", "debug"),
        "info",
        "Log level; debug also shows tracebacks",
        group=_LOGGING,
    )

    def __attrs_post_init__(self) -> None:
        for names, problem in _conflicts(self):
            raise RefusedSetting(names, problem)

    def socket_path(self, service_port: int) -> Path | None:
        """Where the Unix socket of a server on this port is; None if it is off. Its
        folder may not exist yet.
        """
        if self.unix_socket == "off":
            return None
        return default_socket_path(service_port) if self.unix_socket == "auto" else Path(self.unix_socket).absolute()


def _conflicts(config: ServerConfig) -> list[tuple[tuple[str, ...], str]]:
    """What cannot be said about one setting alone: (keys, problem)."""
    found = security_settings.conflicts_of_security(config)
    if config.unix_socket == "auto" and config.unix_socket_access != "user":
        found.append((("unix_socket_access",), "needs --unix-socket PATH, in a folder that they can enter"))
    if config.unix_socket_group is not None and config.unix_socket_access != "group":
        found.append((("unix_socket_group",), "needs --unix-socket-access group"))
    if config.service_port == config.manage_port != 0:
        found.append((("manage_port", "service_port"), "is the service port too; give one of them another port"))
    if config.take_over and config.shards > 1:
        found.append((("take_over", "shards"), "goes with one process only; a server of several starts empty"))
    if config.take_over and config.unix_socket == "off":
        found.append((("take_over", "unix_socket"), "needs the Unix socket of the other server"))
    if config.take_over and config.unix_socket == "auto" and config.service_port == 0:
        found.append((("take_over", "service_port"), "needs the port of the other server, or --unix-socket PATH"))
    found += cluster_settings.conflicts_of_cluster(config)
    found += conflicts_of_shards(
        config.shards,
        ports=(config.service_port, config.manage_port or 0),
        pool_bytes=config.prealloc_bytes,
        least_bytes=max(SMALLEST_POOL_BYTES, config.minimal_allocate_bytes),
        disks=config.disks,
    )
    for small, large, relation in _ORDER:
        low, high = getattr(config, small.attribute), getattr(config, large.attribute)
        if high is not None and (low > high or (low == high and relation == "smaller than")):
            spelt = [format_size(value) if isinstance(value, int) else f"{value:g}" for value in (low, high)]
            problem = f"{small.flag} ({spelt[0]}) must be {relation} {large.flag} ({spelt[1]})"
            found.append(((small.key, large.key), problem))
    return found


def server_settings() -> tuple[Setting, ...]:
    """Every setting of a server, in the order they are documented."""
    return settings_of(ServerConfig)


_BY_KEY: Final = {setting.key: setting for setting in server_settings()}
_ORDER: Final = (
    (_BY_KEY["evict_min_threshold"], _BY_KEY["evict_max_threshold"], "smaller than"),
    (_BY_KEY["minimal_allocate_size"], _BY_KEY["prealloc_size"], "at most"),
    (_BY_KEY["prealloc_size"], _BY_KEY["max_pool_size"], "at most"),
    (_BY_KEY["max_value_size"], _BY_KEY["max_batch_size"], "at most"),
)


def load_server_config(
    command_line: Mapping[str, object] | None = None,
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Put a configuration together: `command_line`, then `environment`, then `file`,
    then the defaults.

    `command_line` maps keys of settings to what was written (None: not given). `file`
    is a YAML file; without one, INFINISTORE_CONFIG may name it. `environment` is that
    of this process unless given; an empty variable counts as not set.

    Raises ConfigError in one line that names the setting, where its value came from,
    and what would do.
    """
    environment = os.environ if environment is None else environment
    return load(ServerConfig, command_line or {}, environment, file or environment.get(_CONFIG_VARIABLE) or None)


def misspelt_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each INFINISTORE_* variable that is not known but looks like
    one that is.

    Not an error: Kubernetes sets variables of its own for a service that is called
    infinistore.
    """
    environment = os.environ if environment is None else environment
    known = [setting.variable for setting in server_settings()] + list(_OTHER_VARIABLES)
    unknown = [name for name in sorted(environment) if name.startswith(VARIABLE_PREFIX) and name not in known]
    # The prefix makes any two look alike: INFINISTORE_SERVICE_HOST, which Kubernetes
    # sets, is 0.917 like ..._PORT.
    likely = [(name, near(name, known, cutoff=0.92)) for name in unknown]
    return [f"the variable {name} means nothing here{hint}" for name, hint in likely if hint]
