"""What a program of the original sees of a server, after the original's documents and
its own tests.
"""

import asyncio
import subprocess
import sys
import threading
import uuid
from typing import Any

import numpy
import pytest
import uvloop

import infinistore
from infinistore import TYPE_RDMA, TYPE_TCP, ClientConfig, InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests import warm
from tests.dropin.conftest import Connect, pointer, read, register, write

COUNT = 4096


def random_keys(count: int) -> list[str]:
    return [uuid.uuid4().hex for _ in range(count)]


def test_a_connection_of_type_rdma_takes_shared_memory_where_it_can_and_else_tcp(
    connection: InfinityConnection, server: RegisteredServer
) -> None:
    assert connection.rdma_connected
    assert connection.transport == ("shm" if server.addresses.unix_socket else "tcp")


def test_a_connection_of_type_tcp_takes_tcp(connect: Connect) -> None:
    connection = connect(TYPE_TCP)

    assert (connection.rdma_connected, connection.transport) == (False, "tcp")


@pytest.mark.parametrize(
    "make", [lambda: bytearray(64), lambda: numpy.zeros(8), lambda: pytest.importorskip("torch").zeros(2, 8)]
)
def test_memory_is_registered_by_its_object_as_by_its_address(connection: InfinityConnection, make: Any) -> None:
    memory: Any = make()
    array: Any = numpy.asarray(memory)
    view = memoryview(array).cast("B")
    view[:] = b"v" * 64

    assert connection.register_mr(memory) == 0
    write(connection, [("key", 0)], 64, view)
    view[:] = bytes(64)
    address: Any = numpy.uint64(pointer(view))
    size: Any = numpy.int32(64)
    assert connection.register_mr(address, size) == 0
    asyncio.run(connection.rdma_read_cache_async([("key", 0)], size, address))

    assert bytes(view) == b"v" * 64


def test_the_log_tells_how_the_bytes_go(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="infinistore.dropin"):
        connection = connect()
        connection.close()
        asyncio.run(connection.connect_async())
        connect(TYPE_TCP)

    url = f"127.0.0.1:{connection.config.service_port}"
    said = [record for record in caplog.records if record.name == "infinistore.dropin"]
    assert [(record.levelname, record.getMessage().partition(": ")[0]) for record in said] == [
        ("INFO", f"connected to infinistore://{url} by {connection.transport}"),
        ("INFO", f"connected to infinistore://{url} by {connection.transport}"),
        ("INFO", f"connected to tcp://{url} by tcp"),
    ]


def test_a_device_that_was_named_and_is_replaced_by_tcp_is_worth_a_warning(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(dev_name="mlx5_0")

    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (connection.transport == "tcp")
    assert all("by TCP, without the RDMA device mlx5_0: no RDMA: " in line for line in warned)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_one_connection_writes_another_reads(connect: Connect, new_loop: Any) -> None:
    writer, reader = connect(), connect()
    source = register(writer, numpy.arange(COUNT, dtype=numpy.float32))
    target = register(reader, numpy.zeros(COUNT, numpy.float32))
    size = source.nbytes

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(writer.rdma_write_cache_async([("key", 0)], size, pointer(source))) == 200
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(reader.rdma_read_cache_async([("key", 0)], size, pointer(target))) == 200

    assert numpy.array_equal(source, target)


def test_a_batch_is_written_and_read_at_offsets(connection: InfinityConnection) -> None:
    source = register(connection, numpy.arange(10 * COUNT, dtype=numpy.float32))
    target = register(connection, numpy.zeros(10 * COUNT, numpy.float32))
    for _ in range(3):
        target.fill(0)
        blocks = [(key, number * COUNT * 4) for number, key in enumerate(random_keys(10))]

        write(connection, blocks, COUNT * 4, source)
        read(connection, blocks, COUNT * 4, target)

        assert numpy.array_equal(source, target)


def test_many_clients_in_threads(connect: Connect) -> None:
    read_back: list[bool] = []

    def use(number: int) -> None:
        connection = connect()
        memory = register(connection, bytearray([number] * COUNT))
        write(connection, [(f"key{number}", 0)], COUNT, memory)
        memory[:] = bytes(COUNT)
        read(connection, [(f"key{number}", 0)], COUNT, memory)
        read_back.append(memory == bytes([number] * COUNT))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_back == [True] * 8


PROGRAM = """
import asyncio, ctypes, sys
import infinistore

config = infinistore.ClientConfig(
    host_addr="127.0.0.1", service_port=int(sys.argv[1]), connection_type=infinistore.TYPE_RDMA
)
source, target = bytearray(sys.argv[2].encode() * 100_000), bytearray(100_000)
source_ptr, target_ptr = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (source, target))
connection = infinistore.InfinityConnection(config)
connection.connect()
connection.register_mr(source_ptr, 100_000)
connection.register_mr(target_ptr, 100_000)
asyncio.run(connection.rdma_write_cache_async([(sys.argv[2], 0)], 100_000, source_ptr))
asyncio.run(connection.rdma_read_cache_async([(sys.argv[2], 0)], 100_000, target_ptr))
assert source == target
"""


@pytest.mark.process
@pytest.mark.parametrize("server", ["shm"], indirect=True)
def test_many_clients_in_processes(config: ClientConfig) -> None:
    """They do not close their connections either."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(config.service_port)]

    processes = [warm.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "ab"]
    ends = [(process.communicate()[1], process.returncode) for process in processes]

    assert ends == [("", 0), ("", 0)]


FORK = """
import os, sys
import infinistore

config = infinistore.ClientConfig(
    host_addr="127.0.0.1", service_port=int(sys.argv[1]), connection_type=infinistore.TYPE_RDMA
)
connection = infinistore.InfinityConnection(config)
connection.connect()
child = os.fork()
if not child:
    try:
        connection.check_exist("key")
    except infinistore.StoreUnavailable:
        pass
    connection.reconnect()
    assert connection.check_exist("key") is False
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert connection.check_exist("key") is False
assert not {"torch", "numpy"} & sys.modules.keys()
"""


@pytest.mark.process
@pytest.mark.parametrize("server", ["shm"], indirect=True)
def test_a_forked_child_reconnects_and_its_parent_goes_on(config: ClientConfig) -> None:
    command = [sys.executable, "-W", "error", "-c", FORK, str(config.service_port)]

    done = warm.run(command, cold=True, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_last_match_is_the_highest_index_that_is_there(connection: InfinityConnection) -> None:
    source = register(connection, bytearray(3072))
    write(connection, [("key1", 0), ("key2", 1024), ("key3", 2048)], 1024, source)

    assert connection.get_match_last_index(["A", "B", "C", "key1", "D", "E"]) == 3
    assert connection.get_match_last_index(["key1", "A", "key2", "B"]) == 2
    assert connection.get_match_last_index(["key3"]) == 0


@pytest.mark.parametrize("keys", [["A", "B"], []])
def test_no_match_is_an_error(connection: InfinityConnection, keys: list[str]) -> None:
    with pytest.raises(infinistore.InfiniStoreException, match="can't find a match"):
        connection.get_match_last_index(keys)


def test_a_batch_with_a_missing_key_is_an_error_of_its_own_and_is_not_read_at_all(
    connection: InfinityConnection,
) -> None:
    memory = register(connection, bytearray(b"x" * 200_000))
    write(connection, [("there", 0)], 100_000, memory)
    memory[:] = bytes(len(memory))

    with pytest.raises(infinistore.InfiniStoreKeyNotFound, match=r"1 of 2 keys.*'missing'"):
        read(connection, [("there", 0), ("missing", 100_000)], 100_000, memory)
    with pytest.raises(infinistore.InfiniStoreKeyNotFound):
        read(connection, [("missing", 0)], 100_000, memory)

    assert not any(memory)


@pytest.mark.parametrize("size", [4096, 400_000])
def test_a_value_larger_than_the_block_size_is_an_error_and_nothing_is_read(
    connection: InfinityConnection, size: int
) -> None:
    memory = register(connection, bytearray(b"x" * size))
    write(connection, [("key", 0)], size, memory)
    memory[:] = bytes(size)

    with pytest.raises(infinistore.BufferTooSmall):
        read(connection, [("key", 0)], size - 1, memory)

    assert not any(memory)


@pytest.mark.parametrize("stored", [1, 1000, 300_000])
def test_a_value_smaller_than_the_block_size_leaves_the_rest_as_it_is(
    connection: InfinityConnection, stored: int
) -> None:
    memory = register(connection, bytearray(b"v" * 500_000))
    write(connection, [("key", 0)], stored, memory)
    memory[:] = b"r" * len(memory)

    read(connection, [("key", 0)], len(memory), memory)

    assert memory == b"v" * stored + b"r" * (len(memory) - stored)


def test_a_block_size_that_reaches_beyond_the_memory_will_do_if_the_value_fits(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"v" * 5000))
    write(connection, [("key", 0)], 1000, memory)

    read(connection, [("key", 4000)], 40 << 20, memory)
    with pytest.raises(infinistore.BufferTooSmall):
        read(connection, [("key", 4001)], 40 << 20, memory)


def test_a_write_replaces_what_was_there(connection: InfinityConnection) -> None:
    source = register(connection, bytearray(b"a" * 100 + b"b" * 50))
    target = register(connection, bytearray(200))

    write(connection, [("key", 0)], 100, source)
    write(connection, [("key", 100)], 50, source)
    read(connection, [("key", 0)], 200, target)

    assert target == b"b" * 50 + bytes(150)


def test_of_a_key_that_is_written_twice_in_a_batch_the_last_block_counts(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"a" * 100 + b"b" * 100))

    write(connection, [("key", 0), ("key", 100)], 100, memory)
    read(connection, [("key", 0)], 100, memory)

    assert memory == b"b" * 200


def test_deleting_tells_how_many_keys_were_there(connection: InfinityConnection) -> None:
    source = register(connection, bytearray(3072))
    keys = random_keys(3)
    write(connection, [(key, number * 1024) for number, key in enumerate(keys)], 1024, source)

    assert connection.delete_keys([keys[0], "missing", keys[2]]) == 2

    assert [connection.check_exist(key) for key in keys] == [False, True, False]
    assert connection.delete_keys([]) == 0


@pytest.mark.parametrize("kind", [TYPE_RDMA, TYPE_TCP])
@pytest.mark.parametrize("size", [1, 256 * 1024])
def test_a_value_is_written_and_read_by_tcp_calls(connect: Connect, kind: str, size: int) -> None:
    connection = connect(kind)
    for salt in (200, 100):
        source = bytearray(number % salt for number in range(size))

        assert connection.tcp_write_cache("key", pointer(source), len(source)) is None  # type: ignore[func-returns-value]
        value = connection.tcp_read_cache("key")

        assert isinstance(value, numpy.ndarray)
        assert (value.dtype, value.shape, value.flags.writeable) == (numpy.uint8, (size,), True)
        assert bytes(value) == bytes(source)


def test_a_missing_key_is_none_for_the_tcp_calls(connect: Connect) -> None:
    assert connect(TYPE_TCP).tcp_read_cache("missing") is None


def test_a_connection_made_in_a_loop_serves_others(config: ClientConfig) -> None:
    memory = bytearray(b"v" * 100_000)

    async def run() -> None:
        connection = InfinityConnection(config)
        await connection.connect_async()
        await asyncio.to_thread(connection.register_mr, pointer(memory), len(memory))
        await connection.rdma_write_cache_async([("key", 0)], len(memory), pointer(memory))
        assert await asyncio.to_thread(connection.check_exist, "key")
        connection.close()

    asyncio.run(run())
    asyncio.run(run())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_loop_may_run_in_another_thread_than_the_one_that_connected(
    connection: InfinityConnection, new_loop: Any
) -> None:
    memory = register(connection, bytearray(b"v" * 300_000))
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        for number in range(10):
            key = f"key{number}"
            call = connection.rdma_write_cache_async([(key, 0)], len(memory), pointer(memory))
            asyncio.run_coroutine_threadsafe(call, loop).result()
            assert connection.check_exist(key)
            call = connection.rdma_read_cache_async([(key, 0)], len(memory), pointer(memory))
            assert asyncio.run_coroutine_threadsafe(call, loop).result() == 200
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_look_ups_from_threads_go_on_while_blocks_move_in_a_loop(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"v" * 1_000_000))
    write(connection, [("there", 0)], len(memory), memory)
    stop = threading.Event()
    answers: set[tuple[bool, bool, int]] = set()

    def look_up() -> None:
        while True:
            found = connection.check_exist("there"), connection.check_exist("missing")
            answers.add((*found, connection.get_match_last_index(["there", "missing"])))
            if stop.is_set():
                return

    async def move() -> None:
        for number in range(10):
            blocks = [(f"key{number}", 0)]
            await connection.rdma_write_cache_async(blocks, len(memory), pointer(memory))
            await connection.rdma_read_cache_async(blocks, len(memory), pointer(memory))

    threads = [threading.Thread(target=look_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(move())
    stop.set()
    for thread in threads:
        thread.join()
    assert answers == {(True, False, 0)}


def test_closing_can_be_repeated_and_a_closed_connection_can_be_opened_again(connection: InfinityConnection) -> None:
    connection.close()
    connection.close()
    assert not connection.rdma_connected
    with pytest.raises(infinistore.StoreUnavailable, match="call connect"):
        connection.check_exist("key")

    connection.connect()

    assert connection.check_exist("key") is False


def test_a_connection_that_is_dropped_is_closed(config: ClientConfig, server: RegisteredServer) -> None:
    connection = InfinityConnection(config)
    connection.connect()
    store = connection._stores
    assert store is not None

    del connection

    with pytest.raises(infinistore.StoreUnavailable, match="closed"):
        store.blocking.exists("key")


def test_reconnecting_keeps_what_was_registered(connection: InfinityConnection) -> None:
    memory = register(connection, bytearray(b"v" * 100))

    connection.reconnect()

    assert write(connection, [("key", 0)], 100, memory) == 200


def test_connecting_twice_is_an_error_and_harms_nothing(connection: InfinityConnection) -> None:
    with pytest.raises(infinistore.InfiniStoreException, match="already connected"):
        connection.connect()
    with pytest.raises(infinistore.InfiniStoreException, match="already connected"):
        asyncio.run(connection.connect_async())

    assert connection.check_exist("key") is False
