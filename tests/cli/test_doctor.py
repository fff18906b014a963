"""`infinistore doctor` as it is typed: what it prints, its exit codes, and what it
leaves behind on a server.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from infinistore.transports.rdma.devices import there_is_rdma
from tests.cli.conftest import Run, StartServer
from tests.cli.in_process import ServerHere

QUICK = ("--seconds", "0.01")


@pytest.fixture
def doctor(command: Run, jemalloc_works: None) -> Run:
    """Run `infinistore doctor` on a machine where jemalloc works."""
    return lambda *arguments, **more: command("doctor", *arguments, **more)


def document(output: bytes) -> dict[str, Any]:
    parsed = json.loads(output)
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.process
def test_each_finding_is_a_line_that_begins_with_its_level(command: Run) -> None:
    done = command("doctor")
    assert done.stderr == b""
    levels = {line.split()[0] for line in done.stdout.decode().splitlines() if not line.startswith(" ")}
    assert levels <= {"good", "warning", "bad"}
    assert done.returncode == ("bad" in levels)
    assert "good     memory   shared memory: memfd_create and its seals work" in done.stdout.decode()


def test_json_has_the_same(doctor: Run) -> None:
    found = document(doctor("--json").stdout)
    assert found["ok"] is all(finding["level"] != "bad" for finding in found["findings"])
    assert (found["to"], found["paths"]) == (None, [])
    assert {finding["topic"] for finding in found["findings"]} == {"RDMA", "memory", "NUMA", "system", "software"}


def test_a_device_that_is_not_there_ends_with_exit_code_1(doctor: Run) -> None:
    done = doctor("--json", "--dev-name", "no_such_device")
    assert done.returncode == 1
    (choice,) = (finding for finding in document(done.stdout)["findings"] if finding["subject"] == "choice")
    assert choice["level"] == "bad"


def test_a_disk_without_numpy_is_one_bad_line(doctor: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "infinistore.disk_io.direct_io", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    done = doctor("--disk", str(tmp_path), "--disk", str(tmp_path / "other"))
    found = [line for line in done.stdout.decode().splitlines() if line.split()[1] == "disk"]
    assert [line.split(maxsplit=2)[2] for line in found] == [
        "numpy: is not installed here, and disks need it -> pip install numpy"
    ]
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(there_is_rdma(), reason="tests/rdma has the loopback of a machine with RDMA")
def test_a_loopback_without_a_device_is_bad_and_says_how_to_get_one(doctor: Run) -> None:
    done = doctor("--json", "--rdma-loopback")
    told = document(done.stdout)
    (found,) = (finding for finding in told["findings"] if finding["topic"] == "RDMA loopback")
    assert (done.returncode, told["ok"], told["loopback"]) == (1, False, None)
    assert (found["subject"], found["level"]) == ("device", "bad")
    assert "modprobe rdma_rxe" in found["remedy"]


def test_each_path_to_a_server_on_this_machine_is_measured(doctor: Run, server: ServerHere) -> None:
    done = doctor("--to", server.url.removeprefix("tcp://"), "--json", *QUICK)
    paths = {path["path"]: path for path in document(done.stdout)["paths"]}
    assert list(paths) == ["tcp", "shm", "rdma"]
    for name in ("tcp", "shm"):
        assert paths[name]["transport"] == name
        assert paths[name]["batch"] == 64
        assert min(paths[name][figure] for figure in ("put_bytes_per_s", "get_bytes_per_s", "lookup_p50_us")) > 0
    assert paths["rdma"]["transport"] in {"", "rdma"}


def test_nothing_is_left_behind(store: Run, doctor: Run, server: ServerHere) -> None:
    before = store("ls").stdout
    doctor("--to", server.url, *QUICK)
    assert store("ls").stdout == before


def test_by_the_socket_both_of_its_paths_are_measured(doctor: Run, server: ServerHere) -> None:
    done = doctor("--to", f"unix://{server.unix_socket}", "--json", *QUICK)
    assert [path["transport"] for path in document(done.stdout)["paths"]] == ["unix", "shm"]


def test_a_full_pool_keeps_all_its_keys(running_server: StartServer, command: Run, doctor: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(15 << 20))
    with running_server("--prealloc-size", "16MiB") as full:
        command("put", "big", str(data), url=full.url)
        before = command("ls", url=full.url).stdout
        assert before
        done = doctor("--to", full.url, "--json", *QUICK)
        assert command("ls", url=full.url).stdout == before
        (tcp, *_) = document(done.stdout)["paths"]
        assert (tcp["batch"], tcp["put_bytes_per_s"]) == (None, None)
        assert tcp["lookup_p50_us"] > 0


def test_a_server_that_is_not_there_is_bad_and_the_other_paths_are_not_tried(doctor: Run) -> None:
    done = doctor("--to", "127.0.0.1:1", "--json", *QUICK)
    assert done.returncode == 1
    found = document(done.stdout)
    assert [path["path"] for path in found["paths"]] == ["tcp"]
    assert (found["findings"][-1]["level"], "--host" in found["findings"][-1]["remedy"]) == ("bad", True)


def test_a_wrong_token_is_bad_and_names_the_flag(running_server: StartServer, doctor: Run, tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"{name}\n")
    with running_server("--prealloc-size", "16MiB", "--token-file", str(tmp_path / "right")) as guarded:
        refused = doctor("--to", guarded.url, "--token-file", "wrong", "--json", *QUICK)
        assert refused.returncode == 1
        assert "--token-file" in document(refused.stdout)["findings"][-1]["remedy"]
        taken = doctor("--to", guarded.url, "--token-file", "right", "--json", *QUICK)
        assert document(taken.stdout)["paths"][0]["put_bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("to", "line"),
    [
        ("http://localhost:1", b"unknown scheme 'http'"),
        ("tcpp://localhost:1", b"did you mean tcp"),
        ("localhost:99999", b"no URL of a store"),
        ("", b"names no host"),
    ],
)
def test_a_server_that_cannot_be_meant_is_refused_before_anything_is_looked_at(
    to: str, line: bytes, doctor: Run
) -> None:
    done = doctor("--to", to)
    assert (done.returncode, done.stdout) == (2, b"")
    assert line in done.stderr
