"""Transports that other packages bring: found by entry points, and refused with a
reason.
"""

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from infinistore.errors import ConfigError
from infinistore.transports import Transport, installed_transports, load_transport, registry, transport_names
from tests.installing import install

ENTRY_POINTS = {
    "loopback": "other_package_of_transports:LOOPBACK",
    "client_only": "other_package_of_transports:CLIENT_ONLY",
}
BROKEN = {
    "not_one": "other_package_of_transports:NotOne",
    "gone": "module_that_is_not_there:ANYTHING",
    "misspelt": "other_package_of_transports:LOOPBAK",
    "alias": "other_package_of_transports:LOOPBACK",
}


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str]) -> None:
    source = (
        "from infinistore.transports import Transport\n"
        "LOOPBACK = Transport('loopback', client_mover=dict, server_mover=list)\n"
        "CLIENT_ONLY = Transport('client_only', client_mover=dict)\n"
        "class NotOne:\n"
        "    name = 'not_one'\n"
    )
    group = registry.ENTRY_POINT_GROUP
    install(folder, monkeypatch, group, entries, module="other_package_of_transports", source=source)


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds an installed package with transports of its own."""
    _install(tmp_path, monkeypatch, ENTRY_POINTS)
    return tmp_path


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose transports cannot be used."""
    _install(tmp_path, monkeypatch, BROKEN)
    return tmp_path


def test_the_transports_of_another_package_are_found_by_name(other_package: Path) -> None:
    assert transport_names() == ["client_only", "loopback"]
    assert load_transport("loopback") == Transport("loopback", client_mover=dict, server_mover=list)
    assert [transport.name for transport in installed_transports()] == ["client_only", "loopback"]
    assert load_transport("client_only").server_mover is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone", "module_that_is_not_there"),
        ("misspelt", "LOOPBAK"),
        ("not_one", r"is not an infinistore\.transports\.Transport"),
        ("alias", "calls itself 'loopback'"),
    ],
)
def test_one_that_cannot_be_used_says_why(broken_package: Path, name: str, reason: str) -> None:
    assert name in transport_names(), "names are told without importing anything"
    with pytest.raises(ConfigError, match=reason):
        load_transport(name)
    with pytest.raises(ConfigError, match="the transport"):
        installed_transports()


def test_a_built_in_name_cannot_be_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, dict.fromkeys(registry.BUILT_IN, "other_package_of_transports:LOOPBACK"))
    assert transport_names() == []
    assert installed_transports() == []


def test_none_is_installed_without_package_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints(()))
    assert installed_transports() == []
    with pytest.raises(ConfigError, match="no package brings a transport called 'loopback'; installed: none"):
        load_transport("loopback")
