"""Over a real socket: a raw client maps the tables, reads by itself what it knows, and
leaves in every way.
"""

import errno
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from infinistore.core.arena import Arena, create_arena
from infinistore.core.limits import CoreLimits
from infinistore.errors import LimitExceeded, OutOfMemory, ProtocolError
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    Delete,
    Keys,
    LeaseReply,
    MapTables,
    MapTablesReply,
    Prepare,
    Purge,
    Touch,
)
from infinistore.server.environment import Environment
from infinistore.transports.base import drive
from tests.server.raw_tables import Tables, map_tables
from tests.server.running import KIB, POOL_BYTES, Peer, RunningServer, let_linger, running_server
from tests.server.test_shared_memory import lease, present, put, release, reserve, serving


def begin(tables: Tables, known: LeaseReply) -> int | None:
    """Begin to read blocks that are known; None if that is not possible without
    asking.
    """
    slots = tables.hazards.add(known.places, known.sizes, known.checksums)
    assert slots is not None
    if not tables.hazards.closed and tables.removals.is_unchanged(known.places, [known.removals] * len(known.places)):
        return slots
    tables.hazards.remove(slots)
    return None


async def known_block(peer: Peer) -> LeaseReply:
    """Put a block "a" of 1 KiB, and tell what a client knows of it that leased
    it once.
    """
    await put(peer, "a", b"x" * KIB)
    known = await lease(peer, "a")
    await release(peer, known.lease)
    return known


@pytest.mark.parametrize("inline_bytes", [0, POOL_BYTES], ids=["leased", "inline"])
async def test_a_client_reads_again_what_a_lease_told_it_until_that_is_removed(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables, inline_bytes: int
) -> None:
    await put(other, "a", b"x" * KIB)
    await put(other, "b", b"y" * KIB)
    known = await lease(peer, "a", "b", inline_bytes=inline_bytes)
    await peer.payload()
    if known.lease:
        await release(peer, known.lease)
    assert known.removals == tables.removals.count
    slots = begin(tables, known)
    assert slots is not None
    await other.ask(Delete(Keys(["a"])))
    assert begin(tables, known) is None
    assert server.core.statistics().used_bytes == 2 * KIB
    tables.hazards.remove(slots)
    assert server.core.statistics().used_bytes == KIB


async def test_who_asks_twice_gets_the_same_tables(peer: Peer, other: Peer) -> None:
    known = await known_block(peer)
    first, again, of_another = await map_tables(peer), await map_tables(peer), await map_tables(other)
    assert first.hazards.add(known.places, known.sizes, known.checksums) is not None
    assert again.hazards.numbers[1] == 1
    assert of_another.hazards.numbers[1] == 0


async def test_a_connection_that_closes_while_it_reads_gives_its_pins_back(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables
) -> None:
    known = await known_block(peer)
    assert begin(tables, known) is not None
    await other.ask(Purge())
    assert server.core.statistics().used_bytes == KIB
    peer.close()
    await server.until(clients=1, used_bytes=0)
    assert tables.hazards.closed
    assert begin(tables, known) is None


async def test_what_a_client_reads_that_breaks_the_protocol_stays_until_its_end_of_the_stream(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables, mock_clock: MockClock
) -> None:
    known = await known_block(peer)
    assert begin(tables, known) is not None
    await release(peer, 12345)
    with pytest.raises(ProtocolError):
        await present(peer, "a")
    await let_linger(peer, mock_clock)
    await server.until(quarantined_bytes=KIB)
    assert tables.hazards.closed
    assert begin(tables, known) is None
    await other.ask(Purge())
    await put(other, "big", b"x" * (POOL_BYTES - 64 * KIB))
    assert server.core.statistics().used_bytes == POOL_BYTES - 63 * KIB
    peer.close()
    await server.until(quarantined_bytes=0, used_bytes=POOL_BYTES - 64 * KIB)


async def test_a_touch_counts_whether_it_comes_by_the_log_or_by_the_socket(server: RunningServer, peer: Peer) -> None:
    tables = await map_tables(peer)
    await put(peer, "a", b"x" * KIB)
    await drive(peer.connection.notify(Touch(Keys(["a", "gone"]))), peer.stream)
    await drive(peer.connection.notify(Touch(Keys(["a"]), read=False)), peer.stream)
    assert tables.log.append(encode_head(Touch(Keys(["a"])), request_id=0))
    assert await present(peer, "a") == [True]
    statistics = server.core.statistics()
    assert (statistics.hits, statistics.hit_bytes, statistics.misses) == (2, 2 * KIB, 0)


async def test_a_touch_of_too_many_keys_ends_the_connection(tmp_path: Path) -> None:
    too_many = Keys([str(number) for number in range(CoreLimits().max_batch_keys + 1)])
    async with serving(tmp_path) as server:
        peer = await server.local_peer()
        await drive(peer.connection.notify(Touch(too_many)), peer.stream)
        with pytest.raises(LimitExceeded):
            await present(peer, "a")
        assert await peer.is_closed()


async def test_a_touch_may_come_over_tcp() -> None:
    async with running_server() as server:
        peer = await server.peer()
        await put(peer, "a", b"x")
        await drive(peer.connection.notify(Touch(Keys(["a"]))), peer.stream)
        assert await present(peer, "a") == [True]
        assert server.core.statistics().hits == 1


async def test_where_stores_are_not_kept_in_order_there_are_no_tables_and_no_prepares(tmp_path: Path) -> None:
    async with serving(tmp_path, Environment(tables_are_safe=lambda: False)) as server:
        peer = await server.local_peer()
        descriptors: list[int] = []
        reply = await drive(peer.connection.request(MapTables(), descriptors=descriptors), peer.stream)
        assert (reply, descriptors) == (MapTablesReply(0), [])
        await put(peer, "a", b"x")
        known = await lease(peer, "a", inline_bytes=1)
        assert (known.removals, len(known.places)) == (0, 1)
        await peer.payload()
        room = await reserve(peer, 5)
        with pytest.raises(ProtocolError, match="MapTables"):
            await peer.ask(Prepare(room.reservation, Keys(["a"]), pack_u64(), False))


@pytest.mark.parametrize(
    "error", [OutOfMemory("full"), OSError(errno.EMFILE, "too many files")], ids=lambda e: type(e).__name__
)
async def test_a_client_for_whose_table_there_is_no_memory_reads_as_if_there_were_none(
    tmp_path: Path, error: Exception
) -> None:
    refuses = True

    def create(index: int, length: int, **options: Any) -> Arena:
        if refuses and options.get("name") == "reader":
            raise error
        return create_arena(index, length, **options)

    async with serving(tmp_path, Environment(create_arena=create)) as server:
        peer = await server.local_peer()
        assert await peer.ask(MapTables()) == MapTablesReply(0)
        await put(peer, "a", b"x")
        assert await present(peer, "a") == [True]
        refuses = False
        assert not (await map_tables(peer)).hazards.closed


async def test_junk_in_a_connections_memory_ends_nothing(peer: Peer, other: Peer, tables: Tables) -> None:
    tables.log.append(b"junk" * 100)
    tables.hazards.add(pack_u64([2**64 - 1, 5]), pack_u64([2**64 - 1, 7]), pack_u64([0, 0]))
    for who in (peer, other):
        await put(who, "a", b"x" * KIB)
        assert await present(who, "a") == [True]
