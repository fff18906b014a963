"""Following which keys a server removes: waits, gaps, several subscribers, the end."""

import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import infinistore
from infinistore.access.tenants import digest_of, make_token
from infinistore.core.removals import MOST_KEYS
from infinistore.errors import InvalidRequest, PermissionDenied, StoreUnavailable
from infinistore.protocol.messages import MISSING, FollowRemovals, FollowRemovalsReply
from infinistore.server.session.session import MAX_WAIT_S
from tests.server.running import (
    KIB,
    Peer,
    RunningServer,
    make_config,
    peer_with,
    running_server,
    simulated_server,
    until,
)

LONG_US = 3_600_000_000


async def follow(peer: Peer, reply: FollowRemovalsReply | None = None, **fields: Any) -> FollowRemovalsReply:
    asked = FollowRemovals(**fields) if reply is None else FollowRemovals(reply.log, reply.number, **fields)
    answer = await peer.ask(asked)
    assert isinstance(answer, FollowRemovalsReply)
    return answer


def put(running: RunningServer, *keys: str) -> None:
    client = running.core.open_client("test")
    running.core.commit(running.core.reserve(client, [64] * len(keys)), keys, None)
    running.core.close_client(client)


async def test_a_wait_ends_with_a_removal_and_everybody_hears_of_it(mock_clock: trio.testing.MockClock) -> None:
    """The clock stands still: none of them hears because its time is over."""
    async with running_server() as running, trio.open_nursery() as nursery:
        peers = [await running.peer() for _ in range(3)]
        begins = [await follow(peer, wait_us=LONG_US) for peer in peers]  # at once
        heard: list[FollowRemovalsReply] = []

        async def wait(number: int) -> None:
            heard.append(await follow(peers[number], begins[number], wait_us=LONG_US))

        for number in range(3):
            nursery.start_soon(wait, number)
        await until(lambda: len(running.core.removal_log.waiting) == 3)
        put(running, "a", "b")
        assert running.core.delete(["a"]) == 1
        await until(lambda: len(heard) == 3)
        assert [(reply.keys, reply.missed) for reply in heard] == [(["a"], 0)] * 3
        for peer in peers:
            peer.close()


async def test_a_wait_is_over_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated_server() as running:
        peer = await running.peer()
        reply = await follow(peer)
        for wait_us, waited_s in ((2_000_000, 2.0), (LONG_US, MAX_WAIT_S)):
            start = trio.current_time()
            assert await follow(peer, reply, wait_us=wait_us) == reply
            assert trio.current_time() - start == pytest.approx(waited_s)
        start = trio.current_time()
        answer = await peer.ask(FollowRemovals(reply.log, reply.number, wait_us=LONG_US), deadline_us=1_000_000)
        assert answer == reply
        assert trio.current_time() - start < 1.0
        assert running.core.removal_log.waiting == []


async def test_the_end_of_a_key_ends_a_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated_server() as running:
        peer = await running.peer()
        reply = await follow(peer)
        core = running.core
        client = core.open_client("test")
        core.commit(core.reserve(client, [64]), ["ends"], None, ttl_s=3.0)
        start = trio.current_time()
        assert (await follow(peer, reply, wait_us=LONG_US)).keys == ["ends"]
        assert trio.current_time() - start == pytest.approx(3.0, abs=0.01)
        core.close_client(client)


async def test_what_comes_back_during_a_wait_does_not_end_it(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated_server() as running, trio.open_nursery() as nursery:
        peer = await running.peer()
        reply = await follow(peer)

        async def remove() -> None:
            await trio.sleep(1)
            put(running, "a", "b")
            running.core.delete(["a", "b"])
            put(running, "a", "b")
            await trio.sleep(1)
            running.core.delete(["b"])

        nursery.start_soon(remove)
        start = trio.current_time()
        answer = await follow(peer, reply, wait_us=LONG_US)
        assert (answer.keys, answer.number - reply.number) == (["b"], 3)
        assert trio.current_time() - start == pytest.approx(2.0)


async def test_a_slow_subscriber_sees_a_gap_and_costs_the_log_alone() -> None:
    async with simulated_server() as running:
        peer = await running.peer()
        reply = await follow(peer)
        log = running.core.removal_log
        for first in range(0, MOST_KEYS + 500, 1000):
            log.note([f"key {number}" for number in range(first, first + 1000)])
        total = log.next
        answer = await follow(peer, reply, wait_us=LONG_US)
        assert answer.missed == total - MOST_KEYS
        assert len(answer.keys) == 8192  # --max-batch-keys
        assert answer.keys[0] == f"key {total - MOST_KEYS}"
        seen = len(answer.keys)
        while answer.number < total:
            answer = await follow(peer, answer)
            assert answer.missed == 0
            seen += len(answer.keys)
        assert seen == MOST_KEYS


async def test_another_log_is_a_gap_and_a_wrong_number_an_error() -> None:
    async with simulated_server() as running:
        peer = await running.peer()
        reply = await follow(peer)
        other = await follow(peer, log=reply.log + 1, number=7, wait_us=LONG_US)
        assert (other.log, other.number, other.missed) == (reply.log, reply.number, MISSING)
        with pytest.raises(InvalidRequest, match="there have been 0"):
            await peer.ask(FollowRemovals(reply.log, reply.number + 1))
        assert await follow(peer, reply) == reply


async def test_a_drain_ends_a_wait_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated_server() as running, trio.open_nursery() as nursery:
        peer = await running.peer()
        reply = await follow(peer)
        answers: list[FollowRemovalsReply] = []

        async def wait() -> None:
            answers.append(await follow(peer, reply, wait_us=LONG_US))

        nursery.start_soon(wait)
        await trio.sleep(1)
        start = trio.current_time()
        running.server.drain()
        await running.finished.wait()
        assert trio.current_time() - start < 1
    assert answers == [reply]


async def test_a_client_that_leaves_during_its_wait_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated_server() as running:
        peer = await running.peer()
        reply = await follow(peer)
        with trio.move_on_after(1):
            await follow(peer, reply, wait_us=LONG_US)
        peer.close()
        await trio.sleep(MAX_WAIT_S)
        await running.quiet()
        assert running.core.removal_log.waiting == []


async def test_tenants_follow_their_own_keys_and_need_the_role_for_it(tmp_path: Path) -> None:
    tokens = {name: make_token(name, os.urandom) for name in ("ann", "ben", "eve")}
    file = tmp_path / "tenants.yaml"
    roles = {"ann": "", "ben": "", "eve": "    roles: [write]\n"}
    file.write_text(
        "tenants:\n" + "".join(f"  {n}:\n    tokens: [{digest_of(t)}]\n{roles[n]}" for n, t in tokens.items())
    )
    file.chmod(0o600)
    async with running_server(make_config(tenants=file)) as running:
        ann, ben, eve = [await peer_with(running, token) for token in tokens.values()]
        with pytest.raises(PermissionDenied):
            await follow(eve)
        of_ann, of_ben = await follow(ann), await follow(ben)
        async with infinistore.open_store(running.url, token=tokens["ann"]) as store:
            await store.put("a", b"x" * KIB)
            assert await store.delete(["a"]) == 1
        assert (await follow(ann, of_ann)).keys == ["a"]
        assert (await follow(ben, of_ben)).keys == []
        assert (await follow(ben, log=of_ann.log)).missed == MISSING
        for peer in (ann, ben, eve):
            peer.close()


async def test_a_revoked_tenant_does_not_wait_on(tmp_path: Path, mock_clock: trio.testing.MockClock) -> None:
    token = make_token("ann", os.urandom)
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n  ann:\n    tokens: [{digest_of(token)}]\n")
    file.chmod(0o600)
    config = make_config(tenants=file, unix_socket=str(tmp_path / "s"))
    async with running_server(config) as running, trio.open_nursery() as nursery:
        peer = await peer_with(running, token, "unix")
        reply = await follow(peer)
        ended = trio.Event()

        async def wait() -> None:
            with pytest.raises((infinistore.AuthenticationFailed, StoreUnavailable)):
                await follow(peer, reply, wait_us=LONG_US)
            ended.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        file.write_text("tenants: {}\n")
        assert await running.server.reloads.run() == []
        await ended.wait()
        peer.close()
