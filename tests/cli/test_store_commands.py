"""The commands against servers."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from infinistore import blocking
from tests.cli.conftest import Run, StartProcess, StartServer
from tests.cli.in_process import ServerHere
from tests.eviction.pools import turns
from tests.ports import own_ports
from tests.transports.certificates import issue


def _ok(ended: "subprocess.CompletedProcess[bytes]") -> bytes:
    assert (ended.returncode, ended.stderr) == (0, b"")
    return ended.stdout


def test_a_value_goes_in_by_standard_input_and_out_by_standard_output(store: Run) -> None:
    assert _ok(store("put", "in-out", input=b"hello\n")) == b"stored in-out: 6 B\n"
    assert _ok(store("get", "in-out")) == b"hello\n"
    assert json.loads(_ok(store("put", "in-out", "--json", input=b"x"))) == {
        "key": "in-out",
        "stored": True,
        "size_bytes": 1,
        "blocks": 0,
    }


def test_a_big_file_goes_in_blocks_and_comes_back_whole(store: Run, tmp_path: Path) -> None:
    content = os.urandom(1_000_000)
    (tmp_path / "big").write_bytes(content)
    assert b"in 16 blocks" in _ok(store("put", "big", "big", "--block-size", "64KiB"))
    _ok(store("get", "big", "-o", "copy"))
    assert (tmp_path / "copy").read_bytes() == content
    assert _ok(store("get", "big")) == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "copy"]


def test_a_failed_get_leaves_the_file_as_it_was(store: Run, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    ended = store("get", "never-put", "-o", "kept")
    assert (ended.returncode, ended.stderr) == (1, b"infinistore: 'never-put' is not in the store\n")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"
    ended = store("get", "never-put", "-o", "no/such/folder")
    assert ended.returncode == 1


def test_an_output_that_cannot_be_written_is_named(store: Run) -> None:
    _ok(store("put", "unwritable", input=b"x"))
    ended = store("get", "unwritable", "-o", "no/such/folder")
    assert (ended.returncode, ended.stderr) == (2, b"infinistore: no/such/folder: No such file or directory\n")


def test_exists_answers_with_its_exit_code(store: Run) -> None:
    _ok(store("put", "there", input=b"x"))
    assert _ok(store("exists", "there")) == b"present\tthere\n"
    ended = store("exists", "there", "not-there", "--json")
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert json.loads(ended.stdout) == {"keys": {"there": True, "not-there": False}}


def test_keep_does_not_replace_and_says_so(store: Run) -> None:
    _ok(store("put", "kept", "--keep", input=b"first"))
    assert store("put", "kept", "--keep", input=b"second").returncode == 1
    assert _ok(store("get", "kept")) == b"first"


def test_ls_lists_all_pages_of_a_prefix(store: Run, server: ServerHere) -> None:
    keys = sorted(f"page/{number}" for number in range(2100))
    with blocking.open_store(server.url) as direct:
        for start in range(0, len(keys), 512):
            direct.put_many([(key, b"x") for key in keys[start : start + 512]])
        try:
            assert _ok(store("ls", "page/")).decode().splitlines() == keys
            assert store("ls", "page/", "--limit", "1500").stdout.decode().splitlines() == keys[:1500]
        finally:
            direct.delete(keys)


def test_a_listing_can_be_cut_and_continued(store: Run, server: ServerHere) -> None:
    keys = ["cut/a", "cut/b", "cut/c"]
    with blocking.open_store(server.url) as direct:
        direct.put_many([(key, b"x") for key in keys])
    ended = store("ls", "cut/", "--limit", "2")
    assert (ended.returncode, ended.stdout.decode().split()) == (0, keys[:2])
    assert ended.stderr == b"infinistore: there are more; go on with --after 'cut/b'\n"
    assert _ok(store("ls", "cut/", "--limit", "2", "--after", "cut/b")) == b"cut/c\n"
    assert json.loads(_ok(store("ls", "cut/", "--limit", "2", "--json"))) == {"keys": keys[:2], "next_after": "cut/b"}
    assert json.loads(_ok(store("ls", "cut/", "--limit", "3", "--json"))) == {"keys": keys, "next_after": None}


def test_rm_deletes_keys_and_says_what_was_not_there(store: Run) -> None:
    _ok(store("put", "rm/a", input=b"x"))
    _ok(store("put", "rm/b", input=b"x"))
    ended = store("rm", "rm/a", "rm/none")
    assert (ended.returncode, ended.stdout) == (1, b"deleted 1 key\n")
    assert ended.stderr == b"infinistore: 1 of 2 keys were not there\n"
    assert json.loads(_ok(store("rm", "--prefix", "rm/", "--json"))) == {"deleted": 1, "missing": 0}
    assert _ok(store("ls", "rm/")) == b""


def test_purge_and_evict_say_how_much(running_server: StartServer, command: Run) -> None:
    with running_server("--prealloc-size", "1MiB") as own:
        for number in range(3):
            _ok(command("put", f"key{number}", url=own.url, input=b"x"))
        assert _ok(command("evict", "--min", "0", "--max", "0.1", url=own.url)) == b"evicted 3 blocks\n"
        _ok(command("put", "key", url=own.url, input=b"x"))
        assert json.loads(_ok(command("purge", "--yes", "--json", url=own.url))) == {"deleted": 1}


def test_stat_names_the_transport_and_counts(store: Run) -> None:
    statistics = json.loads(_ok(store("stat", "--json")))
    assert "details" not in statistics
    detailed = json.loads(_ok(store("stat", "--json", "--details")))
    assert detailed["details"]["state"] == "serving"
    assert store("stat", "--details").returncode == 2
    assert statistics["transport"] in ("tcp", "unix", "shm")
    assert statistics["store"]["capacity_bytes"] == 64 << 20
    shown = _ok(store("stat")).decode()
    lines = shown.splitlines()
    assert [line.split(" ")[0] for line in lines if line[0] != " "] == ["server", "pool", "keys", "requests", "clients"]
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "\x1b" not in shown
    assert "version 0.1.0" in shown
    assert "B of 64.0 MiB, " in shown


def test_stat_names_disks_only_of_a_store_that_has_some(
    store: Run, running_server: StartServer, command: Run, tmp_path: Path
) -> None:
    assert "disk" not in json.loads(_ok(store("stat", "--json")))
    assert b"disk" not in _ok(store("stat"))
    folder = tmp_path / "ssd"
    with running_server("--prealloc-size", "1MiB", "--disk", f"{folder}:300MiB", "--disk-admission", "eager") as own:
        tier = json.loads(_ok(command("stat", "--json", url=own.url)))["disk"]
        assert (tier["disks"][0]["path"], tier["queued_bytes"]) == (str(folder), 0)
        assert tier["disks"][0]["capacity_bytes"] > 0
        shown = " ".join(_ok(command("stat", url=own.url)).decode().split())
    assert f"disk {folder}, recovering, " in shown or f"disk {folder}, healthy, " in shown
    assert "0 B wait to be written" in shown


def test_stat_says_how_large_a_pool_would_be_better(running_server: StartServer, command: Run) -> None:
    with running_server("--prealloc-size", "4MiB", "--minimal-allocate-size", "16KiB") as own:
        assert b"would have had" not in _ok(command("stat", url=own.url))
        with blocking.open_store(own.url) as store:
            for keys in turns(24, 6):  # one and a half pools
                store.put_many([(key, bytes(16 * 1024)) for key in keys])
        shown = " ".join(_ok(command("stat", url=own.url)).decode().split())
    assert re.search(r", [6-8]\.\d+ MiB would have had [\d.]+ % of the blocks put lately", shown)


def test_a_file_that_does_not_fit_exits_with_5(store: Run, tmp_path: Path) -> None:
    (tmp_path / "huge").write_bytes(bytes(65 << 20))
    ended = store("put", "huge", "huge")
    assert ended.returncode == 5
    assert ended.stderr.startswith(b"infinistore: ")
    assert _ok(store("ls", "huge")) == b""


def test_no_server_exits_with_3_and_asks_whether_it_runs(command: Run) -> None:
    ended = command("stat", url=f"tcp://127.0.0.1:{own_ports(1)[0]}")
    assert ended.returncode == 3
    assert b"is the server running there?" in ended.stderr


def test_a_server_that_does_not_answer_exits_with_4(command: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = command("stat", "--deadline", "0.1", url=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
    assert ended.returncode == 4


def test_a_server_with_a_token_wants_it(running_server: StartServer, command: Run, tmp_path: Path) -> None:
    for name, token in (("token", "secret\n"), ("wrong", "guess\n")):
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)  # else there is a warning
    flags = ("--prealloc-size", "1MiB", "--token-file", str(tmp_path / "token"), "--unix-socket", "off")
    with running_server(*flags) as own:
        for arguments in ((), ("--token-file", "wrong")):
            ended = command("stat", *arguments, url=own.url)
            assert ended.returncode == 3
            assert b"--token-file FILE" in ended.stderr
        _ok(command("stat", "--token-file", "token", url=own.url))
        _ok(command("stat", url=own.url, env={"INFINISTORE_TOKEN_FILE": "token"}))


@pytest.mark.process
def test_the_server_says_where_it_listens(running_process: StartProcess) -> None:
    with running_process("--prealloc-size", "1MiB") as own:
        assert own.ready_line.startswith("listening on tcp://127.0.0.1:")
        assert "unix:///" in own.ready_line
        assert "with a pool of 1 MiB (bitmap); management on http://127.0.0.1:" in own.ready_line


@pytest.mark.process
def test_the_server_says_where_it_listens_in_json(running_process: StartProcess) -> None:
    with running_process("--prealloc-size", "1MiB", "--json") as own:
        document = json.loads(own.ready_line)
    assert document["pool_bytes"] == 1 << 20
    assert [url.partition(":")[0] for url in document["listening"]] == ["tcp", "unix"]


def test_a_port_in_use_is_one_line_and_exit_code_2(command: Run, server: ServerHere) -> None:
    port = server.url.rpartition(":")[2]
    ended = command("--service-port", port, "--manage-port", "0", "--prealloc-size", "1MiB", "--unix-socket", "off")
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (2, b"", 1)
    assert f":{port}" in ended.stderr.decode() or f" {port}" in ended.stderr.decode()
    assert b"--service-port" in ended.stderr


def test_an_address_of_another_machine_is_one_line_and_exit_code_2(command: Run) -> None:
    # 192.0.2.1 is reserved for documentation (RFC 5737): no machine has it.
    ended = command("--host", "192.0.2.1", "--insecure", "--service-port", "0", "--prealloc-size", "1MiB")
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (2, b"", 1)
    assert b"192.0.2.1" in ended.stderr


def test_a_pool_larger_than_the_memory_is_one_line_and_exit_code_2(command: Run) -> None:
    ended = command("--service-port", "0", "--manage-port", "0", "--prealloc-size", "900TiB")
    lines = [line for line in ended.stderr.splitlines() if b"taking the pool" not in line]  # a busy machine says it
    assert (ended.returncode, ended.stdout, len(lines)) == (2, b"", 1)
    assert b"--prealloc-size" in lines[0]


def test_wait_waits_for_a_server_that_is_not_up_yet(running_server: StartServer, command: Run) -> None:
    (port,) = own_ports(1)

    def start_after_the_first_visit() -> None:
        with listener:
            listener.accept()[0].close()
        servers.enter_context(running_server("--service-port", str(port), "--prealloc-size", "1MiB"))

    with ExitStack() as servers, ThreadPoolExecutor(1) as thread:
        listener = socket.create_server(("127.0.0.1", port))
        started = thread.submit(start_after_the_first_visit)
        ended = command("stat", "--wait", "600", "--url", f"tcp://127.0.0.1:{port}")
        started.result()
    assert b"\npool " in _ok(ended)


@pytest.mark.process
@pytest.mark.usefixtures("warm_peer")
@pytest.mark.parametrize("place", ["embedded", "tcp", "unix"])
def test_bench_compares_with_something_measured_in_the_same_run(place: str, store: Run) -> None:
    where = ("--embedded",) if place == "embedded" else ("--path", place)
    arguments = ("--sizes", "4KiB,64KiB", "--batch", "4", "--clients", "2", "--seconds", "0.01")
    document = json.loads(_ok(store("bench", *where, *arguments, "--json")))
    assert document["transport"] == place
    assert [(figure["operation"], figure["size_bytes"]) for figure in document["figures"]] == [
        ("put", 4096),
        ("get", 4096),
        ("put", 65536),
        ("get", 65536),
    ]
    for figure in document["figures"]:
        assert figure["compared_with"] == ("memory copy" if place == "embedded" else "raw sockets")
        assert figure["ratio"] == pytest.approx(figure["bytes_per_s"] / figure["compared_bytes_per_s"])
    assert _ok(store("ls", "infinistore-bench")) == b""


def test_bench_prints_a_table(store: Run) -> None:
    table = _ok(store("bench", "--embedded", "--sizes", "4KiB", "--batch", "2", "--seconds", "0.01")).decode()
    header, _, *rows = (line for line in table.splitlines()[1:] if line)
    assert header.split()[-1] == "ratio"
    assert [row.split()[0] for row in rows] == ["put", "get"]


@pytest.mark.nightly
@pytest.mark.process
def test_the_first_session_of_the_help_works_when_pasted(
    command: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    shown = _ok(command("--help")).decode()
    session = [line.strip() for line in shown.splitlines() if line.startswith("     ") and line.strip()]
    assert session[0] == "infinistore --prealloc-size 512MiB &"
    assert session[-1] == "kill $!"
    program = tmp_path / "infinistore"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m infinistore "$@"\n')
    program.chmod(0o755)
    port, manage_port = own_ports(2)
    variables = {
        "PATH": f"{tmp_path}:{environment['PATH']}",
        "INFINISTORE_SERVICE_PORT": str(port),  # only that two runs of the tests do not meet
        "INFINISTORE_MANAGE_PORT": str(manage_port),
        "INFINISTORE_URL": f"infinistore://127.0.0.1:{port}",
    }
    script = "\n".join(["set -e", *session, "wait $!"])
    ended = subprocess.run(
        ["bash", "-c", script], env=environment | variables, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"\nhello\n" in ended.stdout
    assert b", 1 key, " in ended.stdout


def test_keys_are_pinned_and_unpinned_by_name_and_by_prefix(store: Run) -> None:
    for key in ("pins/a", "pins/b"):
        _ok(store("put", key, input=b"x"))
    assert _ok(store("pin", "pins/a")) == b"pinned 1 key\n"
    assert json.loads(_ok(store("pin", "--prefix", "pins/", "--json"))) == {"pinned": 2, "missing": 0}
    assert json.loads(_ok(store("stat", "--json")))["store"]["protected_keys"] == 2
    assert _ok(store("unpin", "--prefix", "pins/")) == b"unpinned 2 keys\n"
    ended = store("unpin", "pins/a")
    assert (ended.returncode, ended.stdout) == (1, b"unpinned 0 keys\n")
    assert ended.stderr == b"infinistore: 1 of 1 keys were not pinned\n"
    ended = store("pin", "pins/a", "pins/missing")
    assert (ended.returncode, ended.stderr) == (1, b"infinistore: 1 of 2 keys are not in memory\n")
    _ok(store("unpin", "pins/a"))
    assert store("pin").returncode == store("pin", "a", "--prefix", "a").returncode == 2


def test_pins_with_a_time_end_by_themselves(store: Run) -> None:
    for key in ("timed/a", "timed/b"):
        _ok(store("put", key, input=b"x"))
    assert _ok(store("pin", "timed/a", "--ttl", "0.000001")) == b"pinned 1 key\n"
    assert _ok(store("pin", "--prefix", "timed/b", "--ttl", "3600")) == b"pinned 1 key\n"
    assert _ok(store("unpin", "--prefix", "timed/")) == b"unpinned 1 key\n"
    ended = store("pin", "timed/a", "--ttl", "-1")
    assert ended.returncode == 2
    assert b"--ttl" in ended.stderr


def test_a_file_in_blocks_is_pinned_with_its_blocks(store: Run) -> None:
    _ok(store("put", "pinned-file", "--block-size", "64KiB", input=os.urandom(200_000)))
    assert _ok(store("pin", "pinned-file")) == b"pinned 5 keys\n"
    assert _ok(store("unpin", "pinned-file")) == b"unpinned 5 keys\n"


def test_a_file_is_put_for_a_time(store: Run) -> None:
    _ok(store("put", "for-a-time", "--ttl", "3600", input=b"x"))
    assert _ok(store("get", "for-a-time")) == b"x"
    _ok(store("put", "for-a-moment", "--ttl", "0.000001", "--block-size", "64KiB", input=b"x"))
    assert store("get", "for-a-moment").returncode == 1
    ended = store("put", "never", "--ttl", "0", input=b"x")
    assert ended.returncode == 2
    assert b"--ttl" in ended.stderr


def test_wait_ends_at_once_if_tls_is_refused(running_server: StartServer, command: Run, tmp_path: Path) -> None:
    files = issue(tmp_path)
    clients, strange = issue(tmp_path, "client", ca="clients", stem="client"), issue(tmp_path, ca="other", stem="other")
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(clients.ca)]
    with running_server("--prealloc-size", "1MiB", "--unix-socket", "off", *tls) as own:
        for ca, problem in ((strange.ca, b"the certificate of "), (files.ca, b"wants a certificate of the client")):
            ended = command("exists", "k", "--wait", "600", "--url", f"{own.url}?ca={ca}")
            assert ended.returncode == 3
            assert problem in ended.stderr


def test_bench_says_how_much_memory_it_wanted(store: Run) -> None:
    ended = store("bench", "--sizes", "1TiB", "--batch", "8192")
    assert ended.returncode == 2
    assert b"take 16 PiB" in ended.stderr or b"take 16384 TiB" in ended.stderr
    assert b"lower --sizes, --batch or --clients" in ended.stderr
