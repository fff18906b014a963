"""Commands whose standard streams are closed, as a shell closes them, or full."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infinistore import blocking

pytestmark = pytest.mark.process
COMMAND = [sys.executable, "-P", "-m", "infinistore"]
SERVER = ["--prealloc-size", "1MiB", "--service-port", "0", "--manage-port", "off", "--unix-socket"]


def shell(redirections: str) -> list[str]:
    return ["sh", "-c", f'exec "$@" {redirections}', "sh", *COMMAND]


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_a_server_serves_whatever_is_closed_and_no_socket_takes_its_place(redirections: str, tmp_path: Path) -> None:
    place = tmp_path / "socket"
    with subprocess.Popen([*shell(redirections), *SERVER, str(place)], stdin=subprocess.DEVNULL) as process:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                while probe.connect_ex(str(place)):  # which is there before anybody listens
                    assert process.poll() is None
            with blocking.open_store(f"unix://{place}") as store:
                store.put("k", b"x")
            standard = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
            assert not any(name.startswith(("socket", "anon_inode")) for name in standard)
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.returncode == 0


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("arguments", "code"), [("stat --url unix:///nothing", 3), ("ls --nonsense", 2)])
def test_an_error_that_cannot_be_told_has_its_exit_code_all_the_same(
    redirections: str, arguments: str, code: int
) -> None:
    ended = subprocess.run([*shell(redirections), *arguments.split()], check=False, stdin=subprocess.DEVNULL)
    assert ended.returncode == code
