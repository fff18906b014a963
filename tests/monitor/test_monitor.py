"""The whole monitor: a real server, a real terminal, keys and signals. Every wait is
for something that is shown.
"""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import trio

from infinistore import StoreUnavailable, blocking
from infinistore.monitor import app
from infinistore.monitor.app import Pace, Source
from infinistore.monitor.model import Model
from tests import warm
from tests.ports import own_ports

from .conftest import INFINISTORE, Session, Start, running_server
from .emulator import Emulator
from .made import NOON, make_stats

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.process
def test_keys_sort_filter_change_the_interval_help_and_quit_and_are_not_echoed(monitor: Session, url: str) -> None:
    assert monitor.settings != monitor.before
    assert (monitor.screen.alternate, monitor.screen.cursor_visible) == (True, False)
    with blocking.open_store(url, name="decode-7") as store:
        store.put("model/tp0/block", b"x" * 1000)
        monitor.wait_for("decode-7")
        monitor.wait_for("model/tp0/")
        for keys, said in (
            ("sS", "prefix, by keys"), ("/dec", "filter: dec_"), ("\r", 'only "dec"'), ("+", "every 0.5 s"),
            ("?", "this help; any key leaves it"), ("x", "client, by requests"),
        ):  # fmt: skip
            monitor.press(keys)
            monitor.wait_for(said)
        monitor.wait_until(lambda screen: "decode-7" in screen.text and "model/tp0/" not in screen.text)
    monitor.press("q")
    assert monitor.end() == 0
    assert monitor.is_restored()
    assert monitor.screen.printed == ""


@pytest.mark.process
def test_a_paused_screen_stands_still_and_history_goes_on(monitor: Session) -> None:
    def is_drawn(screen: Emulator) -> bool:
        """Whether all of it is: what a terminal gives at once may be a part."""
        return screen.lines[-1].endswith("p go on   + - interval")

    monitor.press("p")
    monitor.wait_until(is_drawn)
    shown = monitor.screen.lines
    assert "PAUSED" in shown[0]
    monitor.press("?")
    monitor.wait_for("this help")
    monitor.press("x")
    monitor.wait_until(is_drawn)
    assert monitor.screen.lines == shown
    monitor.press("q")
    assert monitor.end() == 0


@pytest.mark.process
def test_the_screen_follows_the_size_of_the_window(monitor: Session) -> None:
    for width, height in ((100, 40), (40, 12), (20, 10), (10, 3), (200, 60), (80, 24)):
        monitor.resize(width, height)
        if width < 20:
            monitor.wait_for("too small")
        else:
            monitor.wait_until(lambda screen: screen.lines[-1].startswith("q quit") and "serving" in screen.text)
    monitor.press("q")
    assert monitor.end() == 0
    assert monitor.is_restored()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.process
def test_a_signal_to_stop_leaves_the_terminal_as_it_was_and_no_word(monitor: Session, number: signal.Signals) -> None:
    if number == signal.SIGINT:
        monitor.press("\x03")
    else:
        monitor.process.send_signal(number)
    assert monitor.end() == 128 + number
    assert monitor.is_restored()
    assert monitor.screen.printed == ""


@pytest.mark.process
def test_an_error_inside_leaves_the_terminal_as_it_was_and_is_one_line(start: Start, url: str) -> None:
    broken = (
        "import infinistore.monitor.app as app\n"
        "from infinistore.cli import main\n"
        "def screen(*_):\n"
        "    raise RuntimeError('drawn wrongly')\n"
        "app.screen = screen\n"
        f"main(['monitor', {url!r}])\n"
    )
    session = start(sys.executable, "-c", broken)
    assert session.end() == 70
    assert session.is_restored()
    assert session.screen.printed.startswith("infinistore: internal error: RuntimeError: drawn wrongly")
    assert session.screen.printed.count("\n") == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
@pytest.mark.process
def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(
    start: Start, url: str, environment: dict[str, str]
) -> None:
    session = start("/bin/bash", "--norc", "--noprofile", "--noediting", "-i", PS1="ready ", HISTFILE="")
    printed_so_far = 0

    def printed(text: str) -> bool:
        return text in session.screen.printed[printed_so_far:]

    session.wait_until(lambda _: printed("ready "))
    usual = session.settings
    session.press(f"{' '.join(INFINISTORE)} monitor {url} --interval 0.2\n")
    session.wait_for("client, by traffic")
    for _ in range(2):
        printed_so_far = len(session.screen.printed)
        session.press("\x1a")
        session.wait_until(lambda _: printed("Stopped") and printed("ready "))
        assert session.settings == usual
        assert (session.screen.alternate, session.screen.cursor_visible) == (False, True)
        session.press("fg\n")
        session.wait_for("client, by traffic")
        assert session.settings != usual
    printed_so_far = len(session.screen.printed)
    session.press("q")
    session.wait_until(lambda _: printed("ready "))
    assert session.settings == usual
    session.press("exit $?\n")
    assert session.end() == 0


@pytest.mark.process
def test_a_server_that_dies_is_shown_as_dead_and_found_again_when_it_is_back(
    start: Start, environment: dict[str, str]
) -> None:
    (port,) = own_ports(1)
    flags = ["--service-port", str(port), "--manage-port", "off", "--unix-socket", "off", "--prealloc-size", "16MiB"]
    with warm.Popen([*INFINISTORE, *flags], stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline()
        session = start(*INFINISTORE, "monitor", f"tcp://127.0.0.1:{port}", "--interval", "0.2")
        session.wait_for("serving")
        server.kill()
    session.wait_for("NO ANSWER since")
    session.wait_for("Connection refused")
    with running_server(environment, port):
        session.wait_for("another process serves")
        session.wait_for("serving")
        session.press("q")
        assert session.end() == 0


@pytest.mark.process
def test_a_monitor_may_be_started_before_its_server(start: Start, environment: dict[str, str]) -> None:
    port = own_ports(1)[0]
    session = start(*INFINISTORE, "monitor", f"tcp://127.0.0.1:{port}", "--wait", "60")
    with running_server(environment, port):
        session.wait_for("serving")
        session.press("q")
        assert session.end() == 0


def test_once_prints_one_screen_and_json_says_the_same_to_programs(run: Run, url: str) -> None:
    shown = run("monitor", url, "--once", "--ascii", "--interval", "0.1")
    assert (shown.returncode, shown.stderr, shown.stdout.isascii()) == (0, "", True)
    for part in ("serving", "pool", "arena 0", "statistics", "client, by traffic", url):
        assert part in shown.stdout
    assert "\x1b" not in shown.stdout
    said = run("monitor", "--url", url, "--once", "--json", "--interval", "0.1")
    assert (said.returncode, said.stderr) == (0, "")
    document = json.loads(said.stdout)
    assert (document["state"], document["url"], document["restarts"]) == ("serving", url, 0)
    assert document["per_s"]["requests"] > 0
    assert document["stats"]["store"]["capacity_bytes"] == 16 << 20
    assert {row["kind"] for row in document["operations"]} >= {"statistics"}


async def test_one_screen_of_a_server_that_is_lost_half_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sample(
        source: Source, pace: Pace, model: Model, on_change: Callable[[], None], *, task_status: trio.TaskStatus[None]
    ) -> None:
        model.observe(make_stats(), now_s=0.0, at=NOON)
        task_status.started()
        model.lose("the server closed the connection", now_s=1.0, at=NOON)
        on_change()

    monkeypatch.setattr(app, "sample", sample)
    with pytest.raises(StoreUnavailable, match="closed the connection"):
        await app.take_two(Source("tcp://127.0.0.1"), 1.0)


@pytest.mark.process
def test_json_goes_on_until_nobody_reads_it(environment: dict[str, str], url: str) -> None:
    with warm.Popen(
        [*INFINISTORE, "monitor", url, "--json", "--interval", "0.1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        documents = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
    assert [document["per_s"] is None for document in documents] == [True, False, False]


def test_without_a_terminal_it_prints_one_screen_and_says_so(run: Run, url: str) -> None:
    ended = run("monitor", url, "--interval", "0.1")
    assert ended.returncode == 0
    assert "client, by traffic" in ended.stdout
    assert ended.stderr == (
        "infinistore: standard output is no terminal that can be drawn on; this was one screen, as with --once\n"
    )


@pytest.mark.process
def test_a_terminal_that_cannot_be_drawn_on_gets_one_screen(start: Start, url: str) -> None:
    session = start(*INFINISTORE, "monitor", url, "--interval", "0.1", TERM="dumb")
    assert session.end() == 0
    assert "client, by traffic" in session.screen.printed
    assert not session.screen.alternate


@pytest.mark.process
def test_keys_need_standard_input_and_the_screen_says_so(start: Start, url: str) -> None:
    program = (
        f"os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\nfrom infinistore.cli import main\nmain(['monitor', {url!r}])\n"
    )
    session = start(sys.executable, "-c", program)
    session.wait_for("standard input is no terminal")
    session.press("\x03")
    assert session.end() == 130
    assert session.is_restored()


def test_what_is_no_infinistore_or_not_there_is_one_line_and_an_exit_code(run: Run) -> None:
    def chat(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(200))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=chat, args=(listener,))
        other.start()
        ended = run("monitor", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        other.join()
    nobody = run("monitor", f"tcp://127.0.0.1:{own_ports(1)[0]}")
    assert "cannot connect" in nobody.stderr
    for one in (ended, nobody):
        assert (one.returncode, one.stdout) == (3, "")
        assert one.stderr.startswith("infinistore: ") and one.stderr.count("\n") == 1
