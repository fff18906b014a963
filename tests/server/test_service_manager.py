"""What a server tells the service manager that started it, and the sockets it takes
from it: by an imitation of systemd's end.
"""

import ctypes.util
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from infinistore import blocking, service_manager
from infinistore.cli import root
from infinistore.errors import ConfigError
from infinistore.server import serve
from infinistore.service_manager import ServiceManager
from tests import warm
from tests.descriptors import is_still
from tests.server.running import make_config
from tests.transports.certificates import issue

FLAGS = ["--service-port", "0", "--manage-port", "off", "--prealloc-size", "8MiB"]
HANGS_ON_SIGUSR1 = """
import signal, sys
from infinistore.cli import main

def hang(*_):
    print("it hangs", flush=True)
    while True:
        pass

signal.signal(signal.SIGUSR1, hang)
main(["serve", *sys.argv[1:]])
"""
AS_A_CHILD_OF_SYSTEMD = """
import os, sys
given = [int(one) for one in sys.argv[1].split(",")]
for number, descriptor in enumerate(given):
    os.dup2(descriptor, 3 + number, inheritable=True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(given)), "LISTEN_FDNAMES": "a:b"}
from infinistore.cli import main
main(["serve", *sys.argv[2:]])
"""


@attrs.frozen
class Notifications:
    """Where systemd would hear."""

    socket: socket.socket
    address: str

    def next(self) -> list[str]:
        """Wait for a datagram; return its lines."""
        return self.socket.recv(4096).decode().splitlines()

    def until(self, line: str) -> list[list[str]]:
        """Wait for a datagram with this line; return those before it."""
        found: list[list[str]] = []
        while line not in (lines := self.next()):
            found.append(lines)
        return found


@pytest.fixture
def notifications(tmp_path: Path) -> Iterator[Notifications]:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(60)
        yield Notifications(sock, address)


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    return inherited | {"XDG_RUNTIME_DIR": str(tmp_path), **more}


@pytest.mark.process
@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_server_says_when_it_serves_and_when_it_drains_and_beats_meanwhile(
    notifications: Notifications, tmp_path: Path, shards: str
) -> None:
    """One that has nothing to read again says so and serves on. One with shards kills a
    shard that is silent for as long as a watchdog waits, so that this is long; of its
    processes, only the first tells anything.
    """
    more = {"WATCHDOG_USEC": "200000" if shards == "1" else "240000000"}
    told = environment(tmp_path, NOTIFY_SOCKET=notifications.address, **more)
    command = [sys.executable, "-W", "error", "-m", "infinistore", "serve", *FLAGS, "--shards", shards]
    pipe = subprocess.PIPE
    with warm.Popen(command, env=told, stdout=pipe, stderr=pipe, text=True) as process:
        before = notifications.until("READY=1")
        assert all(lines[0] == "WATCHDOG=1" and lines[1].startswith("EXTEND_TIMEOUT_USEC=") for lines in before)
        assert before
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on ")
        if shards == "1":
            assert notifications.next() == ["WATCHDOG=1"]
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            notifications.until("READY=1")
        process.terminate()
        assert all(lines == ["WATCHDOG=1"] for lines in notifications.until("STOPPING=1"))
        _, log = process.communicate()
        assert process.returncode == 0
    assert log.count("there is nothing to read again") == 2
    assert "the cache is not kept" not in log


@pytest.mark.process
def test_a_loop_that_hangs_beats_no_more_and_the_log_says_where_it_hung(
    notifications: Notifications, tmp_path: Path
) -> None:
    told = environment(tmp_path, NOTIFY_SOCKET=notifications.address, WATCHDOG_USEC="100000")
    command = [sys.executable, "-c", HANGS_ON_SIGUSR1, *FLAGS]
    pipe = subprocess.PIPE
    with warm.Popen(command, env=told, stdout=pipe, stderr=pipe, text=True) as process:
        notifications.until("READY=1")
        notifications.next()
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        while process.stdout.readline() != "it hangs\n":
            pass
        while select.select([notifications.socket], [], [], 0)[0]:
            notifications.next()  # the beats before
        notifications.socket.settimeout(0.5)  # real time: no beat ever comes
        with pytest.raises(TimeoutError):
            notifications.next()
        process.send_signal(signal.SIGABRT)  # what systemd sends then
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGABRT
        assert "in hang" in errors


async def test_a_server_says_when_it_reads_its_certificate_again(notifications: Notifications, tmp_path: Path) -> None:
    files = issue(tmp_path)
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": notifications.address}, 7)
    manager.ready()
    assert notifications.next()[0] == "READY=1"
    async with trio.open_nursery() as nursery:
        config = make_config(tls_cert=files.cert, tls_key=files.key)
        await nursery.start(partial(serve, config, handle_signals=True, service_manager=manager))
        signal.raise_signal(signal.SIGHUP)
        await trio.lowlevel.wait_readable(notifications.socket)
        reloading, monotonic = notifications.next()
        assert reloading == "RELOADING=1"
        assert monotonic.removeprefix("MONOTONIC_USEC=").isdecimal()
        await trio.lowlevel.wait_readable(notifications.socket)
        assert notifications.next()[0] == "READY=1"
        nursery.cancel_scope.cancel()


def test_a_server_that_drains_does_not_say_that_it_serves_again(notifications: Notifications) -> None:
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": notifications.address}, 7)
    manager.ready()
    manager.stopping()
    with manager.reloading():
        pass
    manager.stopping()
    assert [notifications.next()[0] for _ in range(3)] == ["READY=1", "STOPPING=1", "STOPPING=1"]


async def test_without_a_watchdog_only_a_start_and_a_drain_ask_for_time(
    notifications: Notifications, autojump_clock: trio.testing.MockClock
) -> None:
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": notifications.address}, 7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(manager.beat)
        await trio.sleep(15)
        assert notifications.next() == ["EXTEND_TIMEOUT_USEC=40000000"]
        assert notifications.next() == ["EXTEND_TIMEOUT_USEC=40000000"]
        manager.ready()
        await trio.sleep(100)
        assert notifications.next() == ["READY=1", "STATUS=serving"]
        manager.stopping()
        await trio.sleep(10)
        assert notifications.next() == ["STOPPING=1", "STATUS=draining"]
        assert notifications.next() == ["EXTEND_TIMEOUT_USEC=40000000"]
        nursery.cancel_scope.cancel()


def test_the_address_may_be_abstract() -> None:
    name = f"infinistore-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        ServiceManager.from_environment({"NOTIFY_SOCKET": f"@{name}"}, 7).ready()
        assert sock.recv(100, socket.MSG_DONTWAIT) == b"READY=1\nSTATUS=serving"


async def test_a_process_without_a_service_manager_tells_nobody() -> None:
    manager = ServiceManager.from_environment({}, 7)
    manager.ready()
    await manager.beat()  # ends at once


def test_a_service_manager_that_is_gone_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ServiceManager.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")}, 7).ready()
    assert [record.message for record in caplog.records] == ["the service manager cannot be told"]


def test_what_is_meant_for_another_process_is_left_alone() -> None:
    variables = {"LISTEN_PID": "8", "LISTEN_FDS": "1", "WATCHDOG_PID": "8", "WATCHDOG_USEC": "1000000", "HOME": "/"}
    manager = ServiceManager.from_environment(variables, 7)
    assert (manager.listeners, manager.watchdog_s, variables) == ((), None, {"HOME": "/"})


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"NOTIFY_SOCKET": "relative"}, "NOTIFY_SOCKET=relative: must be a path"),
        ({"WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC=soon: must be a number"),
        ({"LISTEN_PID": "7", "LISTEN_FDS": "-1"}, "LISTEN_FDS=-1: must be a number"),
        ({"LISTEN_PID": "²", "LISTEN_FDS": "1"}, "LISTEN_PID=²: must be a number"),
    ],
)
def test_variables_that_no_service_manager_sets_are_refused(variables: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServiceManager.from_environment(variables, 7)


def start_activated(tmp_path: Path, numbers: list[int], *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", AS_A_CHILD_OF_SYSTEMD, ",".join(map(str, numbers)), *FLAGS, *flags]
    told, pipe = environment(tmp_path), subprocess.PIPE
    return warm.Popen(command, env=told, pass_fds=numbers, stdout=pipe, stderr=pipe, text=True)


def listener(tmp_path: Path, kind: str) -> socket.socket:
    """A socket as systemd's socket unit would give it, high above the descriptors that
    it is to have.
    """
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(tmp_path / "given.sock"))
        sock.listen()
    else:
        sock = socket.create_server((kind, 0))
    with sock:
        return socket.socket(fileno=os.dup(sock.fileno()))


@pytest.mark.process
def test_the_sockets_that_a_server_is_given_are_served(tmp_path: Path) -> None:
    """With jemalloc, where it is installed, the process starts itself a second time."""
    allocator = "bitmap" if ctypes.util.find_library("jemalloc") is None else "jemalloc"
    with listener(tmp_path, "127.0.0.1") as tcp, listener(tmp_path, "unix") as unix:
        port, path = tcp.getsockname()[1], unix.getsockname()
        early = socket.create_connection(("127.0.0.1", port))
        process = start_activated(tmp_path, [tcp.fileno(), unix.fileno()], "--allocator", allocator)
    with early, process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert f"tcp://127.0.0.1:{port} and unix://{path}, " in process.stdout.readline()
        for url in (f"tcp://127.0.0.1:{port}", f"shm://{path}"):
            with blocking.open_store(url) as store:
                store.put("key", b"value")
                assert bytes(store.get("key")) == b"value"
        early.sendall(b"x")
        process.terminate()
        assert process.wait() == 0
    assert Path(path).exists()  # it is systemd's, which may start the next server for it


Give = Callable[..., dict[str, str]]
Refused = Callable[..., str]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """Returns give(*descriptors, **more): variables that give copies of them to this
    process, as from a service manager that has them begin elsewhere than at 3.
    """
    first = 900
    copies: list[int] = []

    def made(*descriptors: int, **more: str) -> dict[str, str]:
        monkeypatch.setattr(service_manager, "FIRST_DESCRIPTOR", first)
        copies.extend(os.dup2(one, first + number) for number, one in enumerate(descriptors))
        return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(descriptors)), **more}

    yield made
    for copy in copies:
        with suppress(OSError):  # its owner has closed it
            os.close(copy)


@pytest.fixture
def refused(give: Give, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Returns refused(descriptor, *flags): the one line of a server that is given this
    descriptor, and does not start.
    """

    def serve_in_vain(descriptor: int, *flags: str) -> str:
        for name, value in give(descriptor).items():
            monkeypatch.setenv(name, value)
        assert root.run(["serve", *FLAGS, "--unix-socket", "off", *flags]) != 0
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return serve_in_vain


@pytest.mark.parametrize(
    ("kind", "flags", "problem"),
    [
        ("0.0.0.0", [], "other machines could read and write everything; add --token-file FILE"),
        ("127.0.0.1", ["--shards", "2"], "disable the socket unit"),
    ],
)
def test_a_given_socket_that_must_not_be_served_is_refused_in_one_line(
    tmp_path: Path, kind: str, flags: list[str], problem: str, refused: Refused
) -> None:
    with listener(tmp_path, kind) as given:
        assert problem in refused(given.fileno(), *flags)


@pytest.mark.parametrize("kind", ["file", "datagram", "not listening"])
def test_a_given_descriptor_that_nobody_can_connect_to_is_refused(tmp_path: Path, kind: str, refused: Refused) -> None:
    with (
        (tmp_path / "file").open("w") as file,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram,
        socket.socket() as not_listening,
    ):
        numbers = {"file": file.fileno(), "datagram": datagram.fileno(), "not listening": not_listening.fileno()}
        line = refused(numbers[kind])
    assert "LISTEN_FDS: descriptor 900 is no" in line


async def test_two_unix_sockets_are_refused(tmp_path: Path) -> None:
    given = []
    for name in ("first", "second"):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(tmp_path / name))
        sock.listen()
        given.append(sock)
    with pytest.raises(ConfigError, match="one Unix socket"):
        await serve(make_config(), service_manager=ServiceManager(listeners=tuple(given)))
    assert [sock.fileno() for sock in given] == [-1, -1]


def test_what_is_kept_is_told_from_sockets_by_its_name(give: Give) -> None:
    state = os.memfd_create("state")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        variables = give(sock.fileno(), state, LISTEN_FDNAMES="infinistore.socket:infinistore-state")
        manager = ServiceManager.from_environment(variables, os.getpid())
    os.close(state)
    (given,) = manager.listeners
    given.close()
    assert (manager.kept, manager.look_at("state")) == ({"infinistore-state": 901}, 901)
    assert (manager.take("state"), manager.kept) == (901, {})
    assert not variables


def test_a_manager_that_reads_nothing_is_not_waited_for_for_ever(
    notifications: Notifications, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_manager, "ANSWER_S", 0.05)
    descriptor = os.memfd_create("state")
    file = os.fstat(descriptor)
    manager = ServiceManager(notifications.address, most_kept=5, kept={"infinistore-state": descriptor})
    with pytest.raises(TimeoutError):
        manager.keep([("other", descriptor)])
    manager.forget()
    assert [record.message for record in caplog.records] == ["the service manager cannot be told"]
    assert not is_still(file, descriptor)
