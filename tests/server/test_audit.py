"""The audit log of a running server."""

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from infinistore.errors import AuthenticationFailed, ConfigError, PermissionDenied
from infinistore.protocol.messages import Exists, Keys, Purge
from infinistore.server.composition import run_server
from infinistore.server.security import AUDIT_LOGGER, AuditLog
from tests.cluster_io.etcd import Etcd
from tests.events import heard_events
from tests.server.etcd_keys import delete as delete_key
from tests.server.etcd_keys import needs_etcd
from tests.server.etcd_keys import put as put_key
from tests.server.running import RunningServer, make_config, running_server, until
from tests.server.test_tenants import TOKENS, everybody, manage, peer_of, put, reload, write


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    write(path, everybody())
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def refuse(server: RunningServer, token: str) -> None:
    stranger = await server.stranger()
    with pytest.raises(AuthenticationFailed):
        await stranger.hello(token)
    stranger.close()


async def test_it_says_who_came_who_was_refused_and_what_was_administered_and_no_key_or_secret(
    file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    async with running_server(make_config(tenants=file, audit_log=str(log))) as server:
        alice = await peer_of(server, "alice")
        await put(alice, "a-prompt-of-alice")
        with pytest.raises(PermissionDenied):
            await alice.ask(Purge())
        await refuse(server, "bob.not-the-secret-of-bob")
        ops = await peer_of(server, "ops")
        await put(ops, "a-prompt-of-ops")
        await ops.ask(Purge())
        await manage(server, "GET", "/stats", "bob")
        await manage(server, "POST", "/purge", "ops")
        write(file, everybody(bob=""))
        await reload(server)
    noted = lines(log)
    assert all(one.pop("time") for one in noted)
    origin = noted[0].pop("origin")
    assert origin.startswith("127.0.0.1:")
    assert noted[0] == {"event": "login", "tenant": "alice", "proof": "token", "says": "peer", "transport": "tcp"}
    assert [one["event"] for one in noted] == [
        *("login", "denied", "refused", "login", "purge", "denied", "administration", "administration", "reload")
    ]
    assert noted[2]["reason"].startswith("AuthenticationFailed: the token given is none of this server's")
    assert (noted[4]["tenant"], noted[4]["count"]) == ("ops", 1)
    assert noted[6]["request"] == "POST /purge"
    assert noted[6]["origin"].startswith("127.0.0.1:")
    assert (noted[8]["removed"], noted[8]["ok"]) == (["bob"], True)
    text = log.read_text()
    assert "a-prompt" not in text
    assert not any(token.partition(".")[2] in text for token in (*TOKENS.values(), "bob.not-the-secret-of-bob"))
    assert log.stat().st_mode & 0o777 == 0o600


@asynccontextmanager
async def noting(path: Path) -> AsyncIterator[AuditLog]:
    """A log without a server, which writes until the block is left."""
    audit = AuditLog(str(path))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(audit.run)
        yield audit
        nursery.cancel_scope.cancel()


def has_lines(path: Path, count: int) -> bool:
    return len(lines(path)) == count


@needs_etcd
async def test_what_a_cluster_asks_of_its_node_is_noted(etcd: Etcd, tmp_path: Path) -> None:
    log = tmp_path / "audit"
    config = make_config(cluster=etcd.url_of("noted"), node_id="a", audit_log=str(log))

    async with running_server(config) as server:
        await put(await server.peer(), "a-prompt")
        seen = server.server.telemetry.cluster
        assert seen is not None
        await until(lambda: seen().registration == "registered")
        for count, (change, key) in enumerate(((put_key, "purge"), (put_key, "drains/a"), (delete_key, "drains/a")), 2):
            await change(etcd, f"/infinistore/noted/{key}")
            await until(partial(has_lines, log, count))
    noted = [{key: value for key, value in one.items() if key != "time"} for one in lines(log)[1:]]
    assert noted == [
        {"event": "purge", "origin": "cluster", "count": 1},
        {"event": "node-drain", "origin": "cluster", "wanted": True},
        {"event": "node-drain", "origin": "cluster", "wanted": False},
    ]


def stopped() -> float:
    """A clock that stands still: each second that goes by makes room for lines."""
    return 0.0


async def test_one_tenant_cannot_hide_what_is_denied_to_another(file: Path, tmp_path: Path) -> None:
    log = tmp_path / "audit"
    async with running_server(make_config(tenants=file, audit_log=str(log))) as server:
        alice, bob = await peer_of(server, "alice"), await peer_of(server, "bob")
        server.server.policy.audit.clock = stopped
        for _ in range(500):
            with pytest.raises(PermissionDenied):
                await alice.ask(Purge())
        with pytest.raises(PermissionDenied):
            await put(bob, "k")
    denied = [one for one in lines(log) if one["event"] == "denied"]
    assert len(denied) < 200
    assert [one["request"] for one in denied if one["tenant"] == "bob"] == ["Put"]
    assert sum(one.get("left_out", 0) for one in denied if one["tenant"] == "alice") > 300


async def test_a_full_disk_loses_no_request_and_is_said_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(make_config(tenants=file, audit_log="/dev/full")) as server:
        for _ in range(5):
            alice = await peer_of(server, "alice")
            await alice.ask(Exists(Keys(["k"])))
            alice.close()
        await server.quiet()
        await until(lambda: "cannot be written" in caplog.text)
    assert caplog.text.count("the audit log cannot be written") == 1


def is_lost(audit: AuditLog, count: int) -> bool:
    return audit.lost == count


async def test_what_was_lost_is_counted_when_there_is_room_again(tmp_path: Path) -> None:
    place = tmp_path / "audit"
    place.symlink_to("/dev/full")
    async with noting(place) as audit:
        for count in range(1, 4):
            audit.note("login")
            await until(partial(is_lost, audit, count))
        place.unlink()
        assert await audit.reopen() == ""
        audit.note("login")
        await until(lambda: len(lines(place)) == 2)
    noted = lines(place)
    assert [one["event"] for one in noted] == ["lost", "login"]
    assert noted[0]["count"] == 3


@contextmanager
def hanging(path: Path) -> Iterator[Callable[[], bytes]]:
    """Make a file that hangs whoever writes, until what is returned is called."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while os.write(reader, bytes(64 * 1024)):
            pass
    read = partial(os.read, reader, 1024 * 1024)
    try:
        yield read
    finally:
        with suppress(BlockingIOError):
            read()
        os.close(reader)


def has_lost(audit: AuditLog, clock: MockClock, count: int) -> bool:
    clock.jump(5)
    return audit.lost == count


async def test_a_file_that_hangs_has_one_thread_however_much_is_noted(tmp_path: Path, mock_clock: MockClock) -> None:
    place = tmp_path / "audit"
    threads = trio.to_thread.current_default_thread_limiter()
    with hanging(place) as read:
        async with noting(place) as audit:
            for count in range(1, 4):
                audit.note("login")
                await until(partial(has_lost, audit, mock_clock, count))
            assert threads.borrowed_tokens + audit.threads == 1
            read()
            await until(lambda: not threads.borrowed_tokens + audit.threads)


async def test_who_opens_another_file_than_one_that_hangs_has_lines_there(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    place = tmp_path / "audit"
    with hanging(place):
        async with noting(place) as audit:
            audit.note("login")
            await until(partial(has_lost, audit, mock_clock, 1))
            place.rename(tmp_path / "hangs")
            assert await audit.reopen() == ""
            audit.note("denied")
            await until(lambda: has_lines(place, 2))
            assert [one["event"] for one in lines(place)] == ["lost", "denied"]


async def test_of_files_that_hang_two_have_a_thread(tmp_path: Path, mock_clock: MockClock) -> None:
    place = tmp_path / "audit"
    with ExitStack() as files:
        reads = [files.enter_context(hanging(place))]
        async with noting(place) as audit:
            for count in range(1, 5):
                audit.note("login")
                await until(partial(has_lost, audit, mock_clock, count))
                place.rename(tmp_path / f"hangs {count}")
                reads.append(files.enter_context(hanging(place)))
                assert await audit.reopen() == ""
            assert audit.threads == 2
            place.unlink()
            assert await audit.reopen() == ""
            reads[0]()
            await until(lambda: audit.threads == 1)
            audit.note("denied")
            await until(lambda: has_lines(place, 2))
            assert [one["event"] for one in lines(place)] == ["lost", "denied"]


async def test_a_flood_is_summed_up_at_the_latest_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "audit"
    async with noting(log) as audit:
        audit.clock = stopped
        for _ in range(10_000):
            audit.note("refused")
    noted = lines(log)
    assert len(noted) < 1_000
    assert sum(one.get("left_out", 1) for one in noted) == 10_000


async def test_a_flood_that_goes_on_is_summed_up_now_and_then(tmp_path: Path, mock_clock: MockClock) -> None:
    log = tmp_path / "audit"
    async with noting(log) as audit:
        audit.clock = stopped
        for _ in range(1000):
            audit.note("refused")
        await until(lambda: lines(log) and not audit.threads)
        assert len(lines(log)) < 500
        mock_clock.jump(10)
        await until(lambda: sum(one.get("left_out", 1) for one in lines(log)) == 1000)


async def test_a_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--audit-log .*: No such file or directory; give a file"):
        await run_server(make_config(audit_log=str(tmp_path / "no" / "audit")), on_listening=lambda server: None)


def test_tests_of_what_is_logged_do_not_hear_events_of_other_servers(caplog: pytest.LogCaptureFixture) -> None:
    AUDIT_LOGGER.info("login")
    assert caplog.messages == []


async def test_an_application_hears_of_events_by_its_own_handler(file: Path) -> None:
    with heard_events() as heard:
        async with running_server(make_config(tenants=file)) as server:
            await peer_of(server, "alice")
    assert [one["event"] for one in heard] == ["login"]
