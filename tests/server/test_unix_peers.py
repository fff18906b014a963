"""Who has connected to a Unix socket is looked at, however its mode was changed."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infinistore.access.identity import UnixAccess
from infinistore.errors import AuthenticationFailed
from infinistore.server.listeners import open_listeners
from infinistore.transports.sockets.trio_streams import SocketStream
from tests.server.other_users import connect_as, needs_root
from tests.server.running import Peer, make_config, running_server

USER, GROUP, STRANGE_GROUP = 4321, 4322, 4323


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket in a folder that everybody can enter, unlike those of pytest."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder) / "socket"


@needs_root
@pytest.mark.parametrize(
    ("access", "gid", "groups", "lets_in"),
    [
        ("user", USER, (GROUP,), False),
        ("group", GROUP, (), True),
        ("group", USER, (STRANGE_GROUP, GROUP), True),
        ("group", USER, (STRANGE_GROUP,), False),
        ("all", USER, (), True),
    ],
)
async def test_the_settings_hold_for_a_socket_whose_mode_somebody_has_changed(
    access: str, gid: int, groups: tuple[int, ...], lets_in: bool, path: Path
) -> None:
    settings = {"unix_socket_group": str(GROUP)} if access == "group" else {}
    log = path.with_name("audit")
    config = make_config(unix_socket=str(path), unix_socket_access=access, audit_log=str(log), **settings)
    async with running_server(config) as server:
        os.chmod(path, 0o666)
        os.chown(path, -1, STRANGE_GROUP)
        sock = connect_as(path, USER, gid, groups)
        sock.setblocking(False)
        peer = Peer(SocketStream(sock))
        if lets_in:
            await peer.hello()
        else:
            with pytest.raises(AuthenticationFailed, match=f"and user {USER} has connected") as refused:
                await peer.hello()
            assert "\n" not in str(refused.value)
        peer.close()
        await server.peer()  # who comes by TCP is not asked
    (event,) = [found for line in log.read_text().splitlines() if "uid" in (found := json.loads(line))["origin"]]
    assert event["event"] == ("login" if lets_in else "refused")
    assert event["origin"].startswith(f"uid {USER}, pid ")
    assert lets_in or event["reason"].startswith("AuthenticationFailed: this Unix socket is for user 0")


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_socket_that_was_given_lets_in_whom_its_mode_lets_in(mode: int, tmp_path: Path) -> None:
    """The service manager has chosen it, and not the settings."""
    path = tmp_path / "given"
    with socket.socket(socket.AF_UNIX) as given, ExitStack() as resources:
        given.bind(str(path))
        given.listen()
        path.chmod(mode)
        opened = open_listeners(make_config(unix_socket=str(tmp_path / "other")), resources, given=[given])
        assert opened.addresses.unix_access == UnixAccess(os.getuid(), path.stat().st_gid, mode)


def test_a_given_socket_without_a_path_in_sight_is_left_to_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "given"
    with socket.socket(socket.AF_UNIX) as given, ExitStack() as resources:
        given.bind(str(path))
        given.listen()
        path.unlink()
        opened = open_listeners(make_config(unix_socket=str(path)), resources, given=[given])
        assert opened.addresses.unix_access is None
