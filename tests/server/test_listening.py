"""Where a server listens, and who may already be there."""

import socket
import stat
from pathlib import Path

import pytest
import trio

from infinistore.errors import ConfigError, OutOfMemory
from infinistore.protocol.messages import Statistics, StatisticsReply
from infinistore.server import serve
from infinistore.transports.sockets import connect_tcp, connect_unix
from tests.server.running import KIB, Peer, make_config, running_server


async def test_a_port_in_use_is_refused_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=f"port {port}.*in use.*--service-port")):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, make_config(service_port=port))


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid", "..", "a" * 300])
async def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="--host")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, make_config(host=host, insecure=True))


async def test_a_pool_larger_than_the_machine_is_refused_before_anybody_is_served() -> None:
    with pytest.RaisesGroup(OutOfMemory):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, make_config(prealloc_bytes=1 << 49, max_value_bytes=1 * KIB))


async def test_localhost_is_served_on_each_of_its_addresses_at_one_port() -> None:
    async with running_server(make_config(host="localhost")) as server:
        addresses = server.server.addresses
        assert {port for _, port in addresses.tcp} == {addresses.port}
        for host, port in addresses.tcp:
            peer = Peer(await connect_tcp(host, port))
            await peer.hello()
            peer.close()
        await server.quiet()


async def test_an_empty_host_listens_everywhere(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with running_server(make_config(host="0.0.0.0", token_file=tmp_path / "token")) as server:
        peer = Peer(await connect_tcp("127.0.0.1", server.server.addresses.port))
        await peer.hello("secret")
        peer.close()
        await server.quiet()


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
        await server.quiet()
    assert not path.exists()


async def test_what_a_dead_server_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with running_server(make_config(unix_socket=str(path))) as server:
        peer = Peer(await connect_unix(str(path)))
        await peer.hello()
        peer.close()
        await server.quiet()


async def test_the_socket_of_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with running_server(make_config(unix_socket=str(path))) as server:
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="a server listens on")):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, make_config(unix_socket=str(path)))
        peer = Peer(await connect_unix(str(path)))
        await peer.hello()
        peer.close()
        await server.quiet()


@pytest.mark.parametrize("what", ["file", "folder", "link"])
async def test_a_file_that_is_no_socket_is_left_alone(what: str, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    if what == "file":
        path.write_text("precious")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="--unix-socket")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, make_config(unix_socket=str(path)))
    assert path.is_symlink() or path.exists()


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="--unix-socket")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, make_config(unix_socket=str(tmp_path / "file" / "socket")))


async def test_a_server_that_cannot_start_leaves_neither_socket_nor_port(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with pytest.RaisesGroup(OutOfMemory):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                serve, make_config(unix_socket=str(path), prealloc_bytes=1 << 49, max_value_bytes=1 * KIB)
            )
    assert not path.exists()
