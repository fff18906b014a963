"""What the original's tests and examples do that `test_connection.py` does not: blocks
by descriptor, many writes at once, and the two commands of its README.
"""

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from typing import Any, TypeAlias

import numpy
import pytest

import infinistore
from infinistore import Desc, InfinityConnection
from tests import warm
from tests.dropin.conftest import Connect, pointer, register
from tests.dropin.test_connection import random_keys
from tests.ports import own_ports

Array: TypeAlias = "numpy.ndarray[Any, Any]"


def blocks_of(connection: InfinityConnection, *sizes: int, fill: int = 0) -> list[Array]:
    return [register(connection, numpy.full(size, fill + number, numpy.uint8)) for number, size in enumerate(sizes)]


def descriptors(keys: list[str], arrays: list[Array]) -> list[Desc]:
    return [Desc(key, array.ctypes.data, array.nbytes) for key, array in zip(keys, arrays, strict=True)]


def write(connection: InfinityConnection, blocks: Any) -> list[int]:
    return asyncio.run(connection.rdma_write_cache_async2(blocks))


def read(connection: InfinityConnection, blocks: Any) -> list[int]:
    return asyncio.run(connection.rdma_read_cache_async2(blocks))


def test_blocks_of_mixed_sizes_go_by_descriptors(connect: Connect) -> None:
    writer, reader = connect(), connect()
    keys, sizes = random_keys(3), (1024, 2048, 300_000)
    sources, targets = blocks_of(writer, *sizes, fill=7), blocks_of(reader, *sizes)

    assert write(writer, descriptors(keys, sources)) == [0, 0, 0]
    assert read(reader, descriptors(keys, targets)) == [0, 0, 0]

    assert all(numpy.array_equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_parts_of_one_registered_memory_go_by_descriptors(connection: InfinityConnection) -> None:
    source, target = (register(connection, numpy.arange(start, start + 10 * 512)) for start in (0, 9))
    for _ in range(3):
        keys, size = random_keys(10), 512 * 8
        write(connection, [Desc(key, source.ctypes.data + i * size, size) for i, key in enumerate(keys)])
        read(connection, [(key, target.ctypes.data + i * size, size) for i, key in enumerate(keys)])  # also as tuples
        assert numpy.array_equal(source, target)


def test_a_missing_block_is_told_by_its_place_and_the_others_are_read(connection: InfinityConnection) -> None:
    [source], targets = blocks_of(connection, 4096, fill=5), blocks_of(connection, 4096, 4096)
    write(connection, [Desc("there", source.ctypes.data, 4096)])

    assert read(connection, descriptors(["missing", "there"], targets)) == [-1, 0]

    assert [int(target[0]) for target in targets] == [0, 5]


def test_a_value_that_does_not_fit_its_descriptor_is_an_error_and_nothing_is_read(
    connection: InfinityConnection,
) -> None:
    [source], [target] = blocks_of(connection, 4096, fill=5), blocks_of(connection, 4096)
    write(connection, [Desc("key", source.ctypes.data, 4096)])

    with pytest.raises(infinistore.BufferTooSmall):
        read(connection, [Desc("key", target.ctypes.data, 4095)])

    assert not target.any()


@pytest.mark.parametrize("method", ["rdma_write_cache_async2", "rdma_read_cache_async2"])
@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        (lambda ptr: [], "there are no blocks"),
        (lambda ptr: 3, r"a list of Desc\(key, ptr, size\)"),
        (lambda ptr: [("key", ptr)], r"a list of Desc\(key, ptr, size\)"),
        (lambda ptr: [Desc("", ptr, 8)], "key"),
        (lambda ptr: [Desc("key", ptr, 0)], "the size of a block must be at least 1 byte, not 0"),
        (lambda ptr: [("key", "ptr", 8)], "ptr must be a whole number, not str"),
        (lambda ptr: [Desc("key", ptr, 8), Desc("other", 4096, 8)], "not registered"),
    ],
)
def test_descriptors_that_make_no_sense_are_refused(
    connection: InfinityConnection, method: str, blocks: Any, problem: str
) -> None:
    [memory] = blocks_of(connection, 4096)

    with pytest.raises(infinistore.InvalidRequest, match=problem):
        asyncio.run(getattr(connection, method)(blocks(memory.ctypes.data)))

    assert connection.check_exist("key") is False


def test_a_write_beyond_the_registered_memory_is_refused(connection: InfinityConnection) -> None:
    [memory] = blocks_of(connection, 4096)

    with pytest.raises(infinistore.InvalidRequest, match="memory"):
        write(connection, [Desc("key", memory.ctypes.data + 4000, 97)])


def test_a_thousand_writes_and_reads_at_once(connection: InfinityConnection) -> None:
    """Each of one block, as in the original's example for asyncio."""
    source, target = register(connection, bytearray(b"s" * 8192)), register(connection, bytearray(8192))
    keys = random_keys(1000)

    async def move() -> set[int]:
        written = [connection.rdma_write_cache_async([(key, 0)], len(source), pointer(source)) for key in keys]
        done = set(await asyncio.gather(*written))
        reads = [connection.rdma_read_cache_async([(key, 0)], len(target), pointer(target)) for key in keys]
        return done | set(await asyncio.gather(*reads))

    assert asyncio.run(move()) == {200}
    assert target == source


@pytest.mark.process
def test_a_server_started_as_the_originals_readme_says_passes_its_own_test() -> None:
    """`infinistore --manage-port 8088`, then `curl http://127.0.0.1:8088/selftest`."""
    service, management = own_ports(2)
    command = [sys.executable, "-P", "-m", "infinistore", "--manage-port", str(management)]
    # What the README leaves to the defaults would take the machine's ports and memory.
    command += ["--service-port", str(service), "--prealloc-size", "16MiB", "--unix-socket", "off"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert re.search(rf"http://127\.0\.0\.1:{management}", server.stdout.readline())
            with urllib.request.urlopen(f"http://127.0.0.1:{management}/selftest", timeout=60) as answer:
                assert answer.status == 200
                assert json.loads(answer.read())
        finally:
            server.terminate()
