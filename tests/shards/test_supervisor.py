"""A server with two shards, as processes: found, watched, killed and stopped as one."""

import json
import os
import select
import signal
import socket
import subprocess
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import HelloReply, Keys, Put, shards_from_texts
from infinistore.server.management.api import OPERATIONS
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix
from tests import warm
from tests.ports import own_ports
from tests.server.running import Peer

from .conftest import HOST, INFINISTORE, POOL, RunningShards, running_shards

pytestmark = pytest.mark.process


async def peer_at(port: int) -> Peer:
    return Peer(await connect_tcp(HOST, port))


async def put(port: int, key: str) -> None:
    peer = await peer_at(port)
    await peer.hello()
    await peer.ask(Put(Keys([key]), pack_u64([3]), checksums=False), b"abc")
    peer.close()


def metrics_of(server: RunningShards) -> dict[tuple[str, str | None], float]:
    """The samples of a scrape that have no other label than that of their shard."""
    status, body = server.ask("/metrics")
    assert status == 200
    return {
        (sample.name, sample.labels.get("shard")): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if set(sample.labels) <= {"shard"}
    }


async def test_every_shard_tells_where_all_are(two_shards: RunningShards) -> None:
    known = two_shards.shards()
    assert known[0]["port"] == two_shards.port
    hellos: list[HelloReply] = []
    for shard in known:
        for connect in (connect_tcp(HOST, shard["port"]), connect_unix(shard["unix_socket"])):
            peer = Peer(await connect)
            hellos.append(await peer.hello())
            peer.close()
    for hello in hellos:
        found = shards_from_texts(hello.shards)
        assert [(one.port, one.unix_socket) for one in found] == [(one["port"], one["unix_socket"]) for one in known]
    assert [hellos[0].instance, hellos[2].instance] == [hellos[1].instance, hellos[3].instance]
    assert hellos[0].instance != hellos[2].instance


async def test_numbers_are_those_of_all_shards(two_shards: RunningShards) -> None:
    two_shards.told("/purge", "POST")

    def puts() -> int:
        operations = two_shards.told("/stats?details=true")["details"]["operations"]
        return sum(one["count"] for one in operations if one["kind"] == "put")

    before = puts()
    await put(two_shards.shards()[0]["port"], "a")
    await put(two_shards.shards()[1]["port"], "b")
    assert two_shards.told("/kvmap_len") == {"len": 2}
    stats = two_shards.told("/stats")
    assert (stats["store"]["keys"], stats["store"]["capacity_bytes"]) == (2, 8 << 20)
    assert [(one["shard"], one["store"]["keys"]) for one in stats["shards"]] == [(0, 1), (1, 1)]
    assert puts() == before + 2
    metrics = metrics_of(two_shards)
    for name, value in (("shard_up", 1), ("serving", 1), ("keys", 1), ("pool_capacity_bytes", 4 << 20)):
        assert [metrics["infinistore_" + name, shard] for shard in ("0", "1")] == [value, value]
    assert two_shards.told("/evict?min=0&max=0", "POST") == {"status": "ok", "num": 2}


def test_it_is_ready_and_well(two_shards: RunningShards) -> None:
    assert two_shards.told("/readyz") == {"state": "serving"}
    assert two_shards.told("/healthz") == {"status": "ok"}
    found = two_shards.told("/selftest")
    assert [(one["transport"], one["ok"]) for one in found["transports"]] == [("tcp", True), ("unix", True)] * 2
    assert two_shards.told("/clients") == {"clients": []}


def test_every_path_of_a_plain_server_is_there(two_shards: RunningShards) -> None:
    described = two_shards.told("/openapi.json")["paths"]
    assert set(described) == {operation.path for operation in OPERATIONS} | {"/shards"}


def test_what_the_shards_refuse_is_refused_in_their_words(two_shards: RunningShards) -> None:
    assert two_shards.ask("/evict?min=2", "POST") == (400, b'{"error":"min must be a number between 0 and 1"}')
    assert two_shards.ask("/stats?details=maybe") == (400, b'{"error":"details must be true or false"}')
    assert two_shards.ask("/nothing")[0] == 404
    assert two_shards.ask("/purge")[0] == 405


def kill(server: RunningShards, index: int, number: signal.Signals) -> None:
    os.kill(server.shards()[index]["pid"], number)


def test_a_shard_that_is_told_to_read_its_files_again_serves_on(two_shards: RunningShards) -> None:
    before = two_shards.shards()
    kill(two_shards, 1, signal.SIGHUP)
    two_shards.told("/selftest")
    assert two_shards.shards() == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_shard_that_ends_is_started_again_at_its_port(
    two_shards: RunningShards, number: signal.Signals
) -> None:
    two_shards.told("/purge", "POST")
    before = two_shards.shards()
    await put(before[0]["port"], "kept")
    await put(before[1]["port"], "lost")
    kill(two_shards, 1, number)
    two_shards.wait_for_restart(1, before[1]["restarts"] + 1)
    after = two_shards.shards()
    assert after[0] == before[0]
    assert after[1]["pid"] != before[1]["pid"]
    assert (after[1]["port"], after[1]["unix_socket"]) == (before[1]["port"], before[1]["unix_socket"])
    assert two_shards.told("/kvmap_len") == {"len": 1}
    peer = await peer_at(after[1]["port"])
    assert len((await peer.hello()).shards) == 2
    peer.close()
    assert metrics_of(two_shards)["infinistore_shard_restarts_total", "1"] == after[1]["restarts"]


def test_the_shards_end_with_a_supervisor_that_is_killed(environment: dict[str, str]) -> None:
    with running_shards(environment) as own:
        for restarts, number in enumerate((signal.SIGKILL, signal.SIGTERM), 1):
            kill(own, 1, number)
            own.wait_for_restart(1, restarts)
        ends = [os.pidfd_open(shard["pid"]) for shard in own.shards()]
        own.process.kill()
        _, log = own.process.communicate()
    for end in ends:
        with closing(os.fdopen(end)):
            assert select.select([end], [], [], 100)[0]
    events = [json.loads(line) for line in log.splitlines()]
    ended = [one for one in events if one["event"] == "a shard ended"]
    assert [(one["shard"], one["status"]) for one in ended] == [(1, -9), (1, 0)]
    assert "Traceback" not in log


def test_ctrl_c_drains_all_shards_even_if_they_share_a_core(environment: dict[str, str]) -> None:
    core = min(os.sched_getaffinity(0))
    with running_shards(environment, "--unix-socket", "off", cores=[core]) as server:
        ports = [shard["port"] for shard in server.shards()]
        server.process.send_signal(signal.SIGINT)
        _, log = server.process.communicate()
        assert server.process.returncode == 130
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert (events.count("more shards than cores"), events.count("draining")) == (1, 1)
    assert "a shard ended" not in events
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex((HOST, port)) != 0


def run(environment: dict[str, str], *flags: str) -> "subprocess.CompletedProcess[str]":
    arguments = [*INFINISTORE, "--shards", "2", "--host", HOST, "--manage-port", "0", "--unix-socket", "off", *POOL]
    return warm.run([*arguments, *flags], env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_a_port_that_is_taken_is_one_line_and_nothing_starts(environment: dict[str, str]) -> None:
    (port,) = own_ports(1)
    with socket.create_server((HOST, port)):
        found = run(environment, "--service-port", str(port - 1), "--log-level", "error")
    assert found.returncode == 2
    assert f"infinistore: shard 1: port {port} on {HOST} is in use" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    assert found.stdout == ""
