"""Ctrl-C, SIGTERM, output that nobody reads any more, and terminals. Nothing waits for
time to pass.

Python answers a closed pipe, a full disk and a terminal in this process as in any, so
that most of it is seen here. Processes show what becomes of signals, and of streams at
the end.
"""

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from infinistore import blocking
from infinistore.cli import failures, measure, raw_peer
from tests import warm
from tests.cli.conftest import INFINISTORE, Run, StartProcess
from tests.cli.in_process import FREE_PORTS, ServerHere
from tests.limits import descendants


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["put k", "bench", "stat --wait 600"])
def test_ctrl_c_ends_a_command_with_130_and_without_a_word(arguments: str, environment: dict[str, str]) -> None:
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


@pytest.mark.process
def test_ctrl_c_ends_a_benchmark_and_its_keys_are_deleted(server: ServerHere, environment: dict[str, str]) -> None:
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


def test_a_measurement_that_is_interrupted_waits_for_the_calls_it_began() -> None:
    main = threading.get_ident()
    ended = threading.Event()
    late: list[bool] = []

    def step() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        late.append(ended.wait(0.2))  # real time: the longest it looks for what must not come

    with pytest.raises(KeyboardInterrupt):
        measure.run([step, step], 600)
    ended.set()
    assert late
    assert not any(late)


def test_a_measurement_that_cannot_start_its_threads_waits_for_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError):
        measure.run([int, int], 600)
    assert not started[0].is_alive()


@pytest.mark.process
def test_a_benchmark_that_is_interrupted_waits_for_its_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Impatient(warm.Popen):
        """After Ctrl-C, Popen waits a quarter of a second at most; this one less."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self._sigint_wait_secs = 0
            started.append(self)

    monkeypatch.setattr(raw_peer, "subprocess", SimpleNamespace(Popen=Impatient, PIPE=subprocess.PIPE))
    with pytest.raises(KeyboardInterrupt), raw_peer.raw_peer(unix=True):
        raise KeyboardInterrupt
    assert [process.returncode for process in started] == [0]


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_server_that_is_told_to_stop_drains_and_exits(number: int, code: int, running_process: StartProcess) -> None:
    with running_process("--prealloc-size", "1MiB") as own:
        socket_path = own.ready_line.partition("unix://")[2].partition(",")[0]
        assert os.path.exists(socket_path)
        ended, errors = own.stop(number)
        assert ended == code
        assert b"Traceback" not in errors
        assert not os.path.exists(socket_path)


def _starting(process: "subprocess.Popen[bytes]", socket_path: Path) -> bool:
    """Whether a server has begun: it has shards, or has its Unix socket."""
    return socket_path.exists() or any(descendants(process.pid))


# As a shell does to what a script starts in the background.
_IGNORING_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from infinistore.cli import main
main()
"""


def _start(
    *flags: str, environment: dict[str, str], program: tuple[str, str] = ("-m", "infinistore")
) -> "subprocess.Popen[bytes]":
    arguments = [*INFINISTORE[:3], *program, "--prealloc-size", "8MiB", *FREE_PORTS, *flags]
    return warm.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.process
@pytest.mark.parametrize("shards", ["1", pytest.param("3", marks=pytest.mark.nightly)])
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


@pytest.mark.process
def test_a_server_obeys_sigterm_also_if_it_was_started_to_ignore_ctrl_c(environment: dict[str, str]) -> None:
    process = _start("--shards", "2", environment=environment, program=("-c", _IGNORING_CTRL_C))
    while not _starting(process, Path("/none")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert all(line.startswith(b"{") for line in errors.splitlines())


def _closed_pipe() -> int:
    """A pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return write_end


@pytest.mark.parametrize("unbuffered", [False, True])
def test_output_that_is_closed_half_way_ends_quietly(unbuffered: bool, server: ServerHere, store: Run) -> None:
    with blocking.open_store(server.url) as direct:
        direct.put("long", bytes(4 << 20))  # more than a pipe holds
    read_end, write_end = os.pipe()

    def read_one_byte() -> bytes:
        with open(read_end, "rb", 0) as reader:
            return reader.read(1)

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read_one_byte)
        ended = store("get", "long", stdout=write_end, unbuffered=unbuffered)
        assert reading.result() == b"\0"
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        *("ls", "stat", "stat --json", "--help", "serve --help", "help exit-codes", "--version"),
        *("doctor", "completion zsh"),
        pytest.param("demo --pool-size 64MiB --layers 1", marks=[pytest.mark.process, pytest.mark.nightly]),
    ],
)
@pytest.mark.usefixtures("jemalloc_works")
def test_output_that_nobody_reads_ends_quietly(arguments: str, server: ServerHere, store: Run) -> None:
    with blocking.open_store(server.url) as direct:
        direct.put("some-key", b"x")
    ended = store(*arguments.split(), stdout=_closed_pipe())
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.process
def test_a_process_whose_output_nobody_reads_ends_quietly(server: ServerHere, environment: dict[str, str]) -> None:
    with open(_closed_pipe(), "wb") as output:
        ended = warm.run(
            [*INFINISTORE, "stat", "--url", server.url], env=environment, stdout=output, stderr=subprocess.PIPE
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_an_exit_that_rich_makes_of_a_closed_pipe_is_that_of_a_closed_pipe(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As while `demo` shows how far it is."""

    def show(arguments: object, session: object) -> int:
        Console(file=sys.stdout).print("nobody reads this")
        return 0

    with open(_closed_pipe(), "w") as output, monkeypatch.context() as here:
        here.setattr(sys, "stdout", output)
        assert failures.answered([], show) == 141
    assert capfd.readouterr().err == ""


FULL = b"infinistore: No space left on device\n"


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", ["stat", "get k", "exists k", "--help"])
def test_output_that_cannot_be_written_is_an_error(
    arguments: str, unbuffered: bool, server: ServerHere, store: Run
) -> None:
    with blocking.open_store(server.url) as direct:
        direct.put("k", b"x")
    ended = store(*arguments.split(), stdout=os.open("/dev/full", os.O_WRONLY), unbuffered=unbuffered)
    assert (ended.returncode, ended.stderr) == (2, FULL)


# Python gives a process that is started so no stream.
_WITHOUT_OUTPUT = """
import os, sys
os.close(1)
sys.stdout = sys.__stdout__ = None
from infinistore.cli import main
main()
"""


@pytest.mark.process
@pytest.mark.parametrize("arguments", ["stat", "get k", "exists k", "--help"])
def test_output_that_is_closed_is_an_error(arguments: str, server: ServerHere, environment: dict[str, str]) -> None:
    with blocking.open_store(server.url) as store:
        store.put("k", b"x")
    ended = warm.run(
        [*INFINISTORE[:3], "-c", _WITHOUT_OUTPUT, *arguments.split()],
        env=environment | {"INFINISTORE_URL": server.url},
        stderr=subprocess.PIPE,
    )
    assert (ended.returncode, ended.stderr) == (2, b"infinistore: standard output is closed\n")


@pytest.mark.process
@pytest.mark.parametrize(
    ("redirection", "problem"), [(">&-", b"infinistore: standard output is closed\n"), ("> /dev/full", FULL)]
)
def test_a_process_whose_output_cannot_be_written_says_so(
    redirection: str, problem: bytes, environment: dict[str, str]
) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *INFINISTORE, "--version"],
        env=environment | {"PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (2, problem)


@pytest.mark.process
@pytest.mark.parametrize("is_full", [False, True], ids=["closed", "full"])
def test_a_server_serves_also_if_it_cannot_say_so(is_full: bool, environment: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "socket"
    flags = ["--prealloc-size", "1MiB", "--service-port", "0", "--manage-port", "off", "--unix-socket", str(place)]
    program = INFINISTORE[3:] if is_full else ("-c", _WITHOUT_OUTPUT)
    with open("/dev/full" if is_full else os.devnull, "wb") as output:
        process = warm.Popen(
            [*INFINISTORE[:3], *program, *flags], env=environment, stdout=output, stderr=subprocess.PIPE
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


# As Python does for a process whose standard input is closed.
_WITHOUT_INPUT = "import sys; sys.stdin = sys.__stdin__ = None; from infinistore.cli import main; main()"


@pytest.mark.process
def test_put_with_a_closed_standard_input_is_a_usage_error(environment: dict[str, str]) -> None:
    ended = warm.run([*INFINISTORE[:3], "-c", _WITHOUT_INPUT, "put", "k"], env=environment, capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"infinistore: standard input is closed; name a file")


@pytest.mark.process
def test_no_is_an_answer(server: ServerHere, environment: dict[str, str]) -> None:
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
    value: bytes, force: bool, code: int, server: ServerHere, store: Run
) -> None:
    with blocking.open_store(server.url) as direct:
        direct.put("for-a-terminal", value)
    ended, shown = _on_a_terminal(store, "get", "for-a-terminal", *(["--force"] if force else []))
    assert ended.returncode == code
    assert shown == (value.replace(b"\n", b"\r\n") if code == 0 else b"")
    assert (b"--force" in ended.stderr) is (code == 2)


def test_colour_is_for_terminals_and_no_color_is_respected(command: Run) -> None:
    colours = {"TERM": "xterm-256color", "NO_COLOR": ""}
    _, shown = _on_a_terminal(command, "--help", env=colours)
    assert b"\x1b[" in shown
    _, shown = _on_a_terminal(command, "--help", env=colours | {"NO_COLOR": "1"})
    assert not any(f"\x1b[{code}".encode() in shown for code in range(30, 50))
    assert b"\x1b" not in command("--help", env=colours).stdout


def _on_a_terminal(
    run: Run, *arguments: str, env: Mapping[str, str] | None = None
) -> tuple["subprocess.CompletedProcess[bytes]", bytes]:
    """Run the command with a terminal for standard output; return how it ended, and
    what it showed.
    """
    ours, theirs = pty.openpty()

    def read() -> bytes:
        shown = b""
        with suppress(OSError):  # EIO: how a terminal says that nobody has its other end any more
            while part := os.read(ours, 65536):
                shown += part
        return shown

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        ended = run(*arguments, env=env, stdout=theirs)
        shown = reading.result()
    os.close(ours)
    return ended, shown
