"""What the server makes of `Prepare` and of commit words, of good clients and of
others.

The clients here are raw, as in `test_shared_memory.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from trio.testing import MockClock

from infinistore.errors import InvalidRequest, LimitExceeded, ProtocolError, UnknownReservation, ValueTooLarge
from infinistore.protocol.codec import encode_head, pack_u64
from infinistore.protocol.messages import (
    Get,
    GetReply,
    Keys,
    Prepare,
    PrepareReply,
    Purge,
    PutReply,
    Touch,
)
from infinistore.protocol.shared_tables import (
    HAZARD_SLOTS,
    tables_are_safe_here,
)
from infinistore.server import connection as holdings
from infinistore.transports.base import drive
from tests.server.raw_tables import Tables, map_tables
from tests.server.running import KIB, POOL_BYTES, Peer, RunningServer, let_linger
from tests.server.test_shared_memory import (
    abort,
    commit,
    lease,
    present,
    put,
    release,
    reserve,
    serving,
)

pytestmark = pytest.mark.skipif(not tables_are_safe_here(), reason="clients commit by themselves on x86-64 only")


async def prepare(
    peer: Peer, reservation: int, *keys: str, sizes: Sequence[int] = (), checksums: bool = False
) -> PrepareReply:
    reply = await peer.ask(Prepare(reservation, Keys(list(keys)), pack_u64(sizes), checksums))
    assert isinstance(reply, PrepareReply)
    return reply


# As it should be


async def test_a_prepared_batch_is_visible_when_its_number_is_in_the_commit_word(server: RunningServer) -> None:
    peer, other = await server.local_peer(), await server.peer()
    tables = await map_tables(peer)
    room = await reserve(peer, 5, 6)
    reply = await prepare(peer, room.reservation, "a", "b", checksums=True)
    assert reply.accepted
    assert reply.removals
    assert await present(other, "a", "b") == [False, False]
    tables.word.commit(room.reservation, pack_u64([11, 12]))
    assert await present(other, "a", "b") == [True, True]
    assert list((await lease(peer, "a", "b")).checksums) == [11, 12]
    assert server.core.statistics().reservations == 0


async def test_a_prepare_can_take_the_room_as_well(server: RunningServer) -> None:
    peer, other = await server.local_peer(), await server.peer()
    tables = await map_tables(peer)
    for index in range(3):
        reply = await prepare(peer, 0, f"a {index}", "b", sizes=[5, 6], checksums=True)
        assert reply.accepted
        assert reply.removals
        assert len(set(reply.places)) == 2
        assert await present(other, f"a {index}", "b") == [False, index > 0]
        tables.word.commit(reply.reservation, pack_u64([11, index]))
        assert await present(other, f"a {index}", "b") == [True, True]
    assert list((await lease(peer, "a 2", "b")).checksums) == [11, 2]


async def test_the_room_that_a_prepare_took_is_the_clients_even_if_the_names_are_somebody_elses(
    server: RunningServer,
) -> None:
    first, second = await server.local_peer(), await server.local_peer()
    tables, _ = await map_tables(first), await map_tables(second)
    before = await prepare(first, 0, "key", sizes=[5])
    reply = await prepare(second, 0, "new", "key", sizes=[5, 5])
    assert (reply.accepted, reply.removals, len(reply.places)) == (False, 0, 2)
    assert isinstance(await second.ask(commit(reply.reservation, "new", "key")), PutReply)
    tables.word.commit(before.reservation, pack_u64())
    assert await present(second, "new", "key") == [True, True]
    reply = await prepare(second, 0, "another", sizes=[5])
    await abort(second, reply.reservation)
    await server.until(keys=2, reservations=0)


async def test_the_tables_tell_how_much_a_client_may_pin_and_in_which_units_it_counts(peer: Peer) -> None:
    tables = await map_tables(peer)
    assert (tables.reply.max_pinned_bytes, tables.reply.unit_bytes) == (POOL_BYTES // 2, KIB)


async def test_nobody_may_remember_a_block_while_its_key_is_being_written(peer: Peer, other: Peer) -> None:
    tables = await map_tables(peer)
    await put(other, "key", b"value")
    await put(other, "another", b"value")
    room = await reserve(peer, 5)
    reply = await prepare(peer, room.reservation, "key")
    assert (await lease(other, "key")).removals == 0
    assert (await lease(other, "another", "key")).removals == 0
    assert (await lease(other, "another")).removals == reply.removals
    tables.word.commit(room.reservation, pack_u64())
    assert (await lease(other, "key")).removals > reply.removals


async def test_a_batch_whose_key_somebody_else_writes_needs_a_commit(server: RunningServer) -> None:
    first, second = await server.local_peer(), await server.local_peer()
    tables, other_tables = await map_tables(first), await map_tables(second)
    room, other_room = await reserve(first, 5), await reserve(second, 5, 5)
    assert (await prepare(first, room.reservation, "key")).accepted
    assert await prepare(second, other_room.reservation, "new", "key") == PrepareReply(
        False, other_room.reservation, pack_u64()
    )
    other_tables.word.commit(other_room.reservation, pack_u64())  # which means nothing
    assert await present(second, "new", "key") == [False, False]
    assert isinstance(await second.ask(commit(other_room.reservation, "new", "key")), PutReply)
    tables.word.commit(room.reservation, pack_u64())
    assert await present(second, "new", "key") == [True, True]
    assert server.core.statistics().puts == 3


async def test_one_connection_can_commit_one_batch_after_the_other(server: RunningServer, peer: Peer) -> None:
    tables = await map_tables(peer)
    for index in range(20):
        room = await reserve(peer, 5)
        assert (await prepare(peer, room.reservation, f"key {index % 3}", checksums=True)).accepted
        tables.word.commit(room.reservation, pack_u64([index + 1]))
    assert await present(peer, "key 0", "key 1", "key 2") == [True] * 3
    assert list((await lease(peer, "key 0", "key 1", "key 2")).checksums) == [19, 20, 18]
    assert server.core.statistics().used_bytes == 3 * KIB


async def test_traffic_and_statistics_count_what_a_client_committed_by_itself(
    server: RunningServer, peer: Peer, tables: Tables
) -> None:
    room = await reserve(peer, 500, 600)
    await prepare(peer, room.reservation, "a", "b")
    tables.word.commit(room.reservation, pack_u64())
    (client,) = server.server.telemetry.clients()
    assert (client.received_bytes, client.pinned_bytes) == (1100, 0)
    assert await present(peer, "a") == [True]
    moved = {one.kind: one.payload_bytes for one in server.server.telemetry.operations()}
    assert (moved["put"], moved["reserve"], moved["exists"]) == (1100, 0, 0)
    statistics = server.core.statistics()
    assert (statistics.puts, statistics.put_bytes) == (2, 1100)
    peer.close()
    await server.quiet()
    assert server.server.telemetry.statistics().received_bytes == 1100


@pytest.mark.parametrize("by_log", [False, True])
async def test_a_read_of_what_nobody_has_looked_at_yet_counts_as_a_hit(
    server: RunningServer, peer: Peer, tables: Tables, by_log: bool
) -> None:
    room = await reserve(peer, 500)
    await prepare(peer, room.reservation, "key")
    tables.word.commit(room.reservation, pack_u64())
    if by_log:
        assert tables.log.append(encode_head(Touch(Keys(["key"])), request_id=0))
    else:
        await drive(peer.connection.notify(Touch(Keys(["key"]))), peer.stream)
    await present(peer, "key")
    statistics = server.core.statistics()
    assert (statistics.hits, statistics.hit_bytes) == (1, 500)


# Clients that go, and servers


@pytest.mark.parametrize("written", [False, True])
async def test_a_client_that_leaves_leaves_what_it_has_written_and_nothing_else(
    server: RunningServer, peer: Peer, tables: Tables, written: bool
) -> None:
    await put(peer, "key", b"old value")
    room = await reserve(peer, 5)
    await prepare(peer, room.reservation, "key")
    if written:
        tables.word.commit(room.reservation, pack_u64())
    peer.close()
    await server.quiet()
    lengths = dict(server.core.sample(9))
    assert lengths == {"key": 5 if written else 9}
    assert server.core.statistics().used_bytes == KIB


async def test_a_client_in_quarantine_may_still_write_what_it_has_prepared(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables, mock_clock: MockClock
) -> None:
    room = await reserve(peer, 5)
    await prepare(peer, room.reservation, "key")
    await abort(peer, 12345)
    with pytest.raises(ProtocolError):
        await present(peer, "key")
    await let_linger(peer, mock_clock)
    await server.until(quarantined_bytes=KIB)
    assert tables.closed
    assert await present(other, "key") == [False]
    tables.word.commit(room.reservation, pack_u64())
    assert await present(other, "key") == [True]
    assert server.core.statistics().quarantined_bytes == 0
    peer.close()
    await server.until(clients=1)
    assert await present(other, "key") == [True]


async def test_a_server_that_drains_does_not_wait_for_a_client_that_has_written_all(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_timeout_s=1000) as server:
        peer = await server.local_peer()
        tables = await map_tables(peer)
        room = await reserve(peer, 5)
        await prepare(peer, room.reservation, "key")
        tables.word.commit(room.reservation, pack_u64())
        server.server.drain()
        await server.finished.wait()
        assert await peer.is_closed()
        peer.close()
        assert server.core.exists(["key"]) == b"\1"


async def test_a_server_that_drains_waits_for_a_client_that_is_writing_and_tells_it(tmp_path: Path) -> None:
    async with serving(tmp_path, drain_timeout_s=1000) as server:
        peer = await server.local_peer()
        tables = await map_tables(peer)
        room = await reserve(peer, 5)
        await prepare(peer, room.reservation, "key")
        assert not tables.closed
        server.server.drain()
        await server.until(quarantined_clients=1)
        assert tables.closed
        assert not server.finished.is_set()
        peer.close()
        await server.finished.wait()
        assert server.core.exists(["key"]) == b"\0"


# Bad input


async def test_a_prepare_without_tables_is_no_request(peer: Peer) -> None:
    room = await reserve(peer, 5)
    with pytest.raises(ProtocolError, match="MapTables"):
        await prepare(peer, room.reservation, "key")


async def is_unharmed(server: RunningServer, peer: Peer, tables: Tables, reservation: int) -> None:
    """The connection goes on, and a reservation that was open can still be used."""
    assert (await prepare(peer, reservation, "key")).accepted
    tables.word.commit(reservation, pack_u64())
    assert await present(peer, "key") == [True]
    assert server.core.statistics().keys == 1
    peer.close()
    await server.quiet()


async def test_a_prepare_of_what_is_not_open_is_refused(server: RunningServer, peer: Peer, other: Peer) -> None:
    tables = await map_tables(peer)
    room, aborted, others = await reserve(peer, 5), await reserve(peer, 5), await reserve(other, 5)
    await abort(peer, aborted.reservation)
    for number in (0, 12345, 2**64 - 1, aborted.reservation, others.reservation + 100):
        with pytest.raises(UnknownReservation, match="no reservation"):
            await prepare(peer, number, "key")
    other.close()
    await is_unharmed(server, peer, tables, room.reservation)


async def test_a_prepare_that_does_not_fit_its_reservation_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, max_key_bytes=10) as server:
        peer = await server.local_peer()
        tables = await map_tables(peer)
        room = await reserve(peer, 5)
        for keys in ([], ["key", "another"], ["much longer than that"]):
            with pytest.raises(InvalidRequest, match=r"."):
                await prepare(peer, room.reservation, *keys)
        two = await reserve(peer, 5, 5)
        with pytest.raises(InvalidRequest, match="there twice"):
            await prepare(peer, two.reservation, "key", "key")
        await abort(peer, two.reservation)
        await is_unharmed(server, peer, tables, room.reservation)


async def test_a_prepare_that_is_refused_takes_no_room(tmp_path: Path) -> None:
    async with serving(tmp_path, max_key_bytes=10) as server:
        peer = await server.local_peer()
        tables, room = await map_tables(peer), await reserve(peer, 5)
        for keys in ([], ["key"], ["key", "another", "one more"], ["key", "much longer than that"], ["key", "key"]):
            with pytest.raises(InvalidRequest, match=r"."):
                await prepare(peer, 0, *keys, sizes=[5, 5])
        for size, error in ((POOL_BYTES // 2, LimitExceeded), (2 * POOL_BYTES, ValueTooLarge), (0, InvalidRequest)):
            with pytest.raises(error, match=r"."):
                await prepare(peer, 0, "key", sizes=[size])
        assert server.core.statistics().reservations == 1
        await is_unharmed(server, peer, tables, room.reservation)


async def test_a_prepare_of_a_reservation_that_asks_for_room_is_no_request(peer: Peer) -> None:
    await map_tables(peer)
    room = await reserve(peer, 5)
    with pytest.raises(ProtocolError, match="asks for room"):
        await prepare(peer, room.reservation, "key", sizes=[5])


async def test_a_prepare_takes_no_more_reservations_than_a_connection_may_have(peer: Peer) -> None:
    await map_tables(peer)
    with mock.patch.object(holdings, "MOST_OPEN", 1):
        room = await reserve(peer, 5)
        with pytest.raises(LimitExceeded, match="1 reservations are open"):
            await prepare(peer, 0, "key", sizes=[5])
        await abort(peer, room.reservation)
        assert (await prepare(peer, 0, "key", sizes=[5])).accepted


async def test_a_prepare_of_more_keys_than_there_is_room_for_checksums_is_no_request(peer: Peer) -> None:
    tables = await map_tables(peer)
    most = [f"{index}" for index in range(HAZARD_SLOTS)]
    room = await reserve(peer, *[1] * HAZARD_SLOTS)
    assert (await prepare(peer, room.reservation, *most, checksums=True)).accepted
    tables.word.commit(room.reservation, pack_u64(range(1, HAZARD_SLOTS + 1)))
    assert list((await lease(peer, *most)).checksums) == list(range(1, HAZARD_SLOTS + 1))
    await release(peer, 0)
    await peer.ask(Purge())
    room = await reserve(peer, *[1] * (HAZARD_SLOTS + 1))
    with pytest.raises(ProtocolError, match="there is room for"):
        await prepare(peer, room.reservation, *most, "one more")


@pytest.mark.parametrize("same", [False, True])
async def test_a_second_prepare_before_the_first_is_written_is_no_request(server: RunningServer, same: bool) -> None:
    """There is one commit word: it could tell of one of them only."""
    peer, other = await server.local_peer(), await server.local_peer()
    await map_tables(peer)
    first, second = await reserve(peer, 5), await reserve(peer, 5)
    assert (await prepare(peer, first.reservation, "key")).accepted
    with pytest.raises(ProtocolError, match="one batch at a time"):
        await prepare(peer, (first if same else second).reservation, "another")
    peer.close()
    await server.until(clients=1)
    assert await present(other, "key", "another") == [False, False]


async def test_another_batch_can_be_prepared_when_the_first_is_given_up_or_was_refused(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables
) -> None:
    await map_tables(other)
    given_up, kept, others = await reserve(peer, 5), await reserve(peer, 5), await reserve(other, 5)
    assert (await prepare(peer, given_up.reservation, "key")).accepted
    assert not (await prepare(other, others.reservation, "key")).accepted
    assert (await prepare(other, others.reservation, "another")).accepted
    await abort(peer, given_up.reservation)
    other.close()
    await server.until(clients=1)
    await is_unharmed(server, peer, tables, kept.reservation)


async def test_what_is_prepared_can_be_committed_by_its_word_only(peer: Peer, tables: Tables) -> None:
    room = await reserve(peer, 5)
    await prepare(peer, room.reservation, "key")
    with pytest.raises(InvalidRequest, match="prepared"):
        await peer.ask(commit(room.reservation, "another"))
    tables.word.commit(room.reservation, pack_u64())
    for _ in range(2):
        with pytest.raises(UnknownReservation, match=r"."):
            await prepare(peer, room.reservation, "another")
    assert await present(peer, "key", "another") == [True, False]


async def test_a_junk_commit_word_commits_nothing_that_was_not_prepared(
    server: RunningServer, peer: Peer, other: Peer, tables: Tables
) -> None:
    room, others = await reserve(peer, 5), await reserve(other, 5)
    for junk in (0, room.reservation, others.reservation, 12345, 2**64 - 1):
        tables.word.commit(junk, pack_u64([junk] * HAZARD_SLOTS))
        assert await present(other, "key") == [False]
    tables.word.commit(2**64 - 1, pack_u64())
    await prepare(peer, room.reservation, "key")
    for junk in (0, room.reservation + 1, 2**64 - 1):
        tables.word.commit(junk, pack_u64([junk] * HAZARD_SLOTS))
        assert await present(other, "key") == [False]
    assert server.core.statistics().reservations == 2
    other.close()
    tables.word.commit(room.reservation, pack_u64([7]))
    assert isinstance(await peer.ask(Get(Keys(["key"]), pack_u64())), GetReply)


async def test_a_word_that_was_there_before_its_prepare_counts_from_then_on(peer: Peer, other: Peer) -> None:
    """It is its own room that such a client shows before it has written it."""
    tables = await map_tables(peer)
    room = await reserve(peer, 5)
    tables.word.commit(room.reservation, pack_u64([2**64 - 1]))
    assert await present(other, "key") == [False]
    await prepare(peer, room.reservation, "key", checksums=True)
    assert await present(other, "key") == [True]
