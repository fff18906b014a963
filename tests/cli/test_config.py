"""Where a setting comes from, what is refused, and what the refusal says."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from infinistore import settings
from infinistore.addresses import default_socket_path, is_loopback
from infinistore.client.options import make_options
from infinistore.config import (
    ServerConfig,
    kubernetes_port,
    load_server_config,
    misspelt_variables,
    server_settings,
    shown_settings,
)
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.secret_files import read_token
from infinistore.sizes import GIB, KIB, MIB
from tests.cli.conftest import Run

SETTINGS = {setting.key: setting for setting in server_settings()}

# Two or more values for each setting, of which any mixture goes together.
VALUES: dict[str, list[Any]] = {
    "host": ["127.0.0.1", "::1", "localhost"],
    "service_port": [0, 1, "22345"],
    "manage_host": ["127.0.0.2", "localhost"],
    "manage_port": [2, "65535", "off"],
    "unix_socket": ["auto", "off", "/run/infinistore.sock"],
    "spin_time": [0, "50", 10_000, "adaptive", "Off"],
    "unix_socket_access": ["user", "User"],
    "unix_socket_group": ["kv", "10001"],
    "shm_writes": ["auto", "on", "off"],
    "drain_timeout": [0, "2.5", 86400],
    "shards": [1, "1"],
    "cluster": ["infinistore+static://a,b", "infinistore+file:///etc/nodes.json"],
    "node_id": ["a", "rack 1"],
    "advertise": ["10.0.0.7", "there.example:22345"],
    "node_weight": [0, "250"],
    "node_zone": ["z"],
    "node_warm_up": [0, "2.5"],
    "node_drain_size": [0, "512MiB", 0.5],
    "node_drain_rate": [16, "1GiB"],
    "pin_cores": [True, "off"],
    "prealloc_size": [1, "512MiB", 0.5, "2GiB"],
    "minimal_allocate_size": [16, "64", "1MiB"],
    "auto_increase": [True, False, "yes"],
    "max_pool_size": [4096, "3TiB"],
    "allocator": ["bitmap", "slab"],
    "eviction": ["adaptive", "lru"],
    "huge_pages": [True, "0"],
    "numa_node": [0, "3"],
    "disk": ["/mnt/a:1TiB", "/mnt/a:64MiB,/mnt/b:0.5", "~/cache:2G"],
    "disk_admission": ["lazy", "Second-Use"],
    "disk_compress": [True, "off"],
    "disk_wait": [1, "2.5"],
    "enable_periodic_evict": ["on", "off"],
    "evict_interval": [5, 0.25, "1"],
    "evict_min_threshold": [0, 0.5, ".25"],
    "evict_max_threshold": [0.75, "1", 1.0],
    "dev_name": ["mlx5_0", "rxe0"],
    "ib_port": [1, "2"],
    "link_type": ["IB", "ethernet"],
    "hint_gid_index": [-1, "3"],
    "require_rdma": [True, "off"],
    "rdma_timeout": [1, "0.25"],
    "token_file": ["/etc/token", "token"],
    "tenants": ["/etc/tenants.yaml"],
    "audit_log": ["-", "/var/log/audit"],
    "insecure": [True, "false"],
    "manage_allowed_hosts": ["kv.example,kv"],
    "take_over": [True, "no"],
    "tls_cert": ["/etc/server.pem"],
    "tls_key": ["/etc/server.key"],
    "tls_client_ca": ["/etc/ca.pem"],
    "tls_peer_ca": ["/etc/nodes.pem"],
    "peer_token_file": ["/etc/nodes.token"],
    "max_connections": [1, "5000"],
    "max_value_size": [1, "64MiB"],
    "max_batch_size": [1024, "2GiB"],
    "max_batch_keys": [1, "100"],
    "max_key_size": [1, "1024"],
    "max_protected_ratio": [0, "0.5"],
    "log_level": ["debug", "Warning"],
    "log_format": ["json", "Text"],
}


ALONE = {"tenants", "take_over", "peer_token_file", "unix_socket_group"}
"""What does not go together with another setting, or needs others: token_file, shards,
cluster, unix_socket_access."""


def test_every_setting_has_values_to_test_with() -> None:
    assert set(VALUES) == set(SETTINGS)


layers = st.fixed_dictionaries(
    {}, optional={key: st.sampled_from(values) for key, values in VALUES.items() if key not in ALONE}
)


@given(command_line=layers, environment=layers, file=layers)
def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path_factory: pytest.TempPathFactory,
    command_line: dict[str, Any],
    environment: dict[str, Any],
    file: dict[str, Any],
) -> None:
    file = {"tls_cert": "/etc/other.pem", **file}  # which the other settings of TLS need
    path = tmp_path_factory.getbasetemp() / "precedence.yaml"
    path.write_text(yaml.safe_dump(file))
    variables = {SETTINGS[key].variable: str(value) for key, value in environment.items()}
    config = load_server_config(command_line, environment=variables, file=path)
    for key, setting in SETTINGS.items():
        written = next((layer[key] for layer in (command_line, environment, file) if key in layer), None)
        if written is not None:
            assert getattr(config, setting.attribute) == setting.kind.parse(written), key
        elif key != "prealloc_size":  # its default is a matter of the machine
            assert getattr(config, setting.attribute) == getattr(ServerConfig(), setting.attribute), key


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("service_port: 1234\n")
    assert load_server_config(environment={"INFINISTORE_CONFIG": str(path)}).service_port == 1234


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_server_config(environment={"INFINISTORE_HOST": "", "INFINISTORE_CONFIG": ""}).host == "127.0.0.1"


def test_an_empty_file_and_empty_keys_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    for text in ("", "# nothing yet\n", "service_port:\n"):
        path.write_text(text)
        assert load_server_config(environment={}, file=path).service_port == 22345


def test_off_is_off_although_yaml_makes_it_false(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("unix_socket: off\n")
    assert load_server_config(environment={}, file=path).socket_path(1) is None


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [("16", 16 * GIB), ("0.5", GIB // 2), ("512MiB", 512 * MIB), (2, 2 * GIB), (0.25, GIB // 4)],
)
def test_a_bare_pool_size_is_in_gb(written: object, size_bytes: int) -> None:
    assert load_server_config({"prealloc_size": written}, environment={}).prealloc_bytes == size_bytes


@pytest.mark.parametrize(
    "written", ["/a:1TiB,/b c:0.5", ["/a:1TiB", "/b c:0.5"], ("/a:1T", "/b c:512MiB"), "/a:1024, /b c:0.5G"]
)
def test_several_disks_are_a_list_or_text_with_commas(written: Any) -> None:
    disks = load_server_config({"disk": written}, environment={}).disks
    assert list(map(str, disks)) == ["/a:1TiB", "/b c:512MiB"]


@pytest.mark.parametrize("written", ["/mnt", "/mnt/a:1GiB:", ["/a:1T", "/a/../a:1T"], ":1GiB", 3, [None]])
def test_disks_of_an_embedded_store_are_checked_when_it_is_opened(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"PATH:SIZE|twice"):
        make_options(None, {"disk": written})


def test_disks_need_numpy_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    load_server_config({}, environment={})
    with pytest.raises(ConfigError, match="pip install numpy"):
        load_server_config({"disk": "/mnt/a:1TiB"}, environment={})
    with pytest.raises(ConfigError, match="pip install numpy"):
        make_options(None, {"disk": "/mnt/a:1TiB"})


def test_compression_on_disk_needs_zstandard_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    load_server_config({"disk_compress": False}, environment={})
    with pytest.raises(
        ConfigError, match=r"--disk-compress.*pip install zstandard \(the extra `compression`\)"
    ) as error:
        load_server_config({"disk_compress": True}, environment={})
    assert "\n" not in str(error.value)


def test_a_disk_is_not_for_the_client_of_a_server() -> None:
    with pytest.raises(ConfigError, match="disk is for an embedded store"):
        make_options("tcp://127.0.0.1:1", {"disk": "/mnt/a:1TiB"})


def test_a_bare_minimal_allocation_is_in_kb() -> None:
    assert load_server_config({"minimal_allocate_size": "16"}, environment={}).minimal_allocate_bytes == 16 * KIB


def test_the_default_pool_is_at_most_16_gib_and_at_most_half_of_the_memory() -> None:
    meminfo = Path("/proc/meminfo").read_text()
    total_kib = int(re.search(r"MemTotal:\s+(\d+)", meminfo)[1])  # type: ignore[index]
    assert MIB <= ServerConfig().prealloc_bytes <= min(16 * GIB, total_kib * KIB // 2)


@pytest.mark.parametrize(
    ("command_line", "environment", "file", "message"),
    [
        ({"service_port": "99999"}, {}, "", "--service-port 99999: must be a whole number between 0 and 65535"),
        ({}, {"INFINISTORE_IB_PORT": "one"}, "", "INFINISTORE_IB_PORT=one: must be a whole number between 1 and 255"),
        ({}, {}, "service_port: true", "FILE: service_port: True: must be a whole number between 0 and 65535"),
        ({}, {}, "service_port: 1.5", "FILE: service_port: 1.5: must be a whole number between 0 and 65535"),
        ({}, {}, "servce_port: 1", "FILE: there is no setting 'servce_port'; did you mean service_port?"),
        ({}, {}, "service-port: 1", "FILE: there is no setting 'service-port'; did you mean service_port?"),
        ({}, {}, "a: [1", "FILE:1: cannot be read as YAML: expected ',' or ']', but got '<stream end>'"),
        ({}, {}, "ib_port: 1\nhost: a\nib_port: 2", "FILE: ib_port is set more than once; keep one of the lines"),
        ({}, {}, "- host", "FILE: must hold settings, one a line, such as `service_port: 22345`"),
        ({"disk": ("/mnt/a",)}, {}, "", "--disk /mnt/a: must be PATH:SIZE, such as /mnt/nvme0:1TiB"),
        (
            {"disk": ("/mnt/a:large",)},
            {},
            "",
            "--disk /mnt/a:large: must be PATH:SIZE, such as /mnt/nvme0:1TiB: 'large' is not a size",
        ),
        ({}, {"INFINISTORE_DISK": "/mnt/a:1MiB"}, "", "INFINISTORE_DISK=/mnt/a:1MiB: has a size of 1MiB; it must be"),
        (
            {"disk": ("/mnt/a:1T", "/mnt/./a:2T")},
            {},
            "",
            "--disk /mnt/a:1T --disk /mnt/./a:2T: names /mnt/a twice; give each disk once",
        ),
        ({}, {}, "disk: 5", "FILE: disk: 5: must be PATH:SIZE"),
        ({}, {}, "disk: [5]", "FILE: disk: [5]: must be PATH:SIZE"),
        (
            {"log_level": "inf"},
            {},
            "",
            "--log-level inf: must be one of error, warning, info, debug; did you mean info",
        ),
        ({"link_type": "roce"}, {}, "", "--link-type roce: must be one of IB, Ethernet"),
        ({"prealloc_size": "lots"}, {}, "", "--prealloc-size lots: is not a size; write a number with a unit, such as"),
        ({"prealloc_size": "17179869184"}, {}, "", "a number without a unit is in GB"),
        ({"prealloc_size": "0"}, {}, "", "--prealloc-size 0: must be between 64KiB and 1PiB"),
        ({"minimal_allocate_size": "100B"}, {}, "", "--minimal-allocate-size 100B: must be a multiple of 64B"),
        ({"evict_interval": "nan"}, {}, "", "--evict-interval nan: must be a number of seconds between 0.001"),
        (
            {"evict_min_threshold": "0.9"},
            {},
            "",
            "0.9: --evict-min-threshold (0.9) must be smaller than --evict-max-threshold (0.8)",
        ),
        # The default is not to blame for what was written beside it.
        ({"evict_max_threshold": "0.5"}, {}, "", "0.5: --evict-min-threshold (0.6) must be smaller than"),
        (
            {"max_pool_size": "1MiB", "prealloc_size": "2MiB"},
            {},
            "",
            "--prealloc-size (2MiB) must be at most --max-pool-size (1MiB)",
        ),
        ({"manage_port": "22345"}, {}, "", "--manage-port 22345: is the service port too; give one of them"),
        ({"max_value_size": "2GiB"}, {}, "", "--max-value-size (2GiB) must be at most --max-batch-size (1GiB)"),
        ({"unix_socket": "/" + "x" * 200}, {}, "", "is too long for a Unix socket; at most 107 bytes"),
        ({}, {"INFINISTORE_AUTO_INCREASE": "maybe"}, "", "INFINISTORE_AUTO_INCREASE=maybe: must be true or false"),
        ({}, {"INFINISTORE_TOKEN_FILE": "~nobody-of-this-name/t"}, "", "names a home folder that is not known"),
    ],
)
def test_a_refusal_is_one_line_that_says_where_and_what(
    tmp_path: Path, command_line: dict[str, object], environment: dict[str, str], file: str, message: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        load_server_config(command_line, environment=environment, file=path)
    assert message.replace("FILE", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "server.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_server_config(environment={}, file=path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "store.example"])
def test_beyond_loopback_a_token_or_insecure_is_needed(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_server_config({"host": host}, environment={})
    assert f"--host {host}" in str(caught.value)
    assert "--token-file" in str(caught.value)
    assert "--insecure" in str(caught.value)
    assert load_server_config({"host": host, "insecure": True}, environment={}).host == host
    assert load_server_config({"host": host, "token_file": "t"}, environment={}).host == host


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("LOCALHOST", True), ("0.0.0.0", False)],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_configuration_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="service_port: -1 must be a whole number"):
        ServerConfig(service_port=-1)
    with pytest.raises(ConfigError, match=r"evict_min_threshold: --evict-min-threshold .0.9. must be smaller"):
        ServerConfig(evict_min_threshold=0.9)


def test_the_socket_is_in_a_folder_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_socket_path(5) == Path("/run/user/7/infinistore/5.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert re.fullmatch(r"/tmp/infinistore-\d+/5\.sock", str(default_socket_path(5)))
    assert ServerConfig(unix_socket="/run/a.sock").socket_path(5) == Path("/run/a.sock")


def test_the_token_is_the_first_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  secret \nnot this\n")
    assert read_token(path) == "secret"
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "nowhere")


UNUSABLE_TOKENS = {
    "nothing": (b"", "is empty"),
    "an empty line": (b"\nsecret", "is empty"),
    "spaces": (b" \t\n", "is empty"),
    "bytes": (b"\xff\xfe", "not text"),
    "too much": (b"x" * 1025, "longer than 1024 bytes"),
}


@pytest.mark.parametrize("what", UNUSABLE_TOKENS)
@pytest.mark.parametrize("reader", ["server", "client"])
def test_a_token_that_cannot_be_is_refused_by_servers_and_clients_alike(what: str, reader: str, tmp_path: Path) -> None:
    content, says = UNUSABLE_TOKENS[what]
    path = tmp_path / "token"
    path.write_bytes(content)
    read: Callable[[Path], object] = (
        read_token if reader == "server" else lambda path: make_options(f"tcp://host?token_file={path}", {})
    )
    with pytest.raises(ConfigError, match=says):
        read(path)


@pytest.mark.parametrize(("mode", "open_to_others"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_token_file_that_is_open_to_others_is_used_and_warned_of(
    mode: int, open_to_others: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    assert read_token(path) == "secret"
    warned = [record.__dict__ for record in caplog.records]
    assert [record["message"] for record in warned] == (
        [f"the token file is open to other users: chmod o-rw {path}"] if open_to_others else []
    )


def test_a_token_file_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("secret")
    assert read_token("~/token") == "secret"
    with pytest.raises(ConfigError, match="home folder is not known"):
        read_token("~nobody-of-this-name/token")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("false", "off"), ("No", "off"), ("0", "off"), ("off", "off"), ("true", "auto"), ("on", "auto"), ("1", "auto")],
)
def test_the_words_of_a_switch_are_no_path(written: str, expected: str, tmp_path: Path) -> None:
    assert load_server_config({}, environment={"INFINISTORE_UNIX_SOCKET": written}).unix_socket == expected
    file = tmp_path / "server.yaml"
    file.write_text(f"unix_socket: {written}\n")
    assert load_server_config({}, file=file, environment={}).unix_socket == expected


@pytest.mark.parametrize("written", ["false", "no", "off"])
def test_the_management_port_is_turned_off_by_the_same_words(written: str) -> None:
    assert load_server_config({}, environment={"INFINISTORE_MANAGE_PORT": written}).manage_port is None


@attrs.frozen(kw_only=True)
class HasSecrets:
    password: str = settings.declare(settings.text("TEXT"), "hunter2", "A secret", group="Security", secret=True)
    place: str = settings.declare(
        settings.text("URL"), "http://me:hunter2@h:1/a?token=hunter2", "A URL", group="Security"
    )


def test_settings_are_shown_without_secrets_and_without_what_urls_have_of_them() -> None:
    assert shown_settings(HasSecrets()) == {"place": "http://...@h:1/a"}
    url = "infinistore+etcd://h1:2379/kv"
    config = ServerConfig(
        cluster=f"{url}?etcd_user=me&etcd_password_file=/run/p",
        disks=(DiskPlace(Path("/mnt/a"), GIB),),
        token_file=Path("t"),
    )
    shown = json.loads(json.dumps(shown_settings(config)))
    assert set(shown) == {field.name for field in attrs.fields(ServerConfig)}
    assert (shown["cluster"], shown["disks"], shown["token_file"]) == (url, ["/mnt/a:1GiB"], "t")


def test_clients_are_told_a_path_that_means_the_same_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_server_config({"unix_socket": "here.sock"}, environment={})
    assert config.socket_path(5) == tmp_path / "here.sock"


@pytest.mark.parametrize("access", ["group", "all"])
def test_who_may_open_the_socket_is_said_together_with_its_path(access: str) -> None:
    config = load_server_config({"unix_socket": "/run/s", "unix_socket_access": access}, environment={})
    assert config.unix_socket_access == access
    with pytest.raises(ConfigError, match="--unix-socket PATH"):
        load_server_config({"unix_socket_access": access}, environment={})
    with pytest.raises(ConfigError, match="--unix-socket-access group"):
        load_server_config({"unix_socket_group": "kv"}, environment={})


def test_a_socket_in_a_home_folder_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="home folder that is not known"):
        load_server_config({"unix_socket": "~nobody-of-this-name/s"}, environment={})


def test_a_misspelt_variable_is_noticed_and_those_of_kubernetes_are_not() -> None:
    environment = {
        "INFINISTORE_PREALOC_SIZE": "1",
        "INFINISTORE_PORT_22345_TCP_ADDR": "10.0.0.1",
        "INFINISTORE_URL": "tcp://a",
        "HOME": "/",
    }
    (warning,) = misspelt_variables(environment)
    assert "INFINISTORE_PREALOC_SIZE" in warning
    assert "INFINISTORE_PREALLOC_SIZE" in warning


def test_the_port_of_a_service_of_kubernetes_is_mentioned_with_the_remedy() -> None:
    links = {"INFINISTORE_SERVICE_HOST": "10.0.0.1", "INFINISTORE_PORT": "tcp://10.0.0.1:80"}
    warning = kubernetes_port({**links, "INFINISTORE_SERVICE_PORT": "80"})
    assert "INFINISTORE_SERVICE_PORT=80 is used" in warning
    assert "enableServiceLinks: false" in warning
    assert kubernetes_port(links) == kubernetes_port({"INFINISTORE_SERVICE_PORT": "80"}) == ""


@pytest.mark.parametrize("key", ["token_file", "tls_cert"])
@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_a_file_that_cannot_be_read_is_named_with_the_source_of_its_name(
    key: str, place: str, command: Run, tmp_path: Path
) -> None:
    flag, variable = f"--{key.replace('_', '-')}", f"INFINISTORE_{key.upper()}"
    config = tmp_path / "c.yaml"
    config.write_text(f"{key}: /nonexistent\n")
    given, source = {
        "flag": ([flag, "/nonexistent"], f"{flag} /nonexistent: cannot read "),
        "variable": ([], f"{variable}=/nonexistent: cannot read "),
        "file": (["--config", str(config)], f"{config}: {key}: /nonexistent: cannot read "),
    }[place]
    env = {variable: "/nonexistent"} if place == "variable" else {}
    if key == "token_file" and place != "file":  # a client's, too
        asked = command("stat", *given, env=env)
        assert asked.returncode == 2
        assert asked.stderr.decode().startswith(f"infinistore: {source.split()[0].split('=')[0]}: cannot read ")
    ended = command("serve", "--service-port", "0", "--manage-port", "off", *given, env=env)
    assert ended.returncode == 2
    assert ended.stderr.decode().startswith(f"infinistore: {source}")
