"""`infinistore route`: what it refuses, and a router as people start it."""

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from infinistore.traces import read_trace
from tests import warm
from tests.cli.conftest import INFINISTORE, Run
from tests.http_servers import Quiet, serving_http
from tests.transports.certificates import issue


class Engine(Quiet, BaseHTTPRequestHandler):
    """An engine that says what it was asked, in pieces, each of which it waits for."""

    protocol_version = "HTTP/1.1"
    goes_on: threading.Event

    def do_GET(self) -> None:
        """Answer what the router asks by itself."""
        said = b'{"data": [{"id": "m", "root": "/m"}]}' if self.path == "/v1/models" else b""
        self.send_response(200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_POST(self) -> None:
        """Answer a prompt."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in (body, b"end"):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.goes_on.wait()
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def engine() -> Iterator[tuple[str, threading.Event]]:
    """Run an engine; yield its URL, and what lets its answers go on."""
    goes_on = threading.Event()
    goes_on.set()
    with serving_http(type("Own", (Engine,), {"goes_on": goes_on})) as port:
        try:
            yield f"http://127.0.0.1:{port}", goes_on
        finally:
            goes_on.set()


@contextmanager
def router(environment: Mapping[str, str], *flags: str) -> Iterator[tuple["subprocess.Popen[bytes]", str, int]]:
    """Start a router, and wait for the line that says where it listens."""
    arguments = [*INFINISTORE, "route", "--port", "0", *flags]
    with warm.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            found = re.search(r":(\d+) to", line)
            if found is None:
                pytest.fail(f"the router did not start: {process.communicate()[1].decode()}")
            yield process, line, int(found[1])
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:  # reset, if the router stops to listen while it waits to be accepted
        return False
    return True


BODY = json.dumps({"model": "m", "prompt": "hello", "stream": True}).encode()


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_router_that_is_told_to_stop_finishes_what_it_has_begun_and_writes_it_down(
    environment: dict[str, str], tmp_path: Path, number: int, code: int
) -> None:
    flags = ["--record", str(tmp_path / "trace")]
    with engine() as (url, goes_on), router(environment, "--engine", url, *flags) as (process, line, port):
        assert line == f"routing on http://127.0.0.1:{port} to 1 engine, 1 up (soonest)\n"
        goes_on.clear()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, answer.read(len(BODY))) == (200, BODY)
        process.send_signal(number)
        while _listens(port):  # until it has taken the signal
            pass
        goes_on.set()
        assert answer.read() == b"end"
        connection.close()
        _, errors = process.communicate()
    assert (process.returncode, b"Traceback" in errors) == (code, False)
    assert len(read_trace((tmp_path / "trace").read_text().splitlines())) == 1


@pytest.mark.process
def test_a_router_speaks_tls_and_wants_its_token(environment: dict[str, str], tmp_path: Path) -> None:
    files = issue(tmp_path)
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--token-file", str(token)]
    with engine() as (url, _), router(environment, "--engine", url, *flags) as (_, line, port):
        assert line.startswith("routing on https://")
        context = ssl.create_default_context(cafile=str(files.ca))
        for shown, status in (("wrong", 401), ("secret", 200)):
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=context)
            connection.request("POST", "/v1/completions", BODY, {"authorization": f"Bearer {shown}"})
            answer = connection.getresponse()
            assert (answer.status, BODY in answer.read()) == (status, status == 200)
            connection.close()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "there is no engine: give --engine URL"),
        (["--engine", "127.0.0.1:8000"], "--engine 127.0.0.1:8000: must look like http://127.0.0.1:8000"),
        (["--engine", "http://me:secret@a"], "without a user name"),
        (["--engine", "http://a/\u00fc"], "in ASCII"),
        (["--prefill", "http://a"], "no engine answers; give --decode URL"),
        (["--engine", "http://a", "--decode", "http://a/"], "http://a is named twice"),
        (["--announced"], "name it with --store"),
        (["--engine", "http://a", "--tls-key", "k"], "--tls-key needs --tls-cert"),
        (["--engine", "http://a", "--policy", "soonst"], "soonest"),
        (["--engines-file", "none", "--port", "0"], "--engines-file none: No such file"),
        (["--engine", "http://a", "--store", "http://b"], "http://b"),
        (["--engine", "http://a", "--token-file", "none"], "--token-file"),
        (["--engine", "http://a", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(command: Run, flags: list[str], why: str) -> None:
    done = command("route", *flags)
    assert (done.returncode, done.stdout) == (2, b"")
    (line,) = done.stderr.decode().splitlines()
    assert why in line
