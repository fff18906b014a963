"""Settings, by the names of the original and by ours."""

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest

import infinistore
from infinistore import ClientConfig, ConfigError, Logger, ServerConfig
from infinistore.config import ServerConfig as NativeConfig
from infinistore.sizes import GIB, KIB, MIB


def client_config(**settings: Any) -> ClientConfig:
    given = {"host_addr": "127.0.0.1", "service_port": 22345, "connection_type": infinistore.TYPE_RDMA}
    return ClientConfig(**{**given, **settings})


def server_config(**settings: Any) -> Any:  # not ServerConfig: mypy knows its own names only
    return ServerConfig(**settings)


def test_the_constants_are_those_of_the_original() -> None:
    assert (infinistore.TYPE_RDMA, infinistore.TYPE_TCP) == ("RDMA", "TCP")
    assert (infinistore.LINK_IB, infinistore.LINK_ETHERNET) == ("IB", "Ethernet")
    assert infinistore.InfiniStoreKeyNotFound is infinistore.KeyNotFound
    assert issubclass(infinistore.InfiniStoreKeyNotFound, infinistore.InfiniStoreException)


def test_a_client_is_configured_by_keyword_and_by_attribute() -> None:
    config = ClientConfig(
        host_addr="127.0.0.1", service_port=12345, link_type=infinistore.LINK_ETHERNET, dev_name="mlx5_0"
    )
    config.connection_type = infinistore.TYPE_RDMA
    config.hint_gid_index = 3

    config.verify()

    assert (config.dev_name, config.ib_port, config.hint_gid_index) == ("mlx5_0", 1, 3)
    assert repr(config) == (
        "ClientConfig(connection_type='RDMA', host_addr='127.0.0.1', service_port=12345, dev_name='mlx5_0', "
        "ib_port=1, link_type='Ethernet', hint_gid_index=3, log_level=None, ca=None, "
        "cert=None, key=None, ttl_s=None)"
    )


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("connection_type", None, "connection_type must be RDMA or TCP"),
        ("connection_type", "LOCAL_GPU", "connection_type must be RDMA or TCP"),
        ("host_addr", None, "host_addr must be the name"),
        ("host_addr", "", "host_addr must be the name"),
        ("host_addr", "127.0.0.1:22345", "is no URL of a store"),
        ("host_addr", "a/b", "more than host"),
        ("service_port", None, "service_port must be a whole number between 1 and 65535"),
        ("service_port", 0, "service_port"),
        ("service_port", 92345, "service_port"),
        ("service_port", "12345", "service_port"),
        ("ib_port", 0, "ib_port"),
        ("link_type", "ethernet", "link_type must be IB or Ethernet"),
        ("log_level", "loud", "log_level"),
        ("ttl_s", 0, "ttl_s must be a number of seconds above 0"),
        ("hint_gid_index", -2, "hint_gid_index"),
        ("dev_name", 5, "dev_name"),
    ],
)
def test_a_client_that_cannot_work_is_refused(setting: str, value: Any, problem: str) -> None:
    config = client_config(**{setting: value})

    with pytest.raises(ConfigError, match=problem):
        config.verify()
    with pytest.raises(ConfigError, match=problem):
        infinistore.InfinityConnection(config)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "infinistore://127.0.0.1:22345"),
        ({"connection_type": "TCP"}, "tcp://127.0.0.1:22345"),
        ({"host_addr": "::1"}, "infinistore://[::1]:22345"),
        ({"host_addr": "[::1]"}, "infinistore://[::1]:22345"),
        ({"host_addr": "store.example "}, "infinistore://store.example:22345"),
    ],
)
def test_where_a_client_connects_to(settings: dict[str, Any], url: str) -> None:
    assert client_config(**settings).url == url


def test_settings_for_rdma_go_to_the_store() -> None:
    config = client_config(dev_name="mlx5_0", ib_port=2)
    config.hint_gid_index = 3

    assert config.options == {"device": "mlx5_0", "ib_port": 2, "gid_index": 3}
    assert client_config().options == {"device": "", "ib_port": 1, "gid_index": -1}
    assert client_config(connection_type="TCP", dev_name="mlx5_0").options == {}


@pytest.mark.parametrize("make", [ClientConfig, ServerConfig])
def test_a_misspelt_keyword_is_refused_and_a_foreign_one_passed_over(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="no setting 'servce_port'; did you mean service_port"):
        make(servce_port=5)

    assert make(service_port=5, flag_of_my_program=1).service_port == 5

    assert caplog.messages == ["settings that mean nothing here: flag_of_my_program"]


def test_the_environment_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_config(log_level="info").log_level == "info"
    monkeypatch.setenv("INFINISTORE_LOG_LEVEL", "debug")
    assert client_config(log_level="info").log_level == "debug"
    assert client_config().ttl_s is None
    assert client_config(ttl_s=5).ttl_s == 5
    monkeypatch.setenv("INFINISTORE_TTL_S", "2.5")
    assert client_config(ttl_s=5).ttl_s == 2.5
    monkeypatch.setenv("INFINISTORE_TTL_S", "soon")
    with pytest.raises(ConfigError, match="INFINISTORE_TTL_S must be a number of seconds, not 'soon'"):
        client_config()


def test_a_server_is_configured_in_the_units_of_the_original() -> None:
    config = server_config(
        service_port=12345,
        manage_port=18080,
        log_level="warning",
        dev_name="mlx5_1",
        ib_port=1,
        link_type="IB",
        prealloc_size=2,
        minimal_allocate_size=64,
        auto_increase=True,
        evict_min_threshold="0.5",
        evict_max_threshold="0.7",
        evict_interval="6",
        enable_periodic_evict=True,
        hint_gid_index=-1,
        num_stream=4,
    )

    config.verify()

    assert issubclass(ServerConfig, NativeConfig)
    assert (config.prealloc_bytes, config.minimal_allocate_bytes, config.evict_interval_s) == (2 * GIB, 64 * KIB, 6)
    assert (config.prealloc_size, config.minimal_allocate_size, config.evict_interval) == (2, 64, 6)
    assert (config.evict_min_threshold, config.evict_max_threshold) == (0.5, 0.7)
    assert (config.auto_increase, config.enable_periodic_evict) == (True, True)


def test_a_server_is_configured_by_our_names_as_before(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "host": "::1",
        "service_port": 0,
        "manage_port": None,
        "prealloc_bytes": MIB,
        "evict_interval_s": 2.5,
        "token_file": tmp_path,
        "unix_socket": "off",
        "dev_name": None,
    }

    assert attrs.asdict(ServerConfig(**settings)) == attrs.asdict(NativeConfig(**settings))
    assert attrs.evolve(ServerConfig(**settings), service_port=7).service_port == 7


def test_the_settings_of_a_server_can_be_changed_and_are_checked() -> None:
    config = server_config(prealloc_size="512MiB")
    config.service_port = 4321
    config.prealloc_size = 1
    config.minimal_allocate_bytes = 4096

    assert (config.service_port, config.prealloc_bytes, config.minimal_allocate_size) == (4321, GIB, 4)
    with pytest.raises(ConfigError, match="prealloc_size: 'much'"):
        config.prealloc_size = "much"
    config.evict_min_threshold = 0.9
    with pytest.raises(ConfigError, match="evict-min-threshold"):
        config.verify()


@pytest.mark.parametrize("setting", ["service_port", "manage_port"])
def test_a_server_that_its_clients_could_not_find_does_not_pass(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be between"):
        server_config(**{setting: 0}).verify()


@pytest.mark.parametrize(
    "settings",
    [
        {"service_port": 92345},
        {"service_port": -1},
        {"prealloc_size": -1},
        {"prealloc_size": "x"},
        {"minimal_allocate_size": 0},
        {"log_level": "loud"},
        {"link_type": "token ring"},
        {"evict_min_threshold": 0.9, "evict_max_threshold": 0.8},
        {"host": "0.0.0.0"},
    ],
)
def test_a_server_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        server_config(**settings)


def test_the_logger_writes_to_the_log_of_python(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="infinistore"):
        Logger.set_log_level("debug")
        Logger.debug("a")
        Logger.info(5)
        Logger.warn("100 %s")
        Logger.error(ValueError("d"))
        Logger.set_log_level("error")
        Logger.warn("left out")
        with pytest.raises(ConfigError, match="log_level must be one of"):
            Logger.set_log_level("loud")

    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("infinistore", "DEBUG", "a"),
        ("infinistore", "INFO", "5"),
        ("infinistore", "WARNING", "100 %s"),
        ("infinistore", "ERROR", "d"),
    ]
