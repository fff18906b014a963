"""A server inside the caller's process, and the functions that ask it."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

import infinistore
from infinistore import TYPE_TCP, InfinityConnection
from infinistore.dropin.registered_server import RegisteredServer
from tests import warm
from tests.dropin.conftest import config_for, connected, pointer
from tests.server.running import KIB, MIB, make_config

NEW_LOOPS: list[Callable[[], Any]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def server() -> Iterator[RegisteredServer]:
    server = infinistore.register_server(None, make_config(prealloc_bytes=MIB))
    yield server
    server.stop()


def store_blocks(server: RegisteredServer, count: int, size: int) -> None:
    memory = bytearray(size)
    with connected(server.addresses.port, TYPE_TCP) as connection:
        for number in range(count):
            connection.tcp_write_cache(f"key{number}", pointer(memory), size)


@pytest.mark.parametrize("new_loop", NEW_LOOPS)
def test_a_program_that_serves_in_its_own_loop(new_loop: Callable[[], Any]) -> None:
    loop = new_loop()
    server = infinistore.register_server(loop, make_config(prealloc_bytes=MIB))

    async def use() -> None:
        connection = InfinityConnection(config_for(server.addresses.port))
        await connection.connect_async()
        memory = bytearray(100)
        connection.register_mr(memory)
        await connection.rdma_write_cache_async([("a", 0), ("b", 50)], 50, pointer(memory))
        assert infinistore.get_kvmap_len() == 2
        assert infinistore.purge_kv_map() == 2
        assert infinistore.get_kvmap_len() == 0
        connection.close()

    loop.run_until_complete(use())
    loop.close()
    server.stop()
    server.stop()
    assert not server.running


def test_a_server_ends_with_the_loop_that_it_was_registered_with() -> None:
    loop = asyncio.new_event_loop()
    server = infinistore.register_server(loop, make_config(prealloc_bytes=MIB))
    loop.close()

    del loop
    gc.collect()

    server._thread.join()
    assert not server.running


def test_eviction_goes_down_to_the_lower_bound_once_the_upper_is_passed(server: RegisteredServer) -> None:
    store_blocks(server, 8, 100 * KIB)  # 800 of 1024 KiB

    assert infinistore.evict_cache(0.5, 0.9) == 0
    assert infinistore.evict_cache(0.5, 0.7) == 3
    assert infinistore.get_kvmap_len() == 5


@pytest.mark.parametrize("thresholds", [(0.8, 0.6), (0.5, 0.5), (-0.1, 0.5), (0.5, 1.1)])
def test_thresholds_that_make_no_sense_are_refused(server: RegisteredServer, thresholds: tuple[float, float]) -> None:
    with pytest.raises(infinistore.InvalidRequest, match="min_threshold must be less than"):
        infinistore.evict_cache(*thresholds)


@pytest.mark.parametrize(
    "function",
    [infinistore.get_kvmap_len, infinistore.purge_kv_map, lambda: infinistore.evict_cache(0.1, 0.2)],
)
def test_without_a_server_there_is_one_error(function: Callable[[], object]) -> None:
    with pytest.raises(infinistore.StoreUnavailable, match="call register_server"):
        function()


def test_a_port_in_use_is_one_error_and_leaves_the_other_server_alone(server: RegisteredServer) -> None:
    with pytest.raises(infinistore.ConfigError, match="--service-port"):
        infinistore.register_server(None, make_config(service_port=server.addresses.port))

    assert infinistore.get_kvmap_len() == 0


def test_a_server_that_wants_a_token_can_be_asked_all_the_same(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    server = infinistore.register_server(None, make_config(host="0.0.0.0", token_file=token_file))

    assert infinistore.get_kvmap_len() == 0

    server.stop()


def test_the_management_port_is_left_to_the_caller() -> None:
    server = infinistore.register_server(None, make_config(manage_port=18080))

    assert server.addresses.management == ()

    server.stop()


PROGRAM = """
import asyncio, infinistore
config = infinistore.ServerConfig(service_port=0, prealloc_size="1MiB", unix_socket={path!r})
loop = asyncio.new_event_loop()
infinistore.register_server(loop, config)
assert infinistore.get_kvmap_len() == 0
print("done")
"""


@pytest.mark.process
def test_a_program_that_leaves_its_server_alone_ends_and_tidies_up(tmp_path: Path) -> None:
    path = tmp_path / "s"
    program = PROGRAM.format(path=str(path))

    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not path.exists()


@pytest.mark.process
def test_the_module_of_the_server_is_a_command() -> None:
    command = [sys.executable, "-m", "infinistore.server", "--help"]

    done = warm.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0
    assert "--prealloc-size" in done.stdout
