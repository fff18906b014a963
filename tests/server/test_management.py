"""The management API of a running server, over real sockets: what it tells, what it
does, and who may ask for it.
"""

import base64
import hashlib
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from infinistore import open_store
from infinistore.config import ServerConfig
from infinistore.core import Arena, create_arena
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Keys, Put
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from infinistore.server.listeners import Listeners, open_listeners
from infinistore.server.management import operations
from infinistore.server.management.selftest import SELFTEST_PREFIX, check_transports
from infinistore.statistics import (
    ClientStatistics,
    DiskStatistics,
    DiskTierStatistics,
    ListedNode,
    MembershipStatistics,
    ServerDetails,
    ServerStatistics,
    StoreStatistics,
)
from tests.disk_io.faulty_runner import Fail, Rot
from tests.server.http_client import Answer, ask, ask_over
from tests.server.running import KIB, MIB, POOL_BYTES, RunningServer, connect_tls, make_config, running_server
from tests.server.test_disk_faults import Faults
from tests.transports.certificates import issue

HOME = Path(operations.__file__).with_name("home.html")
TOKEN = "a-secret-\N{SNOWMAN}"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}".encode().decode("latin-1")}


async def get(server: RunningServer, path: str) -> Answer:
    return await ask(server.server.addresses.management[0], "GET", path)


async def post(server: RunningServer, path: str, body: bytes = b"", *, headers: dict[str, str] | None = None) -> Answer:
    return await ask(server.server.addresses.management[0], "POST", path, body=body, headers=headers)


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with running_server() as server:
        yield server


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


# What it tells


async def test_a_running_server_is_healthy_and_ready(server: RunningServer) -> None:
    for path, expected in (("/healthz", {"status": "ok"}), ("/readyz", {"state": "serving"})):
        answer = await get(server, path)
        assert (answer.status, answer.json) == (200, expected)
        assert answer.headers["content-type"] == "application/json"


async def test_a_server_is_healthy_but_not_ready_while_its_pool_is_made() -> None:
    may_go_on = threading.Event()
    addresses: list[tuple[str, int]] = []
    waiting = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def slow_arena(index: int, length: int, **options: Any) -> Arena:
        trio.from_thread.run_sync(waiting.set, trio_token=token)
        may_go_on.wait()
        return create_arena(index, length, **options)

    def listening(config: ServerConfig, resources: ExitStack) -> Listeners:
        found = open_listeners(config, resources)
        addresses.extend(found.addresses.management)
        return found

    environment = Environment(open_listeners=listening, create_arena=slow_arena)
    async with trio.open_nursery() as nursery:
        run = partial(run_server, make_config(), environment=environment, on_listening=lambda server: None)
        nursery.start_soon(run)
        await waiting.wait()
        try:
            assert (await ask(addresses[0], "GET", "/healthz")).status == 200
            answer = await ask(addresses[0], "GET", "/readyz")
            assert (answer.status, answer.json) == (503, {"state": "starting"})
            for path in ("/stats", "/metrics", "/kvmap_len", "/selftest", "/clients"):
                answer = await ask(addresses[0], "GET", path)
                assert (answer.status, "starting" in answer.json["error"]) == (503, True)
            assert (await ask(addresses[0], "POST", "/purge")).status == 503
        finally:
            may_go_on.set()
        nursery.cancel_scope.cancel()


async def test_a_server_that_drains_is_healthy_but_not_ready(server: RunningServer) -> None:
    peer = await server.peer()
    await peer.send_head(Put(Keys(["a", "b"]), pack_u64([500, 500]), checksums=False), payload_bytes=1000)
    await server.until(reservations=1)  # before, the session would end at once
    server.server.drain()
    await trio.testing.wait_all_tasks_blocked()
    answer = await get(server, "/readyz")
    assert (answer.status, answer.json) == (503, {"state": "draining"})
    assert (await get(server, "/healthz")).status == 200


async def test_the_paths_of_the_original_answer_as_they_did() -> None:
    async with running_server() as server, open_store(server.url) as store:
        await store.put_many([("a", b"1"), ("b", b"2")])
        assert (await get(server, "/kvmap_len")).json == {"len": 2}
        assert (await post(server, "/purge")).json == {"status": "ok", "num": 2}
        assert (await get(server, "/kvmap_len")).json == {"len": 0}
        answer = await get(server, "/selftest")
        assert (answer.status, answer.json["status"]) == (200, "ok")


async def test_statistics_are_those_of_the_clients() -> None:
    async with running_server() as server, open_store(server.url, name="me") as store:
        await store.put("a", bytes(100))
        plain = (await get(server, "/stats")).json
        detailed = (await get(server, "/stats?details=true")).json
        clients = (await get(server, "/clients")).json["clients"]
        assert (await get(server, "/stats?details=perhaps")).status == 400
    assert (plain["store"]["keys"], plain["server"]["requests"]) == (1, 1)
    assert set(plain) == {"server", "store", "settings"}
    assert (plain["settings"]["prealloc_bytes"], plain["settings"]["host"]) == (POOL_BYTES, "127.0.0.1")
    assert [one["kind"] for one in detailed["details"]["operations"]] == ["put"]
    assert [(one["name"], one["requests"], one["received_bytes"]) for one in clients] == [("me", 1, 108)]


async def test_the_page_for_people_needs_no_token_has_no_figures_and_runs_its_own_script_only(token_file: Path) -> None:
    async with running_server(make_config(token_file=token_file)) as server:
        answer = await get(server, "/")
        assert (await get(server, "/stats")).status == 401
        described = (await ask(server.server.addresses.management[0], "GET", "/openapi.json", headers=AUTHORIZED)).json
    page = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    (script,) = re.findall(r"<script>(.*)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in answer.headers["content-security-policy"]
    assert not re.search(r"//\w|src=|@import", page)  # nothing comes from elsewhere
    asked = set(re.findall(r'href="(\w[\w.]*)|get\("(\w+)', page))
    assert {f"/{a or b}" for a, b in asked} <= {*described["paths"], "/openapi.json"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("store", StoreStatistics),
        ("server", ServerStatistics),
        ("details", ServerDetails),
        ("client", ClientStatistics),
        ("one", DiskStatistics),
        ("disk", DiskTierStatistics),
        ("cluster", MembershipStatistics),
        ("node", ListedNode),
    ],
)
def test_the_page_for_people_shows_figures_that_there_are(name: str, kind: type) -> None:
    shown = set(re.findall(rf"\b{name}\.(\w+)", HOME.read_text()))
    assert shown
    assert shown <= {field.name for field in attrs.fields(kind)}


async def test_what_is_not_there_is_said_to_be_not_there(server: RunningServer) -> None:
    for path in ("//", "/purge/", "/%00", "/stats/../purge"):
        answer = await get(server, path)
        assert (answer.status, answer.json) == (404, {"error": "Not Found"})
    answer = await get(server, "/purge")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


# What it does


@pytest.mark.parametrize(
    ("path", "body", "left"),
    [
        ("/evict?min=0.25&max=0.5", b"", 0.25),
        ("/evict", b'{"min": 0.25, "max": 0.5}', 0.25),
        ("/evict?min=0&max=0.5", b'{"min": 0.5}', 0.5),
        ("/evict", b'{"min": 0, "max": 0}', 0),
        ("/evict", b"", 0.6),
        ("/evict?max=1", b"", 0.9),
    ],
    ids=["query", "body", "both", "everything", "as set", "not full enough"],
)
async def test_evict_goes_down_to_its_lower_bound(path: str, body: bytes, left: float) -> None:
    blocks = POOL_BYTES // KIB
    async with running_server() as server, open_store(server.url) as store:
        await store.put_many([(str(i), bytes(KIB)) for i in range(blocks * 9 // 10)])
        answer = await post(server, path, body)
        assert answer.json["num"] == blocks * 9 // 10 - int(blocks * left)
        assert (await store.stats()).store.evicted.manual == answer.json["num"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/evict?min=2", b"", "min must be a number between 0 and 1"),
        ("/evict?max=nan", b"", "max must be a number"),
        ("/evict?max=NaN", b"", "max must be a number"),
        ("/evict?max=true", b"", "max must be a number"),
        ("/evict", b'{"min": null}', "min must be a number"),
        ("/evict", b'{"min": 1e999}', "min must be a number"),
        ("/evict?min=0.9&max=0.1", b"", "min (0.9) must not be above max (0.1)"),
        ("/evict?low=0.9", b"", "there is no parameter 'low'"),
        ("/evict", b"min=0.1", "the body is not JSON"),
        ("/evict", b"\xff\xfe", "the body is not JSON"),
        ("/evict", b"[" * 60_000, "the body is not JSON"),
        ("/evict", b"[0.1, 0.2]", "the body must be an object"),
    ],
)
async def test_wrong_bounds_are_refused_in_words(path: str, body: bytes, words: str) -> None:
    async with running_server() as server, open_store(server.url) as store:
        await store.put("a", b"1")
        answer = await post(server, path, body)
        assert (answer.status, words in answer.json["error"]) == (400, True), answer.json
        assert await store.exists("a")


async def test_a_huge_body_is_refused(server: RunningServer) -> None:
    assert (await post(server, "/evict", b" " * (64 * KIB + 1))).status == 413
    assert (await post(server, "/evict", b" " * (64 * KIB - 2) + b"{}")).status == 200


# The self-test


async def test_the_self_test_goes_over_every_transport_and_leaves_nothing_and_by_get_changes_nothing(
    tmp_path: Path,
) -> None:
    async with running_server(make_config(unix_socket=str(tmp_path / "s"))) as server:
        for ask_for, written in ((get, []), (post, ["tcp", "unix"])):
            answer = await ask_for(server, "/selftest")
            assert [tuple(one[key] for key in ("transport", "ok", "error")) for one in answer.json["transports"]] == [
                ("tcp", True, ""),
                ("unix", True, ""),
            ]
            assert set(answer.json) == {"status", "transports"}  # there are no disks
            assert answer.status == 200
            changes = [one.transport for one in server.server.telemetry.operations() if one.kind != "exists"]
            assert sorted(set(changes)) == written
        assert (await get(server, "/kvmap_len")).json == {"len": 0}


async def test_the_self_test_says_which_transport_failed_and_why(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running_server(make_config(unix_socket=str(path))) as server:
        path.unlink()
        answer = await post(server, "/selftest")
        tcp, unix = answer.json["transports"]
        assert (answer.status, answer.json["status"], tcp["ok"], unix["ok"]) == (503, "failed", True, False)
        assert "StoreUnavailable: cannot connect to" in unix["error"]
        path.touch()  # the server removes its socket when it stops


async def test_the_self_test_shows_a_full_server() -> None:
    async with running_server(make_config(max_connections=1)) as server:
        await server.peer()
        answer = await post(server, "/selftest")
        assert "LimitExceeded" in answer.json["transports"][0]["error"]


async def test_the_self_test_of_a_server_with_a_token_shows_it(token_file: Path) -> None:
    async with running_server(make_config(token_file=token_file)) as server:
        assert (await post(server, "/selftest", headers=AUTHORIZED)).status == 200
        (check,) = await check_transports(server.server.addresses, "another")
        assert (check.ok, check.error.partition(":")[0]) == (False, "AuthenticationFailed")


async def test_the_self_test_finds_bytes_that_are_not_what_was_written(server: RunningServer) -> None:
    real_write = server.core.write_one

    def damaging(client: Any, key: str, value: memoryview, *arguments: Any, **more: Any) -> bool:
        damaged = bytearray(value)
        damaged[7] ^= 1
        return real_write(client, key, memoryview(damaged), *arguments, **more)

    with mock.patch.object(server.core, "write_one", damaging):
        (check,) = (await post(server, "/selftest")).json["transports"]
    assert check["error"] == "ChecksumMismatch: wrote 4096 bytes, and read other bytes"
    assert server.core.keys(prefix=SELFTEST_PREFIX) == []


async def test_the_self_test_reads_a_block_back_from_disk(tmp_path: Path) -> None:
    config = make_config(disks=(DiskPlace(tmp_path / "disk", 64 * MIB),))
    async with running_server(config) as server, open_store(server.url) as store:
        await store.put("mine", b"1")
        answer = await post(server, "/selftest")
        assert (answer.status, answer.json["status"]) == (200, "ok")
        assert (answer.json["disks"]["ok"], answer.json["disks"]["error"]) == (True, "")
        stats = await store.stats()
        assert stats.disk is not None
        assert (stats.disk.promoted_blocks, stats.store.evicted.manual) == (1, 1)
        assert await store.keys(SELFTEST_PREFIX) == []
        assert await store.get("mine") == b"1"


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (Faults(writes=Fail()), "StoreUnavailable: no disk could be written; see"),
        (Faults(reads=Rot()), "ChecksumMismatch: wrote 4096 bytes, and read nothing"),
    ],
    ids=["not written", "not read back"],
)
async def test_the_self_test_finds_what_is_wrong_with_disks(tmp_path: Path, faults: Faults, problem: str) -> None:
    config = make_config(disks=(DiskPlace(tmp_path / "disk", 64 * MIB),))
    async with running_server(config, Environment(open_disks=faults.open_disks)) as server:
        answer = await post(server, "/selftest")
        assert (answer.status, answer.json["status"]) == (503, "failed")
        assert [one["ok"] for one in answer.json["transports"]] == [True]
        assert answer.json["disks"]["error"].startswith(problem)
        assert server.core.keys(prefix=SELFTEST_PREFIX) == []


async def test_one_self_test_at_a_time(server: RunningServer) -> None:
    answers: list[Answer] = []

    async def test() -> None:
        answers.append(await post(server, "/selftest"))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(test)
    statuses = [answer.status for answer in answers]
    assert 200 in statuses
    assert set(statuses) <= {200, 503}


async def test_a_wildcard_address_is_tested_through_loopback() -> None:
    async with running_server(make_config(host="0.0.0.0", insecure=True)) as server:
        assert (await post(server, "/selftest")).json["transports"][0]["ok"]


# Who may


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic a secret", f"Bearer {TOKEN}x".encode().decode("latin-1")]
)
async def test_without_the_token_nothing_is_told_or_changed(token_file: Path, header: str | None) -> None:
    async with running_server(make_config(token_file=token_file)) as server:
        async with open_store(server.url, token=TOKEN) as store:
            await store.put("a", b"1")
            given = {} if header is None else {"Authorization": header}
            for path in ("/purge", "/evict?min=0&max=0"):
                answer = await post(server, path, headers=given)
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == 'Bearer realm="infinistore"'
                assert "Authorization: Bearer" in answer.json["error"]
                says_wrong = answer.json["error"].startswith("the token given is wrong")
                assert says_wrong == bool(header and " " in header)
            assert await store.exists("a")
        for path in ("/stats", "/metrics", "/kvmap_len", "/clients", "/cluster", "/selftest", "/openapi.json"):
            address = server.server.addresses.management[0]
            assert (await ask(address, "GET", path, headers=given)).status == 401
        named = given | {"Host": "x/healthz?"}  # which makes no other path of it
        assert (await ask(server.server.addresses.management[0], "GET", "/stats", headers=named)).status == 401
        for path in ("/healthz", "/readyz"):
            assert (await get(server, path)).status == 200
        assert (await post(server, "/purge", headers=AUTHORIZED)).json["num"] == 1


NAMES = [
    ("127.0.0.1:18080", True),
    ("[::1]:18080", True),
    ("10.0.0.7", True),
    ("localhost:1", True),
    ("LOCALHOST", True),
    ("x.localhost", True),
    (socket.gethostname(), True),
    ("kv.example:18080", True),
    ("evil.example", False),
    ("localhost.evil.example", False),
    ("127.0.0.1.evil.example", False),
    ("[", False),
]


async def test_a_name_that_is_not_the_servers_is_told_nothing_without_a_token(token_file: Path) -> None:
    async with running_server(make_config(manage_allowed_hosts=("kv.example",))) as server:
        address = server.server.addresses.management[0]
        for host, ok in NAMES:
            for method, path in (("GET", "/stats"), ("GET", "/openapi.json"), ("POST", "/purge")):
                answer = await ask(address, method, path, headers={"Host": host})
                assert answer.status == (200 if ok else 421), host
            assert (await ask(address, "GET", "/healthz", headers={"Host": host})).status == 200
        refused = await ask(address, "GET", "/stats", headers={"Host": "evil.example"})
        assert "--manage-allowed-hosts" in refused.json["error"]
    async with running_server(make_config(token_file=token_file)) as server:  # which no page knows
        address = server.server.addresses.management[0]
        assert (await ask(address, "GET", "/stats", headers={"Host": "evil.example", **AUTHORIZED})).status == 200


def test_what_is_no_name_is_refused() -> None:
    for value in (("kv:1",), ("",), ("a b",)):
        with pytest.raises(ConfigError, match="names of hosts without ports"):
            make_config(manage_allowed_hosts=value)


# Over TLS


async def test_the_api_has_the_certificate_of_the_server_and_asks_nobody_for_one(
    tmp_path: Path, token_file: Path
) -> None:
    files = issue(tmp_path)
    config = make_config(tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.ca, token_file=token_file)
    async with running_server(config) as server:
        address = server.server.addresses.management[0]
        for path, expected in (("/healthz", 200), ("/stats", 401)):
            stream = await connect_tls(address, files)
            assert (await ask_over(stream, "GET", path)).status == expected
            stream.close()
        answer = await get(server, "/healthz")
        assert (answer.status, answer.json) == (400, {"error": "this port speaks TLS: use https://"})


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_the_self_test_of_a_server_with_tls_passes(tmp_path: Path, asks_clients: bool) -> None:
    files = issue(tmp_path, ca="clients")
    more = {"tls_client_ca": issue(tmp_path, stem="other").ca} if asks_clients else {}
    config = make_config(tls_cert=files.cert, tls_key=files.key, unix_socket=str(tmp_path / "s"), **more)
    async with running_server(config) as server:
        checks = await check_transports(server.server.addresses, "", tls=server.server.tls)
        assert [(check.transport, check.error) for check in checks] == [("tls", ""), ("unix", "")]
        puts = [one.transport for one in server.server.telemetry.operations() if one.kind == "put"]
        assert puts == (["unix"] if asks_clients else ["tls", "unix"])


async def test_a_web_page_changes_nothing() -> None:
    async with running_server() as server, open_store(server.url) as store:
        await store.put("a", b"1")
        assert (await post(server, "/purge", headers={"Origin": "http://evil.example"})).status == 403
        assert await store.exists("a")


async def test_a_management_port_in_use_is_one_line_with_the_flag(server: RunningServer) -> None:
    port = server.server.addresses.management[0][1]
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=f"port {port} .*in use.*--manage-port")):
        async with running_server(make_config(manage_port=port)):
            pytest.fail("it started")


async def test_management_can_be_off() -> None:
    async with running_server(make_config(manage_port=None)) as server:
        assert server.server.addresses.management == ()


def test_management_beyond_loopback_wants_a_token(token_file: Path) -> None:
    with pytest.raises(ConfigError, match="manage_host"):
        make_config(manage_host="0.0.0.0")
    make_config(manage_host="0.0.0.0", token_file=token_file)
    make_config(manage_host="0.0.0.0", insecure=True)
    make_config(manage_host="0.0.0.0", manage_port=None)


# The OpenAPI document


@contextmanager
def server_in_a_thread(token_file: Path, **more: Any) -> Iterator[str]:
    """A server for clients that block: gives the URL of its management API."""
    started = threading.Event()
    found: list[Any] = []

    async def main() -> None:
        async with (
            running_server(make_config(token_file=token_file, **more)) as server,
            open_store(server.url, token=TOKEN) as store,
        ):
            await store.put("a", b"1")
            stop = trio.Event()
            found.extend([server.server.addresses.management[0][1], stop, trio.lowlevel.current_trio_token()])
            started.set()
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    try:
        assert started.wait(60)
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        found[2].run_sync_soon(found[1].set)
        thread.join()


@pytest.mark.parametrize("has_disks", [False, True], ids=["memory", "disks"])
def test_the_api_is_what_its_openapi_document_says(token_file: Path, tmp_path: Path, has_disks: bool) -> None:
    examples = settings(
        max_examples=15 if has_disks else 3,  # disks are in one answer; all else is the same
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    disks = (DiskPlace(tmp_path / "disk", 64 * MIB),) if has_disks else ()
    with server_in_a_thread(token_file, disks=disks) as url:
        authorized = {"Authorization": b"Bearer " + TOKEN.encode()}
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=authorized)
        tested = set()
        for found in schema.get_all_operations():
            operation = found.ok()  # type: ignore[union-attr]

            @examples
            @given(case=operation.as_strategy())
            def check(case: Any) -> None:
                case.call_and_validate(
                    headers=authorized,
                    checks=[
                        checks.not_a_server_error,
                        openapi_checks.status_code_conformance,
                        openapi_checks.content_type_conformance,
                        openapi_checks.response_schema_conformance,
                        openapi_checks.negative_data_rejection,
                    ],
                )

            check()
            tested.add((operation.method.upper(), operation.path))
    assert ("POST", "/evict") in tested
