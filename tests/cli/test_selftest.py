"""`infinistore selftest`: a sound store passes, and whatever is wrong is named and ends
in its own exit code.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from infinistore.cli.root import run
from infinistore.client.api.blocking_store import BlockingStore
from infinistore.errors import StoreUnavailable
from tests.cli.conftest import Run, StartServer
from tests.monitor.made import make_disk, make_disks

CHECKS = ["connect", "put", "exists", "get", "get into memory", "match and hold a prefix", "list keys"]
CHECKS += ["delete", "is gone"]


def document(ended: Any) -> Any:
    return json.loads(ended.stdout)


def test_an_embedded_store_passes(command: Run) -> None:
    ended = command("selftest", "--embedded", "--json")
    assert (ended.returncode, ended.stderr) == (0, b"")
    found = document(ended)
    assert found["ok"] is True
    assert [(one["path"], one["check"], one["ok"]) for one in found["checks"]] == [
        ("embedded", check, True) for check in CHECKS
    ]


def test_a_server_is_checked_over_tcp_and_its_unix_socket_and_keeps_nothing(store: Run) -> None:
    ended = store("selftest", "--json")
    assert (ended.returncode, ended.stderr) == (0, b"")
    paths = dict.fromkeys(one["path"] for one in document(ended)["checks"])
    assert [path.partition(":")[0] for path in paths] == ["tcp", "unix"]
    assert len(document(ended)["checks"]) == 2 * len(CHECKS)
    assert json.loads(store("ls", "infinistore-selftest/", "--json").stdout)["keys"] == []


def test_a_store_with_disks_must_make_blocks_durable(running_server: StartServer, command: Run, tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    with running_server("--prealloc-size", "1MiB", "--unix-socket", "off", "--disk", f"{folder}:300MiB") as own:
        ended = command("selftest", "--json", url=own.url)
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert [one["check"] for one in document(ended)["checks"]] == [*CHECKS[:2], "flush to disk", *CHECKS[2:]]


def test_a_person_gets_a_table(store: Run) -> None:
    shown = store("selftest").stdout.decode()
    assert shown.split()[:5] == ["path", "check", "result", "us", "error"]
    assert "match and hold a prefix" in shown


def test_no_server_is_exit_code_3_with_a_row_that_says_why(command: Run) -> None:
    ended = command("selftest", "--json", "--url", "unix:///does/not/exist")
    assert ended.returncode == 3
    (row,) = document(ended)["checks"]
    assert (row["check"], row["ok"], row["error"].partition(":")[0]) == ("connect", False, "StoreUnavailable")
    assert ended.stderr.count(b"\n") == 1


def test_a_wrong_token_is_exit_code_3(running_server: StartServer, command: Run, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    with running_server("--prealloc-size", "1MiB", "--token-file", str(token_file)) as own:
        ended = command("selftest", "--json", url=own.url)
        assert ended.returncode == 3
        assert [row["error"].partition(":")[0] for row in document(ended)["checks"]] == ["AuthenticationFailed"] * 2
        assert command("selftest", "--token-file", str(token_file), url=own.url).returncode == 0


def test_a_store_without_room_is_exit_code_5(running_server: StartServer, command: Run) -> None:
    with running_server("--prealloc-size", "64KiB", "--minimal-allocate-size", "64", "--unix-socket", "off") as own:
        ended = command("selftest", "--json", url=own.url)
    assert ended.returncode == 5
    assert [row["check"] for row in document(ended)["checks"]] == ["connect", "put"]


@pytest.mark.parametrize(
    ("method", "answer", "check"),
    [
        ("get_many", [b"other"] * 3, "get"),
        ("exists_many", [True] * 4, "exists"),
        ("get_many_into", [1, 2, 3], "get into memory"),
        ("keys", [], "list keys"),
    ],
)
def test_a_store_that_answers_wrongly_is_exit_code_6(
    method: str, answer: Any, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(BlockingStore, method, return_value=answer):
        assert run(["selftest", "--embedded", "--json"]) == 6
    shown = capsys.readouterr()
    last = json.loads(shown.out)["checks"][-1]
    assert (last["check"], last["ok"]) == (check, False)
    assert "not as expected" in shown.err


def test_a_disk_that_is_off_is_named_with_its_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    tier = make_disks(make_disk("/mnt/a", state="off", alarm="the disk is off: too many errors"))

    def stats(store: BlockingStore) -> Any:
        return mock.Mock(disk=tier)

    with mock.patch.object(BlockingStore, "stats", stats), mock.patch.object(BlockingStore, "flush", return_value=0):
        assert run(["selftest", "--embedded", "--json"]) == 3
    shown = capsys.readouterr()
    last = json.loads(shown.out)["checks"][-1]
    assert (last["check"], last["ok"]) == ("flush to disk", False)
    assert "infinistore: /mnt/a: the disk is off: too many errors" in shown.err


def test_statistics_that_fail_are_not_called_connect(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(BlockingStore, "stats", side_effect=StoreUnavailable("gone")):
        assert run(["selftest", "--embedded", "--json"]) == 3
    assert [one["check"] for one in json.loads(capsys.readouterr().out)["checks"]] == ["connect", "statistics"]
