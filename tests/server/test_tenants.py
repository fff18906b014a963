"""Tenants of a running server: who is let in, what each may do, and what a reload
changes, over real sockets.
"""

import mmap
import os
from collections.abc import AsyncIterator
from functools import partial
from operator import gt
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from infinistore import open_store
from infinistore.access.identity import ALL_ROLES, Identity, Proof, Role, in_words
from infinistore.access.tenants import digest_of, make_token
from infinistore.config import ServerConfig
from infinistore.errors import AuthenticationFailed, ConfigError, InfiniStoreException, PermissionDenied
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    ONE_WAY,
    REPLIES,
    Evict,
    Exists,
    Get,
    Hello,
    Keys,
    MapArenas,
    MapArenasReply,
    Purge,
    Put,
    PutReply,
    Statistics,
)
from infinistore.server.composition import run_server
from infinistore.server.session.session import OF_OPERATORS, ROLES, refusals
from infinistore.tenant_limits import TenantLimits
from infinistore.transports.base import drive
from infinistore.transports.tls.session import TlsSession, client_context
from infinistore.transports.tls.trio_stream import TlsStream
from tests.server.http_client import Answer, ask
from tests.server.running import Peer, RunningServer, make_config, peer_with, running_server, until
from tests.transports.certificates import issue

TOKENS = {name: make_token(name, os.urandom) for name in ("alice", "bob", "ops")}
VALUE = b"x" * 100


def entry(name: str, *tokens: str, **keys: str) -> str:
    lines = [f"  {name}:", f"    tokens: [{', '.join(map(digest_of, tokens))}]"]
    return "\n".join(lines + [f"    {key}: {value}" for key, value in keys.items()]) + "\n"


def everybody(**changed: str) -> str:
    entries = {
        "alice": entry("alice", TOKENS["alice"]),
        "bob": entry("bob", TOKENS["bob"], roles="[read]"),
        "ops": entry("ops", TOKENS["ops"], roles="[admin, monitor, read, write]", operator="true"),
    } | changed
    return "tenants:\n" + "".join(entries.values())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    write(path, everybody())
    return path


@pytest.fixture
async def server(file: Path) -> AsyncIterator[RunningServer]:
    async with running_server(make_config(tenants=file)) as server:
        yield server


def write(path: Path, text: str | None) -> None:
    """Replace the file; None removes it."""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
        path.chmod(0o600)


async def peer_of(server: RunningServer, name: str, transport: str = "tcp") -> Peer:
    return await peer_with(server, TOKENS[name], transport)


def put_of(key: str) -> Put:
    return Put(Keys([key]), pack_u64([len(VALUE)]), checksums=False)


async def put(peer: Peer, key: str) -> object:
    return await peer.ask(put_of(key), VALUE)


async def manage(server: RunningServer, method: str, path: str, name: str = "") -> Answer:
    headers = {"Authorization": f"Bearer {TOKENS[name]}"} if name else {}
    return await ask(server.server.addresses.management[0], method, path, headers=headers)


def test_every_request_of_the_protocol_has_roles() -> None:
    assert set(ROLES) == {*REPLIES, *ONE_WAY}
    assert all(ROLES.values())


@pytest.mark.parametrize("roles", [frozenset({role}) for role in Role] + [frozenset(), ALL_ROLES], ids=in_words)
def test_what_no_role_allows_is_refused_and_nothing_else(roles: frozenset[Role]) -> None:
    identity = Identity("a", roles, TenantLimits("a"), Proof.TOKEN, operator=True)
    assert set(refusals(identity)) == {kind for kind, needed in ROLES.items() if not needed & roles}


def test_no_role_lets_a_tenant_take_the_whole_server_over() -> None:
    identity = Identity("a", ALL_ROLES, TenantLimits("a"), Proof.TOKEN)
    assert set(refusals(identity)) == OF_OPERATORS


async def test_only_a_tenant_is_let_in_and_what_it_calls_itself_does_not_count(server: RunningServer) -> None:
    alice = await peer_of(server, "alice")
    assert isinstance(await put(alice, "k"), PutReply)
    for name, token in [
        ("alice", ""),
        (TOKENS["alice"], ""),
        ("alice", "bob." + TOKENS["alice"].partition(".")[2]),
    ]:
        stranger = await server.stranger()
        with pytest.raises(AuthenticationFailed):
            await stranger.ask(Hello(name=name[:64], token=token))
        stranger.close()


async def test_a_request_without_its_role_is_refused_and_the_connection_goes_on(server: RunningServer) -> None:
    bob = await peer_of(server, "bob")
    with pytest.raises(PermissionDenied, match="Put needs the role write, and tenant bob has read;"):
        await put(bob, "k")
    for request in (Purge(), Evict(0.0, 0.0), Statistics()):
        with pytest.raises(PermissionDenied, match=f"{type(request).__name__} needs the role"):
            await bob.ask(request)
    await bob.ask(Exists(Keys(["k"])))


async def test_who_may_only_read_maps_the_pool_for_reading_and_who_may_not_read_maps_nothing(
    file: Path, tmp_path: Path
) -> None:
    alice = entry("alice", TOKENS["alice"], roles="[write]", group="team")
    bob = entry("bob", TOKENS["bob"], roles="[read]", group="team")
    write(file, f"groups: {{team: 64KiB}}\ntenants:\n{alice}{bob}")
    async with running_server(make_config(tenants=file, unix_socket=str(tmp_path / "s"))) as server:
        for name, arenas in [("bob", 1), ("alice", 0)]:
            reply = await (await peer_of(server, name, "unix")).ask(MapArenas())
            assert isinstance(reply, MapArenasReply)
            assert (len(reply.lengths), reply.writable) == (arenas, False)


@pytest.mark.parametrize("order", [("bob", "alice"), ("alice", "bob")], ids="-".join)
async def test_who_may_only_read_cannot_map_for_writing_and_keeps_nobody_else_from_it(
    order: tuple[str, str], file: Path, tmp_path: Path
) -> None:
    value = b"x" * 300_000
    text = everybody(
        alice=entry("alice", TOKENS["alice"], group="team"),
        bob=entry("bob", TOKENS["bob"], roles="[read]", group="team"),
        ops="",
    )
    write(file, "groups: {team: 2MiB}\n" + text)
    config = make_config(tenants=file, unix_socket=str(tmp_path / "s"), shm_writes="on", prealloc_bytes=4 << 20)
    async with running_server(config) as server:
        url = f"shm://{server.unix_path}"
        for name in order:
            async with open_store(url, token=TOKENS[name]) as store:
                if name == "alice":
                    await store.put("k", value)
                else:
                    with pytest.raises(PermissionDenied):
                        await store.put("k", value)
        async with open_store(url, token=TOKENS["alice"]) as alice:
            await alice.put("k", value)
            assert await alice.get("k") == value
        peer = await peer_of(server, "bob", "unix")
        descriptors: list[int] = []
        await drive(peer.connection.request(MapArenas(), descriptors=descriptors), peer.stream)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(descriptors[0], 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


async def reload(server: RunningServer) -> Answer:
    return await manage(server, "POST", "/reload", "ops")


async def test_a_revoked_token_ends_its_sessions_and_others_notice_nothing(server: RunningServer, file: Path) -> None:
    alice, bob = await peer_of(server, "alice"), await peer_of(server, "bob")
    busy = await peer_of(server, "alice")
    await busy.send_head(put_of("half"), payload_bytes=len(VALUE))  # in the middle of a request
    write(file, everybody(alice=entry("alice", make_token("alice", os.urandom))))
    assert (await reload(server)).json == {"status": "ok"}
    with pytest.raises(InfiniStoreException):  # told why, unless the connection is gone first
        await alice.ask(Exists(Keys(["k"])))
    while await busy.stream.receive_into([memoryview(bytearray(4096))]):
        pass
    again = await server.stranger()
    with pytest.raises(AuthenticationFailed, match="was revoked"):
        await again.hello(TOKENS["alice"])
    await bob.ask(Get(Keys(["k"]), pack_u64()))


async def test_an_idle_session_is_told_that_its_tenant_was_removed(server: RunningServer, file: Path) -> None:
    bob = await peer_of(server, "bob")
    write(file, everybody(bob=""))
    await reload(server)
    with pytest.raises(AuthenticationFailed, match="revoked, or its tenant removed"):
        await bob.ask(Exists(Keys(["k"])))


async def test_roles_change_for_open_sessions(server: RunningServer, file: Path) -> None:
    alice, bob = await peer_of(server, "alice"), await peer_of(server, "bob")
    write(
        file,
        everybody(
            alice=entry("alice", TOKENS["alice"], roles="[read]"), bob=entry("bob", TOKENS["bob"], roles="[write]")
        ),
    )
    await reload(server)
    assert isinstance(await put(bob, "k"), PutReply)
    with pytest.raises(PermissionDenied):
        await put(alice, "k")
    with pytest.raises(PermissionDenied):
        await bob.ask(Exists(Keys(["k"])))
    await alice.ask(Exists(Keys(["k"])))


@pytest.mark.parametrize(
    "broken",
    [
        "tenants:\n  carol: {}\n  dave:\n    rols: []\n",
        "",
        "tenants:\n  carol: {}\n  carol: {}\n",
        None,
    ],
    ids=["line 4", "empty", "twice", "missing"],
)
async def test_a_file_that_cannot_be_used_changes_nothing(
    server: RunningServer, broken: str | None, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alice = await peer_of(server, "alice")
    write(file, broken)
    answer = await reload(server)
    assert answer.status == 409
    assert answer.json["error"].startswith(str(file))
    assert "the tenants stay as they were" in caplog.text
    await alice.ask(Exists(Keys(["k"])))
    (await peer_of(server, "bob")).close()


def all_have_gone_on(counts: list[int], before: list[int]) -> bool:
    return all(map(gt, counts, before))


async def test_a_reload_under_load_drops_no_valid_session(file: Path) -> None:
    """Clients of two tenants go on while the file is read again and again, and a third
    is added and removed.
    """
    carol = make_token("carol", os.urandom)
    async with running_server(make_config(tenants=file)) as server, trio.open_nursery() as nursery:
        done = trio.Event()
        counts = [0] * 4

        async def work(index: int) -> None:
            peer = await peer_of(server, ("alice", "ops")[index % 2])
            while not done.is_set():
                await put(peer, f"k{index}")
                await peer.ask(Exists(Keys([f"k{index}"])))
                counts[index] += 1
            peer.close()

        for index in range(len(counts)):
            nursery.start_soon(work, index)
        for turn in range(10):
            write(file, everybody(carol=entry("carol", carol)) if turn % 2 else everybody())
            assert (await reload(server)).status == 200
            await until(partial(all_have_gone_on, counts, list(counts)))
        done.set()


async def test_the_management_api_wants_an_operator_with_the_role(file: Path) -> None:
    write(file, everybody(bob=entry("bob", TOKENS["bob"], roles="[monitor]", operator="true")))
    async with running_server(make_config(tenants=file)) as server:
        assert (await manage(server, "GET", "/healthz")).status == 200
        assert (await manage(server, "GET", "/stats")).status == 401
        refused = await manage(server, "GET", "/stats", "alice")
        assert refused.status == 403
        assert "adds operator: true" in refused.json["error"]
        for path in ("/stats", "/metrics", "/kvmap_len", "/clients"):
            assert (await manage(server, "GET", path, "bob")).status == 200
        for path in ("/purge", "/evict", "/reload", "/selftest"):
            refused = await manage(server, "POST", path, "bob")
            assert refused.status == 403
            assert f"POST {path} needs the role admin, and tenant bob has monitor" in refused.json["error"]
        assert (await manage(server, "POST", "/purge", "ops")).json == {"status": "ok", "num": 0}


async def test_the_self_test_comes_as_the_operator_who_asked(server: RunningServer) -> None:
    assert (await manage(server, "POST", "/selftest", "ops")).json["status"] == "ok"
    assert (await manage(server, "GET", "/selftest", "ops")).json["status"] == "ok"


async def test_the_user_of_a_unix_socket_names_the_tenant(file: Path, tmp_path: Path) -> None:
    write(file, everybody(alice=entry("alice", uids=f"[{os.getuid()}]", roles="[read]")))
    async with running_server(make_config(tenants=file, unix_socket=str(tmp_path / "s"))) as server:
        peer = await server.local_peer()
        with pytest.raises(PermissionDenied, match="tenant alice"):
            await put(peer, "k")
        with pytest.raises(AuthenticationFailed, match="nothing says which one"):
            await server.peer()  # over TCP, nobody says who that is
        write(file, everybody(alice=""))
        await reload(server)
        with pytest.raises(AuthenticationFailed):
            await peer.ask(Exists(Keys(["k"])))


async def test_a_client_certificate_names_the_tenant(file: Path, tmp_path: Path) -> None:
    files = issue(tmp_path)
    mine = issue(tmp_path, "worker.example", ca="clients", stem="client")
    write(file, everybody(alice=entry("alice", certificates="[DNS:Worker.example]", roles="[read]")))
    config = make_config(tenants=file, tls_cert=files.cert, tls_key=files.key, tls_client_ca=mine.ca)
    async with running_server(config) as server:
        session = TlsSession(client_context(files.ca, mine.cert, mine.key), "the server", host_name="127.0.0.1")
        peer = await server.greet(TlsStream(await server.connect(), session))
        with pytest.raises(PermissionDenied, match="tenant alice"):
            await put(peer, "k")


@pytest.mark.parametrize(
    ("text", "settings", "problem"),
    [
        ("tenants:\n  a: {}\n  b: {rols: []}\n", {}, "tenants.yaml:3: tenant b has no key 'rols'"),
        ("tenants: {a: {certificates: ['DNS:x']}}", {}, "`certificates:` needs --tls-client-ca FILE"),
        ("tenants: {a: {uids: [1]}}", {}, "`uids:` needs --unix-socket, which is off"),
    ],
)
async def test_a_server_does_not_start_with_a_file_that_it_cannot_use(
    text: str, settings: dict[str, object], problem: str, file: Path
) -> None:
    write(file, text)
    with pytest.raises(ConfigError) as refused:
        await run_server(make_config(tenants=file, **settings), on_listening=lambda server: None)
    assert problem in str(refused.value)


def test_tenants_do_not_go_together_with_one_token_and_are_enough_beyond_loopback(file: Path) -> None:
    with pytest.raises(ConfigError, match="tenants: does not go together with --token-file"):
        make_config(tenants=file, token_file=file)
    with pytest.raises(ConfigError, match="in a cluster need --peer-token-file FILE"):
        make_config(tenants=file, cluster="infinistore+etcd://127.0.0.1:2379/c")
    assert ServerConfig(tenants=file, host="0.0.0.0", manage_host="0.0.0.0").tenants == file
