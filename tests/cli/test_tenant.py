"""`infinistore tenant`, and a server that reads what it has written."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from infinistore.access.tenants import digest_of
from infinistore.access.tenants_file import parse_tenants
from infinistore.secret_files import read_text, replace_text
from tests import warm
from tests.cli.conftest import INFINISTORE, Run, StartProcess, StartServer
from tests.cli.in_process import ServerHere


def test_the_list_of_a_running_server_shows_what_each_has(
    command: Run, file: Path, tmp_path: Path, running_server: StartServer
) -> None:
    token = tenant(command, file, "add", "ops", "--role", "monitor", "--operator")
    plain = tenant(command, file, "add", "alice", "--max-bytes", "1MiB")
    with running_server("--tenants", str(file), "--prealloc-size", "64MiB") as server:
        tokens = {}
        for name, one in (("ops", token), ("alice", plain)):
            tokens[name] = tmp_path / f"{name}.token"
            tokens[name].write_text(one)
            tokens[name].chmod(0o600)
        shown = command("tenant", "list", "--manage-url", server.management, "--token-file", str(tokens["ops"]))
        assert shown.returncode == 0, shown.stderr
        assert "1 MiB" in shown.stdout.decode()
        as_json = command(
            "tenant", "list", "--manage-url", server.management, "--token-file", str(tokens["ops"]), "--json"
        )
        assert [one["tenant"] for one in json.loads(as_json.stdout)["tenants"]] == ["ops", "alice"]
        for given, problem in (
            (["--token-file", str(tokens["alice"])], "the management API is for operators"),
            ([], "this needs the token of an operator"),
        ):
            refused = command("tenant", "list", "--manage-url", server.management, *given)
            assert refused.returncode != 0
            assert problem in refused.stderr.decode()
            assert "Traceback" not in refused.stderr.decode()


def test_a_token_file_that_others_may_read_is_named_with_the_remedy(
    server: ServerHere, command: Run, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    file.chmod(0o644)
    ended = command("exists", "k", "--token-file", str(file), "--url", server.url)
    assert f"infinistore: the token file is open to other users: chmod o-rw {file}\n" in ended.stderr.decode()


@pytest.mark.process
@pytest.mark.usefixtures("jemalloc_works", "warm_peer")
def test_commands_do_without_the_statistics_that_a_tenant_may_not_see(
    command: Run, file: Path, tmp_path: Path, running_server: StartServer
) -> None:
    token = tmp_path / "plain.token"
    token.write_text(tenant(command, file, "add", "plain"))
    token.chmod(0o600)
    with running_server("--tenants", str(file), "--prealloc-size", "64MiB") as server:
        given = ["--token-file", str(token), "--url", server.url]
        found = command("selftest", *given)
        assert found.returncode == 0, found.stdout
        assert found.stderr.count(b"whether blocks become durable was not checked: ") == 1
        assert b"needs the role monitor" in found.stderr
        speed = command("bench", "--sizes", "4KiB", "--batch", "2", "--seconds", "0.01", *given)
        assert (speed.returncode, speed.stderr.count(b"role")) == (0, 0)
        assert speed.stdout.startswith(b"transport: unknown (")
        checked = command("doctor", "--to", server.url, "--token-file", str(token), "--seconds", "0.01", "--json")
        assert [one["lookup_p50_us"] > 0 for one in json.loads(checked.stdout)["paths"][:1]] == [True]
        assert command("exists", "k", "--wait", "5", *given).returncode == 1


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:1", "must look like http://127.0.0.1:18080"),
        ("ftp://127.0.0.1", "must look like http://127.0.0.1:18080"),
        ("http://127.0.0.1:x", "must look like http://127.0.0.1:18080"),
        ("http://127.0.0.1:1", "the management API does not answer: [Errno 111] Connection refused"),
    ],
)
def test_a_management_api_that_cannot_be_asked_is_one_line(command: Run, url: str, problem: str) -> None:
    refused = command("tenant", "list", "--manage-url", url)
    assert refused.returncode != 0
    assert problem in " ".join(refused.stderr.decode().split())
    assert "Traceback" not in refused.stderr.decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def tenant(run: Run, file: Path, *arguments: str) -> str:
    done = run("tenant", *arguments, "--tenants", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def test_a_token_is_printed_once_and_only_its_hash_is_stored(command: Run, file: Path) -> None:
    token = tenant(command, file, "add", "alice", "--role", "read", "--max-bytes", "1GiB")
    assert token.startswith("alice.")
    assert token.partition(".")[2] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    found = parse_tenants(file.read_text()).tenants["alice"]
    assert found.digests == (digest_of(token),)
    assert found.limits.max_bytes == 1 << 30
    assert token not in tenant(command, file, "list") + tenant(command, file, "list", "--json")


def test_rotation_keeps_the_token_before_and_no_older_one(command: Run, file: Path) -> None:
    tokens = [tenant(command, file, "add", "alice"), *(tenant(command, file, "rotate", "alice") for _ in range(2))]
    assert parse_tenants(file.read_text()).tenants["alice"].digests == tuple(map(digest_of, tokens[1:]))
    tenant(command, file, "revoke", "--old", "alice")
    assert parse_tenants(file.read_text()).tenants["alice"].digests == (digest_of(tokens[2]),)
    tenant(command, file, "revoke", "alice")
    assert json.loads(tenant(command, file, "list", "--json"))["tenants"][0]["tokens"] == 0
    tenant(command, file, "revoke", "--remove", "alice")
    assert json.loads(tenant(command, file, "list", "--json")) == {"tenants": []}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("rotate", "nobody"), "there is no tenant nobody"),
        (("revoke", "nobody"), "there is no tenant nobody"),
        (("add", "alice"), "there is a tenant alice"),
        (("add", "a.b"), "the name of a tenant must be 1 to 64 letters"),
        (("add", "b", "--group", "g"), "group g has no size"),
        (("add", "b", "--uid", "65534"), "is no user of this machine"),
        (("revoke", "alice", "--old", "--remove"), "do not go together"),
    ],
)
def test_what_cannot_be_done_changes_nothing_and_is_one_line(
    arguments: tuple[str, ...], problem: str, command: Run, file: Path
) -> None:
    tenant(command, file, "add", "alice")
    before = file.read_bytes()
    done = command("tenant", *arguments, "--tenants", str(file))
    assert done.returncode == 2
    assert problem in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.process
def test_two_commands_at_once_lose_no_tenant(environment: dict[str, str], command: Run, file: Path) -> None:
    tenant(command, file, "add", "first")
    names = [f"t{number}" for number in range(4)]
    processes = [
        warm.Popen(
            [*INFINISTORE, "tenant", "add", name, "--tenants", str(file)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in names
    ]
    assert [process.wait() for process in processes] == [0] * len(names)
    assert parse_tenants(file.read_text()).tenants.keys() == {"first", *names}


def test_a_replacement_that_fails_leaves_the_old_file_and_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(file, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(file, "new")
    assert read_text(file) == "old"
    assert os.listdir(file.parent) == [file.name]


def test_a_link_stays_a_link(file: Path) -> None:
    other = file.with_name("real.yaml")
    other.write_text("old")
    file.symlink_to(other)
    replace_text(file, "new")
    assert file.is_symlink()
    assert other.read_text() == "new"


@pytest.mark.process
def test_a_server_takes_a_new_tenant_and_drops_a_revoked_token_at_a_signal(
    running_process: StartProcess, command: Run, file: Path, tmp_path: Path
) -> None:
    def put(name: str) -> "subprocess.CompletedProcess[bytes]":
        return command("put", "key", "--token-file", str(tmp_path / name), url=server.url, input=b"value")

    (tmp_path / "alice").write_text(tenant(command, file, "add", "alice"))
    with running_process("--tenants", str(file), "--prealloc-size", "16MiB") as server:
        assert put("alice").returncode == 0
        (tmp_path / "bob").write_text(tenant(command, file, "add", "bob"))
        refused = put("bob")
        assert refused.returncode != 0
        assert b"infinistore tenant rotate" in refused.stderr
        server.process.send_signal(signal.SIGHUP)
        assert server.process.stderr is not None
        while b"loaded again" not in server.process.stderr.readline():
            pass
        assert put("bob").returncode == 0
        tenant(command, file, "revoke", "alice")
        server.process.send_signal(signal.SIGHUP)
        while b"loaded again" not in server.process.stderr.readline():
            pass
        assert put("alice").returncode != 0
