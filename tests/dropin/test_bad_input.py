"""What cannot work gets one clear error, where the original crashed, hung, or went on
with something else.
"""

import asyncio
import mmap
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

import infinistore
from infinistore import TYPE_RDMA, TYPE_TCP, ClientConfig, InfinityConnection, InvalidRequest
from infinistore.dropin.registered_server import RegisteredServer
from tests.dropin.conftest import (
    Connect,
    config_for,
    connected,
    pointer,
    register,
    running_server,
    serving,
    write,
)
from tests.ports import own_ports
from tests.server.running import MIB
from tests.server.tenants_files import TOKENS, text_of
from tests.server.tenants_files import write as write_tenants


@pytest.fixture(scope="module")
def server() -> Iterator[RegisteredServer]:
    """By one path: what is wrong is refused before anything is sent."""
    with serving("shm") as running:
        yield running


@pytest.fixture
def memory(connection: InfinityConnection) -> bytearray:
    """Memory that is registered."""
    return register(connection, bytearray(b"v" * 100_000))


async def call(connection: InfinityConnection, method: str, *arguments: Any) -> Any:
    return await getattr(connection, method)(*arguments)


METHODS = ["rdma_write_cache_async", "rdma_read_cache_async"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([], 100), "no blocks"),
        ((None, 100), "pairs"),
        (([("key",)], 100), "pairs"),
        ((["key"], 100), "pairs"),
        (([("", 0)], 100), "empty"),
        (([(b"key", 0)], 100), "bytes, not text"),
        (([("key\0", 0)], 100), "NUL"),
        (([("k" * 2000, 0)], 100), "2000 bytes"),
        (([("key", "0")], 100), "an offset must be a whole number"),
        (([("key", None)], 100), "an offset must be a whole number"),
        (([("key", -1)], 100), "0 or more"),
        (([("key", 100_000)], 100), "not inside the memory"),
        (([("key", 1 << 70)], 100), "not inside the memory"),
        (([("key", 0)], 0), "at least 1 byte"),
        (([("key", 0)], -4096), "at least 1 byte"),
        (([("key", 0)], 1.5), "whole number"),
        (([("key", 0)], None), "whole number"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(
    connection: InfinityConnection, memory: bytearray, method: str, arguments: tuple[Any, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        asyncio.run(call(connection, method, *arguments, pointer(memory)))

    assert memory == b"v" * len(memory)


@pytest.mark.parametrize("block_size", [100_001, 1 << 40, 1 << 70])
def test_a_write_beyond_the_memory_is_refused(
    connection: InfinityConnection, memory: bytearray, block_size: int
) -> None:
    with pytest.raises(InvalidRequest, match="not inside the memory"):
        write(connection, [("key", 0)], block_size, memory)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ptr", "problem"), [(0, "null"), (-1, "ptr is -1"), ("x", "whole number"), (1 << 70, "no mem")]
)
def test_a_pointer_that_is_none_is_refused(connection: InfinityConnection, method: str, ptr: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        asyncio.run(call(connection, method, [("key", 0)], 100, ptr))


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_was_not_registered_is_refused(
    connection: InfinityConnection, memory: bytearray, method: str
) -> None:
    other = bytearray(100)

    with pytest.raises(InvalidRequest, match="call register_mr"):
        asyncio.run(call(connection, method, [("key", 0)], 100, pointer(other)))


def test_memory_in_the_middle_of_what_was_registered_will_do(connection: InfinityConnection, memory: bytearray) -> None:
    middle = pointer(memory) + 50_000

    async def run() -> None:
        await connection.rdma_write_cache_async([("key", 0)], 50_000, middle)
        with pytest.raises(InvalidRequest, match="not inside the memory"):
            await connection.rdma_write_cache_async([("key", 0)], 50_001, middle)

    asyncio.run(run())


def test_what_a_closed_connection_knew_of_memory_is_forgotten(
    connection: InfinityConnection, memory: bytearray
) -> None:
    connection.close()
    connection.connect()

    with pytest.raises(InvalidRequest, match="call register_mr"):
        write(connection, [("key", 0)], 100, memory)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 100), "null"),
        ((-5, 100), "ptr is -5"),
        ((4096, 0), "at least 1 byte"),
        ((4096, -1), "at least 1 byte"),
        ((4096, 1 << 63), "no memory has"),
        ((4096, "x"), "whole number"),
        ((4096,), "give the size"),
        ((8, 100), "not memory of this process"),
        ((None, 100), "takes an address"),
        ((b"read-only",), "takes an address"),
        ((bytearray(10), 11), "has 10 bytes, not 11"),
        ((bytearray(10), 0), "at least 1 byte"),
    ],
)
def test_memory_that_cannot_be_registered_is_refused(
    connection: InfinityConnection, arguments: tuple[Any, ...], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        connection.register_mr(*arguments)


def test_a_tensor_that_is_not_contiguous_is_refused(connection: InfinityConnection) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidRequest, match="not contiguous"):
        connection.register_mr(torch.zeros(4, 4).t())


def test_memory_that_ends_too_early_or_cannot_be_written_is_refused(connection: InfinityConnection) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    address = int(numpy.frombuffer(page, numpy.uint8).ctypes.data)
    with pytest.raises(InvalidRequest, match="cannot be written"):
        connection.register_mr(address, mmap.PAGESIZE)
    memory = bytearray(MIB)
    with pytest.raises(InvalidRequest, match=r"not memory of this process|cannot be written"):
        connection.register_mr(pointer(memory), 1 << 46)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", 4096, 10), "empty"),
        ((None, 4096, 10), "not text"),
        (("key", 0, 10), "null"),
        (("key", 4096, 0), "at least 1 byte"),
        (("key", 4096, -1), "at least 1 byte"),
        (("key", 4096, 10), "not memory of this process"),
        (("key", 1 << 62, 1 << 62), "no memory has"),
    ],
)
def test_a_write_by_tcp_of_what_is_not_there_is_refused(
    connection: InfinityConnection, arguments: tuple[Any, ...], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        connection.tcp_write_cache(*arguments)


@pytest.mark.parametrize("keys", ["key", None, [None], [""], ["a", 5]])
@pytest.mark.parametrize("method", ["get_match_last_index", "delete_keys"])
def test_keys_that_are_none_are_refused(connection: InfinityConnection, method: str, keys: Any) -> None:
    with pytest.raises(InvalidRequest):
        getattr(connection, method)(keys)


@pytest.mark.parametrize("key", ["", None, 5, "k" * 2000])
@pytest.mark.parametrize("method", ["check_exist", "tcp_read_cache"])
def test_a_key_that_is_none_is_refused(connection: InfinityConnection, method: str, key: Any) -> None:
    with pytest.raises(InvalidRequest):
        getattr(connection, method)(key)


def test_a_value_larger_than_the_pool_is_refused_and_the_connection_goes_on(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(20 * MIB))

    with pytest.raises((infinistore.OutOfMemory, infinistore.ValueTooLarge)):
        write(connection, [("key", 0)], len(memory), memory)
    with pytest.raises((infinistore.OutOfMemory, infinistore.ValueTooLarge)):
        connection.tcp_write_cache("key", pointer(memory), len(memory))

    assert connection.check_exist("key") is False
    assert write(connection, [("key", 0)], 1000, memory) == 200


def test_methods_for_rdma_are_refused_on_a_connection_of_type_tcp(connect: Connect) -> None:
    connection = connect(TYPE_TCP)
    memory = bytearray(100)

    with pytest.raises(infinistore.InfiniStoreException, match="TYPE_RDMA"):
        connection.register_mr(pointer(memory), 100)
    for method in METHODS:
        with pytest.raises(infinistore.InfiniStoreException, match="TYPE_RDMA"):
            asyncio.run(call(connection, method, [("key", 0)], 100, pointer(memory)))


def test_calls_before_connecting_are_refused(config: ClientConfig) -> None:
    connection = InfinityConnection(config)

    for method, arguments in [
        ("check_exist", ("key",)),
        ("get_match_last_index", (["key"],)),
        ("delete_keys", (["key"],)),
        ("tcp_read_cache", ("key",)),
        ("tcp_write_cache", ("key", 4096, 1)),
        ("register_mr", (4096, 1)),
    ]:
        with pytest.raises(infinistore.StoreUnavailable, match=r"call connect\(\)"):
            getattr(connection, method)(*arguments)
    for method in METHODS:
        with pytest.raises(infinistore.StoreUnavailable, match=r"call connect\(\)"):
            asyncio.run(call(connection, method, [("key", 0)], 100, 4096))


@pytest.mark.parametrize("kind", [TYPE_RDMA, TYPE_TCP])
def test_a_store_that_is_down_is_one_error(kind: str) -> None:
    (port,) = own_ports(1)
    connection = InfinityConnection(config_for(port, kind))

    with pytest.raises(infinistore.StoreUnavailable, match=f"127.0.0.1:{port}"):
        connection.connect()
    with pytest.raises(infinistore.StoreUnavailable, match=f"127.0.0.1:{port}"):
        asyncio.run(connection.connect_async())

    assert not connection.rdma_connected
    connection.close()


def test_a_host_that_does_not_exist_is_one_error() -> None:
    connection = InfinityConnection(config_for(1, host_addr="no-such-host.invalid"))

    with pytest.raises(infinistore.StoreUnavailable, match="no-such-host"):
        connection.connect()


@pytest.fixture
def stranger() -> Iterator[tuple[int, list[bytes]]]:
    """Something else that listens; it answers with the bytes in the list, and
    closes.
    """
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(answers[0])

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1], answers
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", infinistore.ProtocolError),
        (b"INFS\x63" + bytes(64), infinistore.InfiniStoreException),
    ],
)
def test_a_server_of_another_kind_or_version_is_one_error(
    stranger: tuple[int, list[bytes]], answer: bytes, error: type[Exception]
) -> None:
    port, answers = stranger
    answers.append(answer)
    connection = InfinityConnection(config_for(port))

    with pytest.raises(error):
        connection.connect()
    with pytest.raises(error):
        asyncio.run(connection.connect_async())


def test_a_token_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    with running_server(token_file=token_file) as server:
        port = server.addresses.port
        with pytest.raises(infinistore.AuthenticationFailed):
            InfinityConnection(config_for(port)).connect()
        monkeypatch.setenv("INFINISTORE_TOKEN", "secret")
        with connected(port) as connection:
            assert connection.check_exist("key") is False


def test_a_tenant_with_the_usual_roles_may_do_all_that_engines_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `monitor`, it does not hear how it is connected."""
    tenants = write_tenants(tmp_path, text_of(ann={"roles": "[read, write]"}))
    monkeypatch.setenv("INFINISTORE_TOKEN", TOKENS["ann"])
    with running_server(tenants=tenants) as server, connected(server.addresses.port) as connection:
        memory = register(connection, bytearray(b"v" * 1000))
        write(connection, [("key", 0)], len(memory), memory)
        assert connection.check_exist("key") is True
        with InfinityConnection(config_for(server.addresses.port)) as other:
            asyncio.run(other.connect_async())


def test_a_server_that_was_restarted_is_found_again_and_one_that_is_lost_is_one_error(
    tmp_path: Path,
) -> None:
    (port,) = own_ports(1)
    serve = partial(running_server, service_port=port, unix_socket=str(tmp_path / "s"))
    with InfinityConnection(config_for(port)) as connection:
        with serve():
            connection.connect()
            memory = register(connection, bytearray(b"v" * 200_000))
            write(connection, [("key", 0)], len(memory), memory)
        with serve():
            assert connection.check_exist("key") is False
            write(connection, [("key", 0)], len(memory), memory)
            assert connection.check_exist("key") is True
        with pytest.raises(infinistore.StoreUnavailable):
            connection.check_exist("key")
        with pytest.raises(infinistore.StoreUnavailable):
            write(connection, [("key", 0)], len(memory), memory)
        with pytest.raises(infinistore.StoreUnavailable):
            connection.reconnect()
        with serve():
            connection.reconnect()  # finds it at once
            write(connection, [("key", 0)], len(memory), memory)
            assert connection.check_exist("key") is True
