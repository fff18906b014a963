"""Nodes with tenants: all have one tenants file, and ask each other as one of them."""

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import infinistore
from infinistore.access.tenants import digest_of, make_token
from infinistore.cluster.membership import Node
from infinistore.cluster_io.probing import instance_asker
from infinistore.config import ServerConfig
from infinistore.errors import AuthenticationFailed, ConfigError
from infinistore.server.cluster import Refusals
from infinistore.server.composition import run_server
from tests.cluster_io.etcd import Etcd
from tests.server.etcd_keys import needs_etcd
from tests.server.running import RunningServer, make_config, running_server, until

TOKENS = {name: make_token(name, os.urandom) for name in ("ann", "ben", "nodes")}
KEYS = [f"key {number}" for number in range(64)]


def private(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o600)
    return file


def tenants_file(folder: Path, *names: str) -> Path:
    entries = [f"  {name}:\n    tokens: [{digest_of(TOKENS[name])}]\n" for name in names]
    return private(folder / f"{'-'.join(names)}.yaml", "tenants:\n" + "".join(entries))


def settings(folder: Path, cluster: str, node: str, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "tenants": tenants_file(folder, *TOKENS),
        "peer_token_file": private(folder / "peer.token", TOKENS["nodes"]),
        "cluster": cluster,
        "node_id": node,
        "node_warm_up_s": 0.0,
    }
    return given | more


async def until_seen(*servers: RunningServer) -> None:
    """Wait until each of these servers knows all."""
    for server in servers:
        seen = server.server.telemetry.cluster
        assert seen is not None
        await until(partial(lambda seen: len(seen().nodes) == len(servers), seen))


@needs_etcd
async def test_tenants_have_keys_of_their_own_in_all_nodes(etcd: Etcd, tmp_path: Path) -> None:
    url = etcd.url_of("own")
    async with (
        running_server(make_config(**settings(tmp_path, url, "a"))) as one,
        running_server(make_config(**settings(tmp_path, url, "b"))) as two,
    ):
        await until_seen(one, two)
        async with (
            infinistore.open_store(url, token=TOKENS["ann"]) as ann,
            infinistore.open_store(url, token=TOKENS["ben"]) as ben,
        ):
            await ann.put_many([(key, b"ann") for key in KEYS])
            assert not any(await ben.exists_many(KEYS))
            await ben.put_many([(key, b"ben") for key in KEYS])
            assert await ann.get_many(KEYS) == [bytearray(b"ann")] * 64
        assert len(one.core) + len(two.core) == 128
        assert min(len(one.core), len(two.core)) > 0


@needs_etcd
async def test_a_node_that_does_not_know_a_tenant_is_named(etcd: Etcd, tmp_path: Path) -> None:
    url = etcd.url_of("strange")
    other = tenants_file(tmp_path, "ann", "nodes")
    async with (
        running_server(make_config(**settings(tmp_path, url, "a"))) as one,
        running_server(make_config(**settings(tmp_path, url, "b", tenants=other))) as two,
    ):
        await until_seen(one, two)
        with pytest.raises(AuthenticationFailed, match=r"none of this server's.* \(the node b at infinistore://"):
            async with infinistore.open_store(url, token=TOKENS["ben"]):
                raise AssertionError("it opens")


async def test_a_refusal_is_logged_once_until_it_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = iter([TOKENS["ben"], TOKENS["ben"], TOKENS["ann"], TOKENS["ben"]])
    async with running_server(make_config(tenants=tenants_file(tmp_path, "ann"))) as server:
        instance = server.server.telemetry.instance
        node = Node("b", f"infinistore://127.0.0.1:{server.server.addresses.port}", instance)
        ask = instance_asker(lambda: next(tokens), on_answer=Refusals().note)
        with caplog.at_level(logging.WARNING, "infinistore.cluster"):
            assert [await ask(node) for _ in range(4)] == ["", "", instance, ""]
    said = [record for record in caplog.records if record.name == "infinistore.cluster"]
    assert [record.getMessage() for record in said] == ["another node refuses this one"] * 2
    assert said[0].__dict__["node"] == "b"


async def test_a_token_for_nodes_that_is_no_tenants_is_refused(tmp_path: Path) -> None:
    given = settings(tmp_path, "infinistore+etcd://127.0.0.1:1/c", "a", tenants=tenants_file(tmp_path, "ann", "ben"))
    problem = r"peer_token_file: the token in .*peer.token is that of no tenant of this server; make one with"
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=problem), allow_unwrapped=True, flatten_subgroups=True):
        await run_server(make_config(**given), on_listening=lambda server: None)


async def test_the_token_for_nodes_is_read_again(tmp_path: Path) -> None:
    given = settings(tmp_path, "infinistore+etcd://127.0.0.1:1/c", "a")
    async with running_server(make_config(**given)) as server:
        private(given["peer_token_file"], TOKENS["ann"])
        assert await server.server.reloads.run() == []
        private(given["peer_token_file"], make_token("nodes", os.urandom))
        (problem,) = await server.server.reloads.run()
        assert "that of no tenant" in problem


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"tenants": Path("t"), "cluster": "infinistore+etcd://h/c"},
            "tenants: in a cluster need --peer-token-file FILE",
        ),
        ({"tenants": Path("t"), "peer_token_file": Path("p")}, "peer_token_file: goes with --tenants and --cluster"),
        ({"cluster": "infinistore+etcd://h/c", "peer_token_file": Path("p")}, "goes with --tenants and --cluster"),
    ],
)
def test_what_nodes_need_is_said(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServerConfig(**given)
