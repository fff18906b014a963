"""A tenant that must come over TLS: by which ways it is let in, and what it is told
where it is not.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import infinistore
from infinistore.access.tenants import digest_of, make_token
from infinistore.errors import ConfigError, InfiniStoreException, PermissionDenied, StoreUnavailable
from infinistore.protocol.messages import Exists, Keys
from infinistore.server.composition import run_server
from tests.clients.rdma_serving import VALUE, serving
from tests.server.http_client import Answer, ask, ask_over
from tests.server.running import Peer, RunningServer, connect_tls, make_config, peer_with, running_server
from tests.transports.certificates import Files, issue

TOKENS = {name: make_token(name, os.urandom) for name in ("alice", "bob", "ops")}
TOLD = (
    "tenant alice must come over TLS (require_tls in the tenants file), and this connection has none: connect with "
    "infinistores://HOST:PORT?ca=FILE, for which the server needs --tls-cert, or on its machine by its Unix socket"
)


def text_of(**demanding: bool) -> str:
    roles = {"ops": "[read, write, monitor, admin]\n    operator: true"}
    return "groups: {team: 2MiB}\ntenants:\n" + "".join(
        f"  {name}:\n    tokens: [{digest_of(token)}]\n    roles: {roles.get(name, '[read, write, monitor]')}\n"
        f"    group: team\n    require_tls: {str(demanding.get(name, False)).lower()}\n"
        for name, token in TOKENS.items()
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    write(path, text_of(alice=True))
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path)


def tls(files: Files) -> dict[str, Any]:
    return {"tls_cert": files.cert, "tls_key": files.key}


async def test_it_is_refused_in_the_clear_and_let_in_where_nothing_leaves_the_machine(
    file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "audit"
    config = make_config(tenants=file, unix_socket=str(tmp_path / "s"), audit_log=str(log))
    async with running_server(config) as server:
        with pytest.raises(PermissionDenied) as refused:
            async with infinistore.open_store(server.url, token=TOKENS["alice"]):
                pass
        assert str(refused.value) == TOLD
        async with infinistore.open_store(server.url, token=TOKENS["bob"]) as store:
            await store.put("key", VALUE)
        for scheme in ("unix", "shm"):
            async with infinistore.open_store(f"{scheme}://{server.unix_path}", token=TOKENS["alice"]) as store:
                await store.put("key", VALUE)
                assert await store.get("key") == VALUE
                assert (await store.stats()).transport == scheme
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["reason"] for event in events if event["event"] == "refused"] == [f"PermissionDenied: {TOLD}"]


async def test_over_tls_its_blocks_go_by_no_rdma(file: Path, files: Files) -> None:
    """Others of the same server may: what is not encrypted is theirs to choose."""
    async with serving(tenants=file, **tls(files)) as (_, server):
        port = server.server.addresses.port
        given: dict[str, Any] = {"unencrypted_rdma": True, "device": "fake1", "inline_bytes": 0, "deadline_s": 5}
        for name, transport in (("alice", "tls"), ("bob", "rdma")):
            url = f"infinistores://127.0.0.1:{port}?ca={files.ca}"
            async with infinistore.open_store(url, token=TOKENS[name], **given) as store:
                await store.put("key", VALUE)
                assert await store.get("key") == VALUE
                stats = await store.stats()
                assert stats.transport == transport
                assert name == "bob" or "alice must come over TLS" in stats.transport_reason
        forced = f"rdma://127.0.0.1:{port}?ca={files.ca}&transport=rdma"
        with pytest.raises(StoreUnavailable, match="RDMA encrypts no blocks; leave out device") as refused:
            async with infinistore.open_store(forced, token=TOKENS["alice"], **given) as store:
                await store.put("key", VALUE)
        assert "\n" not in str(refused.value)
        await server.quiet()


async def peer_of(server: RunningServer, name: str, files: Files | None = None) -> Peer:
    return await peer_with(server, TOKENS[name], files=files)


async def test_who_must_come_over_tls_from_now_on_is_ended_in_the_clear(file: Path, tmp_path: Path) -> None:
    write(file, text_of())
    async with running_server(make_config(tenants=file, unix_socket=str(tmp_path / "s"))) as server:
        alice, bob = await peer_of(server, "alice"), await peer_of(server, "bob")
        write(file, text_of(alice=True))
        assert await server.server.reloads.run() == []
        with pytest.raises(InfiniStoreException):
            await alice.ask(Exists(Keys(["key"])))
        with pytest.raises(PermissionDenied, match="alice must come over TLS"):
            await peer_of(server, "alice")
        await bob.ask(Exists(Keys(["key"])))


async def test_who_comes_over_tls_already_notices_nothing(file: Path, files: Files) -> None:
    write(file, text_of())
    async with running_server(make_config(tenants=file, **tls(files))) as server:
        url = f"infinistores://127.0.0.1:{server.server.addresses.port}?ca={files.ca}"
        async with infinistore.open_store(url, token=TOKENS["alice"]) as store:
            for demanded in (True, False, True):
                await store.put("key", VALUE)
                write(file, text_of(alice=demanded))
                assert await server.server.reloads.run() == []
                assert await store.get("key") == VALUE


async def manage(server: RunningServer, path: str, files: Files | None) -> Answer:
    address, headers = server.server.addresses.management[0], {"Authorization": f"Bearer {TOKENS['ops']}"}
    if files is None:
        return await ask(address, "GET", path, headers=headers)
    stream = await connect_tls(address, files)
    try:
        return await ask_over(stream, "GET", path, headers=headers)
    finally:
        stream.close()


@pytest.mark.parametrize("encrypted", [True, False], ids=["https", "http"])
async def test_it_asks_the_management_api_by_https_only(
    encrypted: bool, file: Path, files: Files, tmp_path: Path
) -> None:
    write(file, text_of(ops=True))
    config = make_config(tenants=file, unix_socket=str(tmp_path / "s"), **(tls(files) if encrypted else {}))
    async with running_server(config) as server:
        answer = await manage(server, "/tenants", files if encrypted else None)
    if encrypted:
        assert answer.status == 200
    else:
        assert answer.status == 403
        assert "tenant ops must come over TLS" in answer.json["error"]
        assert "https://" in answer.json["error"]


async def test_a_server_by_which_it_cannot_come_does_not_start(file: Path) -> None:
    with pytest.raises(ConfigError, match="`require_tls:` needs --tls-cert FILE, or --unix-socket"):
        await run_server(make_config(tenants=file), on_listening=lambda server: None)
