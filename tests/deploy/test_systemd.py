"""The units in deploy/systemd: systemd accepts them, and rates what they expose."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from infinistore.config import load_server_config
from infinistore.errors import ConfigError

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/infinistore/bin/infinistore"
MOST_EXPOSURE = 20  # tenths

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units, for a program that exists here."""
    for unit in UNITS.iterdir():
        (tmp_path / unit.name).write_text(unit.read_text().replace(INSTALLED, sys.executable))
    drop_in = tmp_path / "infinistore.service.d"
    drop_in.mkdir()
    return tmp_path


def analyze(*arguments: str | Path, cwd: Path) -> str:
    """Run systemd-analyze; return what it printed."""
    environment = os.environ | {"SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
    done = subprocess.run(
        ["systemd-analyze", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize("drop_ins", [[], ["devices", "tls"], ["tenants"], ["tls", "tenants"]])
def test_systemd_finds_no_fault_with_the_units(units: Path, drop_ins: list[str]) -> None:
    for name in drop_ins:
        shutil.copy(units / f"infinistore-{name}.conf", units / "infinistore.service.d" / f"{name}.conf")
    assert analyze("verify", "./infinistore.service", "./infinistore.socket", cwd=units) == ""


@needs_systemd
def test_the_service_exposes_little(units: Path) -> None:
    rated = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", "./infinistore.service", cwd=units)
    assert re.search(r"Overall exposure level for infinistore.service: [01]\.\d", rated)


def settings_of_the_unit(name: str = "infinistore.service") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (UNITS / name).read_text(), flags=re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


@cache
def groups_of_calls() -> dict[str, list[str]]:
    """The groups of system calls, of which some have other groups in them."""
    groups: dict[str, list[str]] = {}
    members: list[str] = []
    for line in analyze("syscall-filter", cwd=UNITS).splitlines():
        if line.startswith("@"):
            members = groups[line.strip()] = []
        elif line.startswith("    ") and "#" not in line:
            members.append(line.strip())
        elif line and not line[0].isspace():  # what is in no group
            members = []
    return groups


def calls_in(names: str) -> set[str]:
    """The system calls that these names stand for."""
    calls: set[str] = set()
    for name in names.split():
        calls |= calls_in(" ".join(groups_of_calls()[name])) if name.startswith("@") else {name}
    return calls


@needs_systemd
def test_the_calls_that_settings_need_pass_the_filter_and_no_others_that_change_resources() -> None:
    passed: set[str] = set()
    for value in settings_of_the_unit()["SystemCallFilter"]:
        passed = passed - calls_in(value[1:]) if value.startswith("~") else passed | calls_in(value)
    assert {"memfd_create", "sendmsg", "mmap"} <= passed
    assert passed & calls_in("@resources") == {"sched_setaffinity", "mbind", "set_mempolicy"}
    assert passed & calls_in("@privileged @mount @module @raw-io @reboot") == set()


def test_the_server_understands_what_the_unit_and_its_configuration_say(tmp_path: Path) -> None:
    settings = settings_of_the_unit()
    variables = dict(line.split("=", 1) for line in settings["Environment"])
    assert variables.pop("INFINISTORE_TOKEN_FILE") == "%d/token"
    assert [variables.pop("FDSTORE")] == settings["FileDescriptorStoreMax"]

    config = load_server_config(file=UNITS / "infinistore.yaml", environment=variables)

    assert settings["RuntimeDirectory"] == ["infinistore"]
    assert config.unix_socket == "/run/infinistore/infinistore.sock"
    assert config.unix_socket_access == "group"
    assert set(variables) == {"INFINISTORE_UNIX_SOCKET", "INFINISTORE_UNIX_SOCKET_ACCESS"}
    (command,) = settings["ExecStart"]
    assert command == f"{INSTALLED} serve --config /etc/infinistore/infinistore.yaml"


def test_the_server_understands_what_the_drop_in_for_tls_says() -> None:
    drop_in = (UNITS / "infinistore-tls.conf").read_text()
    variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", drop_in, flags=re.MULTILINE))
    config = load_server_config(environment=variables)
    assert (str(config.tls_cert), str(config.tls_key)) == tuple(variables.values())


def test_with_the_drop_in_for_tenants_the_server_has_their_file_instead_of_a_token(tmp_path: Path) -> None:
    unit, drop_in = settings_of_the_unit(), settings_of_the_unit("infinistore-tenants.conf")
    variables = dict(line.split("=", 1) for line in [*unit["Environment"], *drop_in["Environment"]])
    (tmp_path / "token").write_text("secret")
    variables["INFINISTORE_TOKEN_FILE"] = str(tmp_path / "token")
    del variables["FDSTORE"]
    with pytest.raises(ConfigError, match="tenants"):  # both
        load_server_config(file=UNITS / "infinistore.yaml", environment=variables)

    for name in drop_in["UnsetEnvironment"]:
        del variables[name]
    assert drop_in["LoadCredential"] == [""]  # or there would have to be a token to copy

    config = load_server_config(file=UNITS / "infinistore.yaml", environment=variables)
    assert str(config.tenants) == "/etc/infinistore/tenants.yaml"
    assert config.token_file is None


def test_a_reload_is_a_signal_and_logs_have_a_folder_that_the_server_may_write() -> None:
    unit = settings_of_the_unit()
    assert unit["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert (unit["LogsDirectory"], unit["LogsDirectoryMode"]) == (["infinistore"], ["0700"])
    assert "ExecReload" not in settings_of_the_unit("infinistore-tls.conf")  # it would be sent twice


def test_the_sockets_are_those_of_the_configuration() -> None:
    streams = re.findall(r"^ListenStream=(.*)$", (UNITS / "infinistore.socket").read_text(), flags=re.MULTILINE)
    config = load_server_config(file=UNITS / "infinistore.yaml", environment={})
    assert streams == [f"{config.host}:{config.service_port}", "/run/infinistore/infinistore.sock"]
