"""A server that a simulation buggifies: slower, poorer, and still right."""

from pathlib import Path
from random import Random
from unittest.mock import create_autospec

import pytest

import infinistore
from infinistore.errors import OutOfMemory
from infinistore.server.environment import Environment
from infinistore.transports.base import ReactingStream, Stream, can_react
from tests.server.running import KIB, MIB, make_config, running_server
from tests.simulation.buggify import BuggifiedStream, Buggify, Point, buggified

VALUES = {f"{number}/{'x' * 200}": bytes([number]) * 30 * KIB for number in range(40)}
STREAMS = {Point.SHORT_SEND, Point.SLOW_SEND, Point.SHORT_RECEIVE, Point.SLOW_SESSION}


async def serve_everything(
    folder: Path, points: set[Point], chance: float, until_fired: set[Point] | None = None
) -> Buggify:
    """Put and get over a Unix socket, with shared memory and without, until all points
    have fired, or these; return what fired.
    """
    buggify = Buggify(Random(3), dict.fromkeys(points, chance))
    config = make_config(unix_socket=f"{folder}/socket", manage_port=None, prealloc_bytes=32 * MIB)
    async with running_server(config, buggified(Environment(), buggify)) as server:
        while not buggify.fired.keys() >= (until_fired or points):
            for scheme in ("unix", "shm"):
                async with infinistore.open_store(f"{scheme}://{server.unix_path}", inline_bytes=0) as store:
                    for _ in range(3):
                        await store.put_many(VALUES)
                        found = [bytes(value or b"") for value in await store.get_many(list(VALUES))]
                        assert found == list(VALUES.values())
                        assert await store.delete(list(VALUES)) == len(VALUES)
    return buggify


async def test_streams_that_move_little_and_wait_lose_nothing(tmp_path: Path) -> None:
    points = STREAMS | {Point.SHORT_READ_AHEAD, Point.FULL_BODY_BUDGET}
    assert (await serve_everything(tmp_path, points, 0.5, STREAMS)).fired.keys() >= STREAMS
    always = await serve_everything(tmp_path, {Point.SHORT_READ_AHEAD, Point.FULL_BODY_BUDGET}, 1.0)
    assert always.fired.keys() == {Point.SHORT_READ_AHEAD, Point.FULL_BODY_BUDGET}


def test_a_stream_that_is_slow_reacts_if_it_is_told_by_its_methods_alone() -> None:
    """`isinstance` has no eye for what `__getattr__` finds, from Python 3.12 on."""
    assert can_react(BuggifiedStream(create_autospec(ReactingStream, instance=True), Buggify(Random(1), {})))
    assert not can_react(create_autospec(Stream, instance=True))


async def test_blocks_are_read_right_when_everything_collides_and_little_is_granted(tmp_path: Path) -> None:
    points = {Point.REMOVAL_COLLISION, Point.PREPARE_REFUSED, Point.SHORT_ANSWER}
    assert (await serve_everything(tmp_path, points, 0.7)).fired.keys() == points


async def test_clients_can_do_without_tables_and_spare_space_and_wait_for_threads(tmp_path: Path) -> None:
    points = {Point.TABLES_REFUSED, Point.SPARE_REFUSED, Point.SLOW_THREAD}
    assert (await serve_everything(tmp_path, points, 1.0)).fired.keys() == points


async def test_a_server_whose_growth_is_refused_serves_with_what_it_has(tmp_path: Path) -> None:
    buggify = Buggify(Random(3), {Point.GROWTH_REFUSED: 1.0})
    config = make_config(auto_increase=True, max_pool_bytes=16 * MIB, manage_port=None)
    async with (
        running_server(config, buggified(Environment(), buggify)) as server,
        infinistore.open_store(server.url) as store,
    ):
        with pytest.raises(OutOfMemory):
            await store.put("too large", bytes(8 * MIB))
        await store.put("a", b"value")
        assert await store.get("a") == b"value"
        assert buggify.fired == {Point.GROWTH_REFUSED: 1}


async def test_a_server_that_is_out_of_descriptors_accepts_a_moment_later() -> None:
    buggify = Buggify(Random(3), {Point.ACCEPT_REFUSED: 0.8})
    async with running_server(make_config(manage_port=None), buggified(Environment(), buggify)) as server:
        async with infinistore.open_store(server.url) as store:
            await store.put("a", b"value")
        assert buggify.fired[Point.ACCEPT_REFUSED]
