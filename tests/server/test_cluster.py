"""A server that is a node of a cluster, with a real etcd."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from infinistore.config import ServerConfig, load_server_config
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.server.composition import run_server
from infinistore.statistics import MembershipStatistics
from tests.cluster_io.etcd import Etcd
from tests.ports import own_ports
from tests.server.etcd_keys import needs_etcd, put, read
from tests.server.http_client import ask
from tests.server.running import KIB, RunningServer, make_config, running_server, until


async def cluster_of(server: RunningServer) -> dict[str, Any]:
    answer = await ask(server.server.addresses.management[0], "GET", "/cluster")
    found: dict[str, Any] = json.loads(answer.body)
    return found


async def when(server: RunningServer, holds: Callable[[MembershipStatistics], object]) -> dict[str, Any]:
    """Wait until the server knows this of its cluster, and return what it tells."""
    seen = server.server.telemetry.cluster
    assert seen is not None
    await until(lambda: holds(seen()))
    return await cluster_of(server)


async def listed(etcd: Etcd, cluster: str) -> dict[str, dict[str, Any]]:
    """The nodes that stand in etcd."""
    found = await read(etcd, f"/infinistore/{cluster}/nodes/")
    return {key.rpartition("/")[2]: json.loads(value) for key, value in found.items()}


async def gauge(server: RunningServer, name: str) -> float:
    answer = await ask(server.server.addresses.management[0], "GET", "/metrics")
    (line,) = [one for one in answer.body.decode().splitlines() if one.startswith(f"infinistore_cluster_{name} ")]
    return float(line.split()[1])


@needs_etcd
async def test_a_server_registers_what_it_is_and_leaves_when_it_drains(etcd: Etcd) -> None:
    config = make_config(cluster=etcd.url_of("plain"), node_id="a", node_weight=70, node_zone="rack 1")
    async with running_server(config) as server:
        found = await when(server, lambda found: found.nodes and found.registrations)
        (node,) = found["nodes"]
        (written,) = (await listed(etcd, "plain")).values()
        assert node["address"] == f"infinistore://127.0.0.1:{server.server.addresses.port}"
        assert (node["id"], node["weight"], node["state"], node["zone"]) == ("a", 70, "serving", "rack 1")
        assert node["instance"] == server.server.telemetry.instance == written["instance"]
        assert written["capacity_bytes"] == server.core.pool.capacity_bytes
        assert (found["registration"], found["registrations"], found["problem"]) == ("registered", 1, "")
        server.server.drain()
        await server.finished.wait()
    assert await listed(etcd, "plain") == {}


@needs_etcd
async def test_a_server_purges_as_soon_as_the_cluster_is_purged(etcd: Etcd) -> None:
    config = make_config(cluster=etcd.url_of("purged"), node_id="a", advertise="there.example:7")
    async with running_server(config) as server:
        found = await when(server, lambda found: bool(found.nodes))
        assert found["nodes"][0]["address"] == "infinistore://there.example:7"
        await put(etcd, "/infinistore/purged/purge")
        await when(server, lambda found: found.purged_revision > 0)
        mark = "/infinistore/purged/purged/a"
        while (await read(etcd, mark))[mark] == b"0":
            pass


async def refused(config: ServerConfig) -> str:
    with pytest.raises(ConfigError) as error:
        await run_server(config, on_listening=lambda server: None)
    return str(error.value)


@needs_etcd
async def test_a_cluster_of_another_placement_version_is_refused_in_one_line(etcd: Etcd) -> None:
    await put(etcd, "/infinistore/newer/config", '{"placement": 2}')
    assert "/infinistore/newer/config in etcd is of placement version 2, and this is 1" in await refused(
        make_config(cluster=etcd.url_of("newer"))
    )


@needs_etcd
async def test_a_server_with_disks_serves_when_it_knows_that_it_missed_no_purge(etcd: Etcd, tmp_path: Path) -> None:
    await put(etcd, "/infinistore/disks/purge")
    disks = (DiskPlace(tmp_path / "disk", 64 * KIB * KIB),)
    async with running_server(make_config(cluster=etcd.url_of("disks"), node_id="a", disks=disks)) as server:
        (purged,) = (await read(etcd, "/infinistore/disks/purged/a")).values()
        assert int(purged) > 0
        assert (await cluster_of(server))["registration"] == "registered"


async def test_a_server_without_disks_serves_while_etcd_is_away() -> None:
    port = own_ports(1)[0]
    config = make_config(cluster=f"infinistore+etcd://127.0.0.1:{port}/c")
    async with running_server(config) as server:
        found = await when(server, lambda found: bool(found.problem))
    assert (found["registration"], found["nodes"], found["view_age_s"]) == ("registering", [], -1)
    assert f"127.0.0.1:{port} cannot be reached" in found["problem"]


async def test_a_server_in_a_static_list_registers_nowhere() -> None:
    async with running_server(make_config(cluster="infinistore+static://a,b?copies=2")) as server:
        found = await cluster_of(server)
    assert (found["registration"], found["copies"], len(found["nodes"])) == ("listed", 2, 2)


async def test_a_node_may_listen_on_an_ipv6_address() -> None:
    async with running_server(make_config(host="::1", cluster="infinistore+static://[::1]")) as server:
        port = server.server.addresses.port
        assert (await cluster_of(server))["node"] == f"[::1]:{port}"


async def test_the_metrics_say_how_much_of_the_keys_a_server_owns(tmp_path: Path) -> None:
    nodes = [
        {"id": "a", "address": "h1", "weight": 100},
        {"id": "b", "address": "h2", "weight": 300},
        {"id": "c", "address": "h3", "state": "draining"},
    ]
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": nodes}))
    shares = {}
    for name in ("a", "c", "not listed"):
        config = make_config(cluster=f"infinistore+file://{tmp_path}/nodes.json", node_id=name)
        async with running_server(config) as server:
            await when(server, lambda found: bool(found.nodes))
            shares[name] = await gauge(server, "share_ratio")
    assert shares == {"a": 0.25, "c": 0.0, "not listed": 0.0}


async def test_a_server_that_is_not_in_the_file_says_so_until_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "nodes.json"

    def write(*names: str) -> None:
        new = tmp_path / "new"
        new.write_text(json.dumps({"nodes": [{"id": name, "address": f"{name}.example"} for name in names]}))
        new.rename(file)

    def warnings() -> list[str]:
        return [
            record.__dict__["problem"]
            for record in caplog.records
            if record.message == "this node is not in the file of its cluster"
        ]

    write("a", "b")
    async with running_server(make_config(cluster=f"infinistore+file://{file}", node_id="c")) as server:
        found = await when(server, lambda found: bool(found.nodes))
        said = f"{file} does not list c (--node-id), but a, b"
        assert (found["registration"], found["problem"], await gauge(server, "registered")) == ("not listed", said, 0.0)
        assert warnings() == [said]
        write("b")
        await when(server, lambda found: len(found.nodes) == 1)
        assert warnings() == [said, f"{file} does not list c (--node-id), but b"]
        write("b", "c")
        found = await when(server, lambda found: len(found.nodes) == 2)
        assert (found["registration"], found["problem"], await gauge(server, "registered")) == ("listed", "", 1.0)
        assert len(warnings()) == 2


@pytest.mark.process
async def test_a_server_without_a_cluster_says_so_and_loads_none_of_it() -> None:
    async with running_server(make_config()) as server:
        answer = await ask(server.server.addresses.management[0], "GET", "/cluster")
    assert (answer.status, json.loads(answer.body)["error"]) == (
        404,
        "this server is in no cluster; start it with --cluster URL",
    )
    program = (
        "import sys, infinistore.server.composition; print([n for n in sys.modules if 'infinistore.cluster.' in n])"
    )
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True)
    assert done.stdout == b"[]\n"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"cluster": "infinistore+etcd://a/c", "host": "0.0.0.0", "insecure": "yes"},
            "--host 0.0.0.0 is no address that others can connect to; add --advertise HOST:PORT",
        ),
        ({"cluster": "infinistore+etcd://a/c", "advertise": "a:b"}, "--advertise a:b: .*must be HOST:PORT"),
        ({"cluster": "infinistore+etcd://h"}, "--cluster infinistore[+]etcd://h: .* names no cluster; write"),
        ({"cluster": "infinistore+static://a?copies=0"}, "the option copies=0"),
        ({"node_weight": "10001"}, "must be a whole number between 0 and 10000"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_server_config(given, environment={})
