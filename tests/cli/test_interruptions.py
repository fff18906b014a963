"""Ctrl-C, SIGTERM, output that nobody reads any more, and terminals. Real processes;
nothing waits for time to pass.
"""

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from tests import warm

INFINISTORE = (sys.executable, "-W", "error", "-m", "infinistore")
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.mark.parametrize(
    "arguments",
    ["stat", "ls", "get k", "put k", "exists k", "rm k", "evict", "purge --yes", "bench", "stat --wait 60"],
)
def test_ctrl_c_ends_every_command_with_130_and_without_a_word(arguments: str, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = environment | {"INFINISTORE_URL": f"tcp://127.0.0.1:{silent.getsockname()[1]}"}
        process = warm.Popen(
            [*INFINISTORE, *arguments.split()],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)  # it has asked something, and waits for an answer that does not come
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate()
    assert (process.returncode, output, errors) == (130, b"", b"")


def test_ctrl_c_ends_a_benchmark_and_its_keys_are_deleted(server: Any, environment: dict[str, str]) -> None:
    process = warm.Popen(
        [*INFINISTORE, "bench", "--seconds", "600", "--sizes", "4KiB", "--clients", "2", "--url", server.url],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with blocking.open_store(server.url) as store:
        while not store.keys("infinistore-bench"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate() == (b"", b"")
        assert store.keys("infinistore-bench") == []
    assert process.returncode == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_that_is_told_to_stop_drains_and_exits(number: int, code: int, running_server: Any) -> None:
    with running_server("--prealloc-size", "1MiB") as own:
        socket_path = own.ready_line.partition("unix://")[2].partition(",")[0]
        assert os.path.exists(socket_path)
        ended, errors = own.stop(number)
        assert ended == code
        assert b"Traceback" not in errors
        assert not os.path.exists(socket_path)


def _starting(process: "subprocess.Popen[bytes]", socket_path: Path) -> bool:
    """Whether a server has begun: it has shards, or has its Unix socket."""
    if socket_path.exists():
        return True
    for file in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            if file.read_text(encoding="ascii"):
                return True
    return False


def _start(
    *flags: str, environment: dict[str, str], ignoring: signal.Signals | None = None
) -> "subprocess.Popen[bytes]":
    arguments = [*INFINISTORE, "--prealloc-size", "64MiB", "--service-port", "0", "--manage-port", "0", *flags]
    if ignoring is not None:  # as a shell does to what a script starts in the background
        shell = f"trap '' {ignoring.name.removeprefix('SIG')}; exec \"$@\""
        arguments = ["sh", "-c", shell, "sh", *arguments]
    return warm.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("shards", ["1", "3"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_that_is_told_to_stop_while_it_starts_exits_without_a_word(
    number: int, code: int, shards: str, environment: dict[str, str], tmp_path: Path
) -> None:
    socket_path = tmp_path / "socket"
    unix = str(socket_path) if shards == "1" else "off"
    process = _start("--shards", shards, "--unix-socket", unix, environment=environment)
    while not _starting(process, socket_path):
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert all(line.startswith(b"{") for line in errors.splitlines())  # its log
    assert not socket_path.exists()


def test_a_server_obeys_sigterm_also_if_it_was_started_to_ignore_ctrl_c(environment: dict[str, str]) -> None:
    process = _start("--shards", "2", environment=environment, ignoring=signal.SIGINT)
    while not _starting(process, Path("/none")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert all(line.startswith(b"{") for line in errors.splitlines())


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_is_closed_half_way_ends_quietly(unbuffered: str, server: Any, environment: dict[str, str]) -> None:
    with blocking.open_store(server.url) as store:
        store.put("long", bytes(4 << 20))  # more than a pipe holds
    with warm.Popen(
        [*INFINISTORE, "get", "long", "--url", server.url],
        env=environment | {"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"\0"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "arguments",
    [
        *("ls", "stat", "stat --json", "--help", "serve --help", "help exit-codes", "--version"),
        *("demo --pool-size 64MiB --layers 1", "doctor", "completion bash"),
    ],
)
def test_output_that_nobody_reads_ends_quietly(arguments: str, server: Any, environment: dict[str, str]) -> None:
    with blocking.open_store(server.url) as store:
        store.put("some-key", b"x")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = warm.Popen(
        [*INFINISTORE, *arguments.split()],
        env=environment | {"INFINISTORE_URL": server.url},
        stdout=write_end,
        stderr=subprocess.PIPE,
    )
    os.close(write_end)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["stat", "get k", "exists k", "--help"])
@pytest.mark.parametrize(
    ("redirection", "problem"),
    [(">&-", b"standard output is closed"), ("> /dev/full", b"No space left on device")],
)
def test_output_that_cannot_be_written_is_an_error(
    *, redirection: str, problem: bytes, arguments: str, unbuffered: str, server: Any, environment: dict[str, str]
) -> None:
    with blocking.open_store(server.url) as store:
        store.put("k", b"x")
    ended = warm.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *INFINISTORE, *arguments.split()],
        env=environment | {"PYTHONUNBUFFERED": unbuffered, "INFINISTORE_URL": server.url},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, b"infinistore: " + problem + b"\n")


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full"])
def test_a_server_serves_also_if_it_cannot_say_so(
    redirection: str, environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "socket"
    flags = ["--prealloc-size", "1MiB", "--service-port", "0", "--manage-port", "off", "--unix-socket", str(place)]
    process = warm.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *INFINISTORE, *flags],
        env=environment | {"PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
    )
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            while probe.connect_ex(str(place)):  # which is there before anybody listens
                assert process.poll() is None
        with blocking.open_store(f"unix://{place}") as store:
            store.put("k", b"x")
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert (process.returncode, b"Traceback" in errors) == (0, False)


def test_put_with_a_closed_standard_input_is_a_usage_error(environment: dict[str, str]) -> None:
    ended = warm.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *INFINISTORE, "put", "k"], env=environment, capture_output=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"infinistore: standard input is closed; name a file")


def test_no_is_an_answer(server: Any, environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    ended = warm.run(
        [*INFINISTORE, "purge", "--url", server.url], env=environment, stdin=theirs, capture_output=True, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.endswith(b"infinistore: nothing was done\n")


@pytest.mark.parametrize(
    ("value", "force", "code"),
    [
        (b"plain text\n", False, 0),
        ("größer\t\n".encode(), False, 0),
        (b"\x00\xff", False, 2),
        (b"\x1b[2J", False, 2),
        (b"\x00\xff", True, 0),
    ],
    ids=["ascii", "utf-8", "binary", "escape", "forced"],
)
def test_a_terminal_gets_plain_text_only_unless_forced(
    value: bytes, force: bool, code: int, server: Any, environment: dict[str, str]
) -> None:
    with blocking.open_store(server.url) as store:
        store.put("for-a-terminal", value)
    arguments = ["get", "for-a-terminal", "--url", server.url, *(["--force"] if force else [])]
    ended, shown, errors = _on_a_terminal(arguments, environment)
    assert ended == code
    assert shown == (value.replace(b"\n", b"\r\n") if code == 0 else b"")
    assert (b"--force" in errors) is (code == 2)


def test_colour_is_for_terminals_and_no_color_is_respected(environment: dict[str, str]) -> None:
    colours = {name: value for name, value in environment.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    _, shown, _ = _on_a_terminal(["--help"], colours)
    assert b"\x1b[" in shown
    _, shown, _ = _on_a_terminal(["--help"], colours | {"NO_COLOR": "1"})
    assert not any(f"\x1b[{code}".encode() in shown for code in range(30, 50))
    piped = warm.run([*INFINISTORE, "--help"], env=colours, capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout


def _on_a_terminal(arguments: list[str], environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Run the command with a terminal for standard output; return exit code, what it
    showed, and standard error.
    """
    ours, theirs = pty.openpty()
    process = warm.Popen([*INFINISTORE, *arguments], env=environment, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # EIO: how a terminal says that nobody has its other end any more
        pass
    os.close(ours)
    _, errors = process.communicate()
    return process.returncode, shown, errors
