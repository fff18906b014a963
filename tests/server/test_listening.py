"""Where a server listens, and who may already be there."""

import errno
import os
import socket
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
import trio.testing

from infinistore.errors import ConfigError, OutOfMemory
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Keys, Put, PutReply, Statistics, StatisticsReply
from infinistore.server import serve
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix, listen_tcp
from tests.server.other_users import connect_as, needs_root
from tests.server.running import KIB, Peer, make_config, peer_with, running_server, until


async def test_a_port_in_use_is_refused_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*in use.*--service-port"):
            await serve(make_config(service_port=port))


def test_a_port_that_is_free_at_one_address_of_a_name_only_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "127.0.0.2":
                tried.append(address[1])
                if len(tried) == 1:
                    raise OSError(errno.EADDRINUSE, "in use")
            super().bind(address)

    two = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{number}", 0)) for number in (1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *args, **options: two)
        patch.setattr(socket, "socket", Socket)
        listeners = listen_tcp("two", 0)
    assert len({listener.getsockname()[1] for listener in listeners}) == 1
    assert len(listeners) == len(set(tried)) == 2
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid", "..", "a" * 300])
async def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        await serve(make_config(host=host, insecure=True))


async def test_localhost_is_served_on_each_of_its_addresses_at_one_port() -> None:
    async with running_server(make_config(host="localhost")) as server:
        addresses = server.server.addresses
        assert {port for _, port in addresses.tcp} == {addresses.port}
        for host, port in addresses.tcp:
            await server.greet(await connect_tcp(host, port))


async def test_an_empty_host_listens_everywhere(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with running_server(make_config(host="0.0.0.0", token_file=tmp_path / "token")) as server:
        await peer_with(server, "secret")


# Unix sockets


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_only_this_user_may_open_the_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "socket"
    async with running_server(make_config(unix_socket=str(path))) as server:
        assert server.unix_path == path
        assert mode(path) == 0o600
        assert mode(path.parent) == 0o700
        peer = Peer(await connect_unix(str(path)))
        reply = await peer.hello()
        assert reply.unix_socket == str(path)
        assert isinstance(await peer.ask(Statistics()), StatisticsReply)
        peer.close()
    assert not path.exists()


async def test_what_a_dead_server_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with running_server(make_config(unix_socket=str(path))) as server:
        await server.local_peer()


async def test_the_socket_of_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with running_server(make_config(unix_socket=str(path))) as server:
        with pytest.raises(ConfigError, match="a server listens on"):
            await serve(make_config(unix_socket=str(path)))
        await server.local_peer()


async def test_a_draining_server_gives_its_socket_up_at_once_and_leaves_that_of_its_successor_alone(
    tmp_path: Path,
) -> None:
    config = make_config(unix_socket=str(tmp_path / "socket"), drain_timeout_s=3600)
    slow = Put(Keys(["slow", "too"]), pack_u64([500, 500]), checksums=False)
    async with running_server(config) as old:
        busy = await old.peer()
        await busy.send_head(slow, payload_bytes=1000)
        await old.until(reservations=1)
        old.server.drain()
        await until(lambda: not old.unix_path.exists())
        async with running_server(config) as new:
            await busy.send(bytes(1000))
            assert isinstance(await busy.reply_to_half(slow), PutReply)
            busy.close()
            await old.finished.wait()
            await trio.testing.wait_all_tasks_blocked()
            await new.local_peer()
        assert not new.unix_path.exists()


async def test_a_server_that_ends_removes_no_socket_but_its_own(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        async with running_server(make_config(unix_socket=str(path))):
            path.unlink()
            other.bind(str(path))
        assert path.is_socket()


@pytest.mark.parametrize(("access", "modes"), [("group", (0o750, 0o660)), ("all", (0o755, 0o666))])
async def test_others_may_open_the_unix_socket_where_they_are_let(
    access: str, modes: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "socket"
    async with running_server(make_config(unix_socket=str(path), unix_socket_access=access)):
        assert (mode(path.parent), mode(path)) == modes


OTHER_USER = 4321
OTHER_GROUP = 4322


@needs_root
async def test_the_members_of_another_group_may_open_the_unix_socket_and_nobody_else() -> None:
    with TemporaryDirectory() as folder:  # others do not get into the usual one
        os.chmod(folder, 0o755)
        path = Path(folder) / "folder" / "socket"
        config = make_config(unix_socket=str(path), unix_socket_access="group", unix_socket_group=str(OTHER_GROUP))
        async with running_server(config):
            assert (path.parent.stat().st_gid, path.stat().st_gid) == (OTHER_GROUP, OTHER_GROUP)
            assert (mode(path.parent), mode(path)) == (0o750, 0o660)
            connect_as(path, OTHER_USER, OTHER_GROUP).close()
            with pytest.raises(PermissionError):
                connect_as(path, OTHER_USER, OTHER_GROUP + 1)


@pytest.mark.parametrize(
    ("group", "problem"),
    [("no such group", "there is no such group"), (str(2**70), "no group has this number")],
)
async def test_a_group_that_does_not_exist_is_refused_and_leaves_no_socket(
    group: str, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    config = make_config(unix_socket=str(path), unix_socket_access="group", unix_socket_group=group)
    with pytest.raises(ConfigError, match=problem):
        await serve(config)
    assert not path.exists()


def make_insecure(folder: Path, how: str) -> None:
    """Make a folder that another user can change, or lead elsewhere."""
    if how.startswith("another user") and os.getuid():
        pytest.skip("only root can give files away")
    elsewhere = folder.parent / "elsewhere"
    if "link" in how:
        elsewhere.mkdir(0o700)
        folder.symlink_to(elsewhere)
    elif not how.startswith("to be made"):
        folder.mkdir(0o700)
    changed = {"a link to everybody's": elsewhere}.get(how, folder.parent if "in " in how else folder)
    if "everybody's" in how:
        changed.chmod(0o777)
    else:
        os.chown(changed, OTHER_USER, -1, follow_symlinks=False)


INSECURE = ["everybody's", "in everybody's", "to be made in everybody's", "another user's", "in another user's"]
INSECURE += ["another user's link", "a link to everybody's"]


@pytest.mark.parametrize("how", INSECURE)
async def test_a_folder_in_which_another_user_could_put_a_socket_is_refused(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "folder"
    folder.parent.mkdir()
    make_insecure(folder, how)
    with pytest.raises(ConfigError, match=r"--unix-socket: .*choose a path"):
        await serve(make_config(unix_socket=str(folder / "socket")))
    assert not (folder / "socket").exists()


@pytest.mark.parametrize("how", [*INSECURE, "readable", "a link", "a file"])
async def test_by_default_a_folder_that_is_not_private_blocks_no_start(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "infinistore"
    folder.parent.mkdir()
    if how == "readable":
        folder.mkdir()
        folder.chmod(0o755)
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        folder.touch()
    else:
        make_insecure(folder, how)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
    async with running_server(make_config(unix_socket="auto")) as server:
        assert folder not in server.unix_path.parents
        assert (mode(server.unix_path.parent), mode(server.unix_path)) == (0o700, 0o600)
        peer = Peer(await connect_unix(str(server.unix_path)))
        assert (await peer.hello()).unix_socket == str(server.unix_path)
        peer.close()
    assert not server.unix_path.parent.exists()
    assert "the folder of the Unix socket is not private" in caplog.text


async def test_by_default_a_private_folder_is_made_and_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for _ in range(2):
        async with running_server(make_config(unix_socket="auto")) as server:
            assert server.unix_path.parent == tmp_path / "infinistore"
            assert mode(server.unix_path.parent) == 0o700
    assert "not private" not in caplog.text


@pytest.mark.parametrize("how", ["a link", "sticky", "for all, and everybody's"])
async def test_a_folder_that_only_this_user_and_root_can_lead_elsewhere_is_taken(how: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if how == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to("elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o1777 if how == "sticky" else 0o777)
    access = "all" if how.startswith("for all") else "user"
    async with running_server(make_config(unix_socket=str(folder / "s"), unix_socket_access=access)) as server:
        assert server.unix_path.exists()


@pytest.mark.parametrize("what", ["file", "folder", "link"])
async def test_a_file_that_is_no_socket_is_left_alone(what: str, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    if what == "file":
        path.write_text("precious")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="--unix-socket"):
        await serve(make_config(unix_socket=str(path)))
    assert path.is_symlink() or path.exists()


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="--unix-socket"):
        await serve(make_config(unix_socket=str(tmp_path / "file" / "socket")))


async def test_a_server_that_cannot_start_leaves_neither_socket_nor_port(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with pytest.raises(OutOfMemory):
        await serve(make_config(unix_socket=str(path), prealloc_bytes=1 << 49, max_value_bytes=1 * KIB))
    assert not path.exists()
