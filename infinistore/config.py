"""The settings of a server, and how they are put together.

`ServerConfig` is the one place where a setting is named, explained, defaulted and
bounded. Flags, environment variables, YAML keys and the table in
`docs/configuration.md` all derive from it. `load` puts any such class together: command
line, then environment variables, then a YAML file, then the default. A configuration
that cannot be used does not exist: building one raises `ConfigError`, which names the
setting, where its value came from, and what would do. What a setting is says
`settings.py`; opening sockets and devices is left to those who use the settings.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import attrs

from infinistore.addresses import (
    DEFAULT_SERVICE_PORT,
    default_socket_path,
    host_and_port,
    is_loopback,
    socket_place,
    without_password,
)
from infinistore.disk_settings import ADMISSIONS, SMALLEST_DISK_BYTES, DiskPlace, disk_compression, disk_places
from infinistore.errors import ConfigError
from infinistore.host import MOST_NODES, available_memory
from infinistore.settings import (
    VARIABLE_PREFIX,
    Kind,
    RefusedSetting,
    Setting,
    choice,
    declare,
    integer,
    integer_or_off,
    near,
    number,
    path,
    settings_of,
    size,
    spinning,
    switch,
    text,
)
from infinistore.sizes import GIB, KIB, MIB, DefaultSize, format_size

Config = TypeVar("Config", bound=attrs.AttrsInstance)


def load(
    config_class: type[Config],
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> Config:
    """Return the configuration; see `load_server_config`, which is where the arguments
    are explained.

    Raises ConfigError in one line that names the setting, where its value came from,
    and what would do.
    """
    return _structure(config_class, *_gather(settings_of(config_class), command_line, environment, file))


def source_of(
    config_class: type[attrs.AttrsInstance],
    key: str,
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> str:
    """Return where the value of a setting came from, and the value; nothing for a
    default. The other arguments are those of `load`, which has accepted them.
    """
    return _gather(settings_of(config_class), command_line, environment, file)[1].get(key, "")


def _gather(
    settings: Sequence[Setting],
    command_line: Mapping[str, object],
    environment: Mapping[str, str],
    file: str | Path | None,
) -> tuple[dict[str, object], dict[str, str]]:
    """Return what was written for each setting, and where."""
    raw: dict[str, object] = {}
    origins: dict[str, str] = {}
    if file is not None:
        for key, value in _read_yaml(Path(file), settings).items():
            raw[key], origins[key] = value, f"{file}: {key}: {value}"
    for setting in settings:
        if written := environment.get(setting.variable):
            raw[setting.key], origins[setting.key] = written, f"{setting.variable}={written}"
    for setting in settings:
        given = command_line.get(setting.key)
        if given is not None:
            raw[setting.key], origins[setting.key] = given, _as_written(setting, given)
    return raw, origins


def _as_written(setting: Setting, given: object) -> str:
    if setting.is_switch and isinstance(given, bool):
        return setting.flag if given else setting.negative_flag
    if setting.kind.several and isinstance(given, list | tuple):
        return " ".join(f"{setting.flag} {one}" for one in given)
    return f"{setting.flag} {given}"


def _structure(config_class: type[Config], raw: dict[str, object], origins: dict[str, str]) -> Config:
    import cattrs  # late, like yaml below: `infinistore --help` shows settings and reads none
    from cattrs.gen import make_dict_structure_fn, override

    converter = cattrs.Converter(forbid_extra_keys=True)
    by_key = {setting.key: setting for setting in settings_of(config_class)}

    def hook(setting: Setting) -> Any:
        def structure(value: Any, _: Any) -> Any:
            try:
                parsed = setting.kind.parse(value)
                setting.kind.check(parsed)
            except ValueError as error:
                raise RefusedSetting((setting.key,), str(error)) from None
            return parsed

        return override(rename=setting.key, struct_hook=structure)

    overrides = {setting.attribute: hook(setting) for setting in by_key.values()}
    converter.register_structure_hook(config_class, make_dict_structure_fn(config_class, converter, **overrides))
    try:
        return converter.structure(raw, config_class)
    except cattrs.ClassValidationError as group:
        refused = [error for error in group.exceptions if isinstance(error, RefusedSetting)]
        if not refused:
            raise
        first = refused[0]
        # What was written is to blame rather than what was left at its default.
        key = next((key for key in first.keys if key in origins), first.keys[0])
        setting = by_key[key]
        where = origins.get(key, f"{setting.flag} {setting.default_text} (the default)")
        hint = ""
        if where.startswith(f"{setting.variable}=tcp://"):
            hint = f"; {_LINKS}"
        raise ConfigError(f"{without_password(where)}: {first.problem}{hint}") from None


def _read_yaml(file: Path, settings: Sequence[Setting]) -> dict[str, object]:
    """Return the mapping in the file, without the keys that have no value; every key is
    the key of a setting.
    """
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {file}: {os.strerror(error.errno or 0)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not text in UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{file}{line}: cannot be read as YAML: {problem}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: must hold settings, one a line, such as `service_port: 22345`")
    root = yaml.compose(text, yaml.SafeLoader)
    names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    for name in names:
        if names.count(name) > 1:  # YAML would take the last without a word
            raise ConfigError(f"{file}: {name} is set more than once; keep one of the lines")
    known = [setting.key for setting in settings]
    for key in loaded:
        if key not in known:
            raise ConfigError(f"{file}: there is no setting {key!r}{near(str(key), known)}")
    return {key: value for key, value in loaded.items() if value is not None}


MOST_SHARDS: Final = 256
SMALLEST_POOL_BYTES: Final = 64 * KIB
"""The least that a server must have, and each shard."""
_MOST_BYTES: Final = 1 << 50
_MOST_NAME: Final = 200
"""Other nodes take 256 characters, and a shard's id has its number behind it."""
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")


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


def _cluster_url() -> Kind:
    def check(value: str) -> None:
        from infinistore.cluster.locate import parse_cluster_url  # late: most servers are in none

        parse_cluster_url(value)

    return Kind("URL", text().parse, check)


def _address() -> Kind:
    def check(value: str) -> None:
        host_and_port(value, DEFAULT_SERVICE_PORT)

    return Kind("HOST:PORT", text().parse, check)


def _host_names() -> Kind:
    """Names of hosts, with commas between them."""

    def parse(raw: Any) -> tuple[str, ...]:
        names = raw.split(",") if isinstance(raw, str) else raw
        return tuple(name.strip() for name in names)

    def check(value: Any) -> None:
        if not all(isinstance(name, str) and _HOST_NAME.fullmatch(name) for name in value):
            raise ValueError("must be names of hosts without ports, with commas between them")

    return Kind("NAME,NAME", parse, check)


_CONFIG_VARIABLE: Final = VARIABLE_PREFIX + "CONFIG"
# Not settings of a server: clients read the first two, `load_server_config` the last.
_OTHER_VARIABLES: Final = (VARIABLE_PREFIX + "URL", VARIABLE_PREFIX + "TOKEN", _CONFIG_VARIABLE)

_LINKS: Final = "Kubernetes sets it for a service of this name, unless a pod has enableServiceLinks: false"

_NETWORK, _SHARDS, _MEMORY, _DISK, _EVICTION = "Network", "Shards", "Memory", "Disk", "Eviction"
_CLUSTER, _RDMA, _SECURITY, _LIMITS, _LOGGING = "Cluster", "RDMA", "Security", "Limits", "Logging"


def default_pool_bytes() -> DefaultSize:
    """16 GiB, but at most half of the memory available, in whole MiB."""
    available_bytes = available_memory().available_bytes
    return DefaultSize(max(MIB, min(16 * GIB, available_bytes // 2 // MIB * MIB)))


_POOL_SIZE: Final = size(SMALLEST_POOL_BYTES, _MOST_BYTES, bare_unit_bytes=GIB, bare_unit="GB")
_VALUE_SIZE: Final = size(1, _MOST_BYTES, bare_unit_bytes=MIB, bare_unit="MB")


@attrs.frozen(kw_only=True)
class ServerConfig:
    """Everything that can be set about a server. Sizes are in bytes, times in seconds.

    Raises ConfigError for a value that cannot be used, or for values that do not go
    together.
    """

    host: str = declare(
        text("HOST"),
        "127.0.0.1",
        "Address to listen on. Beyond loopback it requires --token-file, --tenants or --insecure",
        group=_NETWORK,
    )
    service_port: int = declare(
        integer(0, 65535, "PORT"), str(DEFAULT_SERVICE_PORT), "Port for clients; 0 selects a free port", group=_NETWORK
    )
    manage_host: str = declare(
        text("HOST"),
        "127.0.0.1",
        "Address of the management API. Beyond loopback it requires --token-file, --tenants or --insecure",
        group=_NETWORK,
    )
    manage_port: int | None = declare(
        integer_or_off(0, 65535, "PORT"),
        "18080",
        "Port of the management API (HTTP): metrics, health, purge, evict; 0 selects a free port",
        group=_NETWORK,
    )
    unix_socket: str = declare(
        socket_place(),
        "auto",
        "Unix socket for clients on this machine, required for shared memory. auto creates it in a folder that only "
        "this user can enter: $XDG_RUNTIME_DIR/infinistore/PORT.sock, or /tmp/infinistore-UID/PORT.sock",
        group=_NETWORK,
    )
    unix_socket_access: str = declare(
        choice("user", "group", "all"),
        "user",
        "Who may open the Unix socket: only the user of the server, also its group, or all users who can enter the "
        "folder. group and all require --unix-socket PATH",
        group=_NETWORK,
    )
    shm_writes: str = declare(
        choice("auto", "on", "off"),
        "auto",
        "Whether clients on this machine may write to the pool; if not, they send their puts. Auto: unless several "
        "tenants share it",
        group=_NETWORK,
    )
    take_over: bool = declare(
        switch(),
        "off",
        "Take the place of the server that listens on the Unix socket, with its cache; if there is none, start empty",
        group=_NETWORK,
    )
    drain_timeout_s: float = declare(
        number(0, 86400, "SECONDS", "seconds"),
        "10",
        "How long a server that is told to stop waits for running requests",
        key="drain_timeout",
        group=_NETWORK,
    )
    spin_us: int | Literal["adaptive", "off"] | None = declare(
        spinning(10_000),
        None,
        "How long to spin for the next request of a fast client before sleeping. Adaptive: up to 400 microseconds, "
        "while that pays and takes the processor from nobody",
        key="spin_time",
        group=_NETWORK,
        default_text="adaptive; with --shards off, unless there are two cores for each",
    )
    shards: int = declare(
        integer(1, MOST_SHARDS, "N"),
        "1",
        "Number of processes that share the work, the pool and the disks. They listen on PORT, PORT+1 and so on; a "
        "client finds all of them through any",
        group=_SHARDS,
    )
    pin_cores: bool = declare(
        switch(), "on", "Keep each shard on a core of its own, if there are two cores for each", group=_SHARDS
    )
    prealloc_bytes: int = declare(
        _POOL_SIZE,
        default_pool_bytes,
        "Memory allocated at startup, in GB or with a unit (512MiB, 2GiB, 0.5)",
        key="prealloc_size",
        group=_MEMORY,
        default_text="16, or half of the available memory if that is less; a take-over keeps the size",
    )
    minimal_allocate_bytes: int = declare(
        size(64, GIB, bare_unit_bytes=KIB, bare_unit="KB", multiple_of_bytes=64),
        "64",
        "Allocation unit of the pool, in KB or with a unit; every value takes a whole number of units",
        key="minimal_allocate_size",
        group=_MEMORY,
    )
    auto_increase: bool = declare(
        switch(), "off", "Grow the pool when it is full, up to --max-pool-size", group=_MEMORY
    )
    max_pool_bytes: int | None = declare(
        _POOL_SIZE,
        None,
        "Largest pool that --auto-increase may reach, in GB or with a unit",
        key="max_pool_size",
        group=_MEMORY,
        default_text="the available memory of the machine",
    )
    allocator: str = declare(text(), "bitmap", "Strategy that places blocks in the pool", group=_MEMORY)
    huge_pages: bool = declare(
        switch(), "off", "Back the pool with huge pages, which must be reserved on the machine", group=_MEMORY
    )
    numa_node: int | None = declare(
        integer(0, MOST_NODES - 1, "NODE"),
        None,
        "Keep the threads and the pool on this NUMA node, as far as it has memory; doctor lists the nodes",
        group=_MEMORY,
        default_text="any",
    )
    disks: tuple[DiskPlace, ...] = declare(
        disk_places(),
        tuple,
        "Folder for blocks that memory has no room for, and how much it may take, in GB or with a unit; once for each "
        "disk, elsewhere with commas between them",
        key="disk",
        group=_DISK,
        default_text="no disk",
    )
    disk_admission: str = declare(
        choice(*ADMISSIONS),
        "lazy",
        "When a block is written to disk: lazy once a quarter of the pool has been put after it, eager at once, "
        "second-use when it was read once",
        group=_DISK,
    )
    disk_compress: bool = declare(
        disk_compression(),
        "off",
        "Compress blocks on disk, as far as they get shorter. It needs zstandard, the extra `compression`",
        group=_DISK,
    )
    disk_wait_s: float = declare(
        number(0, 86400, "SECONDS", "seconds", above=True),
        "5",
        "How long a read waits for blocks on disk; then they count as missing",
        key="disk_wait",
        group=_DISK,
    )
    cluster: str | None = declare(
        _cluster_url(),
        None,
        "URL of the cluster to join, such as infinistore+etcd://h1:2379,h2:2379/CLUSTER",
        group=_CLUSTER,
        default_text="no cluster",
    )
    node_id: str | None = declare(
        _name("ID"),
        None,
        "Name of this server in its cluster. Another server must not have it. Shards are ID/0, ID/1 and so on",
        group=_CLUSTER,
        default_text="the address it advertises",
    )
    advertise: str | None = declare(
        _address(),
        None,
        "Address at which the clients of the cluster reach this server, without a port at that of --service-port. "
        "Shards have PORT, PORT+1 and so on",
        group=_CLUSTER,
        default_text="--host and --service-port",
    )
    node_weight: int = declare(
        integer(0, 10_000),
        "100",
        "Share of the keys, relative to the other servers of the cluster; 0 for none. Shards divide it",
        group=_CLUSTER,
    )
    node_zone: str | None = declare(
        _name(),
        None,
        "Name of the zone or rack; copies are kept in different ones if there are several",
        group=_CLUSTER,
        default_text="none",
    )
    node_warm_up_s: float = declare(
        number(0, 86400, "SECONDS", "seconds"),
        "30",
        "How long the weight of a server that joins others grows, in five steps",
        key="node_warm_up",
        group=_CLUSTER,
    )
    node_drain_bytes: int | None = declare(
        size(0, _MOST_BYTES, bare_unit_bytes=GIB, bare_unit="GB"),
        None,
        "How much of its hottest blocks `infinistore cluster drain` passes on, in GB or with a unit",
        key="node_drain_size",
        group=_CLUSTER,
        default_text="half of the pool",
    )
    node_drain_bytes_per_s: int = declare(
        size(KIB, _MOST_BYTES, bare_unit_bytes=MIB, bare_unit="MB"),
        "256MiB",
        "How much of that it passes on each second, in MB or with a unit",
        key="node_drain_rate",
        group=_CLUSTER,
    )
    eviction: str = declare(
        text(), "lru", "Strategy that decides which blocks leave a full pool first", group=_EVICTION
    )
    enable_periodic_evict: bool = declare(
        switch(), "off", "Evict every --evict-interval seconds, not only when a put needs space", group=_EVICTION
    )
    evict_interval_s: float = declare(
        number(0.001, 86400, "SECONDS", "seconds"),
        "5",
        "Time between two periodic evictions",
        key="evict_interval",
        group=_EVICTION,
    )
    evict_min_threshold: float = declare(
        number(0, 1, "FRACTION"),
        "0.6",
        "Periodic eviction stops when this fraction of the pool is in use",
        group=_EVICTION,
    )
    evict_max_threshold: float = declare(
        number(0, 1, "FRACTION"),
        "0.8",
        "Periodic eviction starts when more than this fraction of the pool is in use",
        group=_EVICTION,
    )
    dev_name: str | None = declare(
        text("DEVICE"), None, "RDMA device, such as mlx5_0", group=_RDMA, default_text="the first that works, if any"
    )
    ib_port: int = declare(integer(1, 255), "1", "Port of the RDMA device", group=_RDMA)
    link_type: str | None = declare(
        choice("IB", "Ethernet"),
        None,
        "Link type of the RDMA device: InfiniBand, or Ethernet for RoCE",
        group=_RDMA,
        default_text="as reported by the device",
    )
    hint_gid_index: int = declare(
        integer(-1, 255, "INDEX"), "-1", "GID to prefer if it is usable; -1 means no preference", group=_RDMA
    )
    require_rdma: bool = declare(
        switch(), "off", "Refuse to start without RDMA, instead of serving only TCP and shared memory", group=_RDMA
    )
    rdma_timeout_s: float = declare(
        number(0.01, 60, "SECONDS", "seconds"),
        "0.25",
        "How long an RDMA peer may be silent before it counts as lost; some devices take four times as long",
        key="rdma_timeout",
        group=_RDMA,
    )
    token_file: Path | None = declare(
        path(),
        None,
        "File whose first line is the token that every client must present",
        group=_SECURITY,
        default_text="no token",
    )
    tenants: Path | None = declare(
        path(),
        None,
        "YAML file with the tenants of this server, which `infinistore tenant` edits. SIGHUP reads it again. Not "
        "together with --token-file",
        group=_SECURITY,
        default_text="one tenant",
    )
    insecure: bool = declare(
        switch(), "off", "Let anyone who reaches the port read and write, also beyond loopback", group=_SECURITY
    )
    manage_allowed_hosts: tuple[str, ...] = declare(
        _host_names(),
        tuple,
        "Names by which the management API of a server without a token may be asked, besides IP addresses, localhost "
        "and the name of the machine",
        group=_SECURITY,
        default_text="none",
    )
    tls_cert: Path | None = declare(
        path(),
        None,
        "File with the certificate of this server and those of its issuers, in PEM. TCP and the management API then "
        "need TLS. SIGHUP reads the files of TLS again",
        group=_SECURITY,
        default_text="no TLS",
    )
    tls_key: Path | None = declare(
        path(),
        None,
        "File with the key of --tls-cert, in PEM, without a passphrase",
        group=_SECURITY,
        default_text="the file of --tls-cert",
    )
    tls_client_ca: Path | None = declare(
        path(),
        None,
        "File with authorities, in PEM: clients over TCP must show a certificate that one of them has signed",
        group=_SECURITY,
        default_text="clients need none",
    )
    audit_log: str | None = declare(
        text("FILE|-"),
        None,
        "File to which one line of JSON is added for each login, refusal and administrative act; - is stderr",
        group=_SECURITY,
        default_text="no file",
    )
    tls_peer_ca: Path | None = declare(
        path(),
        None,
        "File with authorities, in PEM, that have signed the certificates of the other nodes of the cluster, besides "
        "those of the system and of --tls-client-ca",
        group=_SECURITY,
        default_text="no others",
    )
    peer_token_file: Path | None = declare(
        path(),
        None,
        "With --tenants and --cluster: file with the token of a tenant, by which this server asks the other nodes who "
        "they are. SIGHUP reads it again",
        group=_SECURITY,
        default_text="that of --token-file, or none",
    )
    unix_socket_group: str | None = declare(
        text("GROUP"),
        None,
        "Group whose members may open the Unix socket, by name or number, with --unix-socket-access group. The server "
        "must be in it, or be root",
        group=_SECURITY,
        default_text="its own group",
    )
    max_connections: int = declare(
        integer(1, 1_000_000),
        "1024",
        "Maximum number of concurrent connections; further ones are refused",
        group=_LIMITS,
    )
    max_value_bytes: int = declare(
        _VALUE_SIZE, "1GiB", "Maximum length of a value, in MB or with a unit", key="max_value_size", group=_LIMITS
    )
    max_batch_bytes: int = declare(
        _VALUE_SIZE,
        "1GiB",
        "Maximum payload of one request, in MB or with a unit; clients split larger batches",
        key="max_batch_size",
        group=_LIMITS,
    )
    max_batch_keys: int = declare(
        integer(1, 1_000_000),
        "8192",
        "Maximum number of keys in one request; clients split larger batches",
        group=_LIMITS,
    )
    max_key_bytes: int = declare(
        size(1, KIB, bare_unit_bytes=1, bare_unit="bytes"),
        "1024",
        "Maximum length of a key, in bytes of UTF-8",
        key="max_key_size",
        group=_LIMITS,
    )
    max_protected_ratio: float = declare(
        number(0, 1, "FRACTION"),
        "0.25",
        "Maximum fraction of the pool that pinned keys may take together; they are never evicted",
        group=_LIMITS,
    )
    log_level: str = declare(
        choice("error", "warning", "info", "debug"), "info", "Log level; debug also shows tracebacks", group=_LOGGING
    )
    log_format: str = declare(
        choice("auto", "text", "json"),
        "auto",
        "Format of the log: text for people, or JSON, one object per line; auto is text on a terminal, JSON elsewhere",
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


_Conflict = tuple[tuple[str, ...], str]
"""What cannot be said about one setting alone: keys, and the problem."""
_REMEDY: Final = "add --token-file FILE or --tenants FILE, or --insecure to allow that"
_EVERYWHERE: Final = ("0.0.0.0", "::", "*", "[::]")


def _conflicts(config: ServerConfig) -> Iterator[_Conflict]:
    yield from _conflicts_of_security(config)
    yield from _conflicts_of_places(config)
    if config.shards > 1:
        yield from _conflicts_of_shards(config)
    for small, large, relation in _ORDER:
        low, high = getattr(config, small.attribute), getattr(config, large.attribute)
        if high is not None and (low > high or (low == high and relation == "smaller than")):
            spelt = [format_size(value) if isinstance(value, int) else f"{value:g}" for value in (low, high)]
            problem = f"{small.flag} ({spelt[0]}) must be {relation} {large.flag} ({spelt[1]})"
            yield (small.key, large.key), problem


def _conflicts_of_security(config: ServerConfig) -> Iterator[_Conflict]:
    has_tenants, has_tls = config.tenants is not None, config.tls_cert is not None
    known = config.token_file is not None or has_tenants or config.insecure
    if has_tenants and config.token_file is not None:
        problem = "does not go together with --token-file: each tenant has tokens of its own; leave one of them out"
        yield ("tenants", "token_file"), problem
    if config.peer_token_file is not None and (not has_tenants or config.cluster is None):
        problem = "goes with --tenants and --cluster; nodes without tenants ask each other with --token-file"
        yield ("peer_token_file",), problem
    if has_tenants and _registers_in_etcd(config.cluster) and config.peer_token_file is None and not has_tls:
        problem = (
            "in a cluster need --peer-token-file FILE, the token of a tenant, with which nodes ask each other who "
            "they are; or --tls-cert, if a tenant has that certificate"
        )
        yield ("tenants", "cluster"), problem
    if not is_loopback(config.host) and not known and config.tls_client_ca is None:
        yield ("host",), "other machines could read and write everything; " + _REMEDY
    if not is_loopback(config.manage_host) and config.manage_port is not None and not known:
        yield ("manage_host",), "other machines could delete everything; " + _REMEDY
    for key in ("tls_key", "tls_client_ca", "tls_peer_ca"):
        if not has_tls and getattr(config, key) is not None:
            yield (key,), "needs --tls-cert FILE, the certificate of this server"


def _conflicts_of_places(config: ServerConfig) -> Iterator[_Conflict]:
    if config.unix_socket == "auto" and config.unix_socket_access != "user":
        yield ("unix_socket_access",), "needs --unix-socket PATH, in a folder that they can enter"
    if config.unix_socket_group is not None and config.unix_socket_access != "group":
        yield ("unix_socket_group",), "needs --unix-socket-access group"
    if config.service_port == config.manage_port != 0:
        yield ("manage_port", "service_port"), "is the service port too; give one of them another port"
    if config.take_over and config.unix_socket == "off":
        yield ("take_over", "unix_socket"), "needs the Unix socket of the other server"
    if config.take_over and config.unix_socket == "auto" and config.service_port == 0:
        yield ("take_over", "service_port"), "needs the port of the other server, or --unix-socket PATH"
    if _registers_in_etcd(config.cluster):
        if config.advertise is None and config.host in _EVERYWHERE:
            problem = f"--host {config.host} is no address that others can connect to; add --advertise HOST:PORT"
            yield ("cluster", "host"), problem
        if config.advertise is not None and host_and_port(config.advertise, 1)[0] in _EVERYWHERE:
            yield ("advertise",), "is no address that others can connect to; name this machine"


def _registers_in_etcd(cluster: str | None) -> bool:
    """Whether a server with this URL of a cluster registers in etcd."""
    return (cluster or "").partition("://")[0].endswith("+etcd")


def _conflicts_of_shards(config: ServerConfig) -> Iterator[_Conflict]:
    count, first, manage = config.shards, config.service_port, config.manage_port or 0
    last = first + count - 1
    if first and last > 65535:
        yield ("shards", "service_port"), f"would need the ports {first} to {last}; lower --service-port"
    if 0 < first < manage <= last:
        problem = f"is the port of a shard too: they have {first} to {last}; give one of them another port"
        yield ("manage_port", "service_port", "shards"), problem
    least_bytes = max(SMALLEST_POOL_BYTES, config.minimal_allocate_bytes)
    parts = [("prealloc_size", "", config.prealloc_bytes, least_bytes)]
    parts += [("disk", f"{disk} ", disk.size_bytes, SMALLEST_DISK_BYTES) for disk in config.disks]
    for key, what, size_bytes, least_bytes in parts:
        if size_bytes < count * least_bytes:
            problem = f"{what}leaves less than {format_size(least_bytes)} for each of {count} shards"
            yield (key, "shards"), f"{problem}; give {format_size(count * least_bytes)} or more"


def shown_settings(config: attrs.AttrsInstance) -> dict[str, Any]:
    """Return a configuration as plain values by attribute, for everybody to see: no
    secret ones, and of a URL neither its user nor its options.
    """
    fields = attrs.fields(type(config))
    return {field.name: _plain(getattr(config, field.name)) for field in fields if field.repr}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return list(map(_plain, value))
    if value is None or isinstance(value, int | float):  # a switch, too
        return value
    text = str(value)
    return without_password(text).partition("?")[0] if "://" in text else text


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


def kubernetes_port(environment: Mapping[str, str] | None = None) -> str:
    """Return a warning if Kubernetes sets the port of a server, because there is a
    service called infinistore; else nothing.
    """
    environment = os.environ if environment is None else environment
    name = VARIABLE_PREFIX + "SERVICE_PORT"
    if name not in environment or not environment.get(VARIABLE_PREFIX + "PORT", "").startswith("tcp://"):
        return ""
    return f"{name}={environment[name]} is used; {_LINKS}"
