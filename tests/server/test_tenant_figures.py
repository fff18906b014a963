"""What an operator sees of each tenant."""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

from infinistore.access.tenants import digest_of
from infinistore.errors import LimitExceeded, PermissionDenied
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Exists, Get, Keys, Purge, Put
from infinistore.server.management.metrics import METRICS, MOST_TENANTS
from tests.monitor.made import told
from tests.server.http_client import ask
from tests.server.running import KIB, Peer, RunningServer, make_config, peer_with, running_server, until

TOKENS = {"ann": "ann.secret", "ben": "ben.secret", "ops": "ops.secret"}
Serving = Callable[[str], AbstractAsyncContextManager[RunningServer]]


def entry(name: str, keys: str = "") -> str:
    return f"  {name}: {{tokens: [{digest_of(TOKENS.get(name, name))}], {keys}}}\n"


OPS = entry("ops", "roles: [monitor], operator: true")


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    @asynccontextmanager
    async def serve(entries: str) -> AsyncIterator[RunningServer]:
        file = tmp_path / "tenants.yaml"
        file.write_text("tenants:\n" + entries)
        file.chmod(0o600)
        async with running_server(make_config(tenants=file)) as server:
            yield server

    return serve


async def tell(server: RunningServer, path: str, token: str = TOKENS["ops"]) -> Any:
    return await ask(server.server.addresses.management[0], "GET", path, headers={"Authorization": f"Bearer {token}"})


async def peer_of(server: RunningServer, name: str) -> Peer:
    return await peer_with(server, TOKENS[name])


async def put(peer: Peer, *keys: str) -> None:
    sizes = [KIB] * len(keys)
    await peer.ask(Put(Keys(list(keys)), pack_u64(sizes), checksums=False), bytes(sum(sizes)))


async def test_what_each_tenant_did_is_what_is_shown(serving: Serving) -> None:
    text = entry("ann", "reserved_bytes: 2KiB, max_bytes: 4KiB, max_connections: 1") + entry("ben") + OPS
    async with serving(text) as server:
        ann = await peer_of(server, "ann")
        await put(ann, "a", "b", "c")
        await put(ann, "d", "e")
        await ann.ask(Get(Keys(["d", "e", "nothing"]), pack_u64()))
        await ann.payload()
        with pytest.raises(PermissionDenied):
            await ann.ask(Purge())
        with pytest.raises(LimitExceeded):
            await put(ann, *"vwxyz")
        second = await server.stranger()
        with pytest.raises(LimitExceeded):
            await second.hello(TOKENS["ann"])
        second.close()
        has = {"connections": 1, "keys": 4, "used_bytes": 4 * KIB, "reserved_bytes": 2 * KIB, "max_bytes": 4 * KIB}
        did = {"hits": 2, "misses": 1, "evicted": 1, "refused": 3}
        assert (await tell(server, "/tenants")).json == told(ann=has | did, ben={}, ops={})
        ann.close()
        await server.quiet()
        after = (await tell(server, "/tenants")).json["tenants"][0]
        assert (after["connections"], after["refused"]) == (0, 3)  # it is a counter


async def test_pauses_are_counted(serving: Serving) -> None:
    async with serving(entry("ann", "requests_per_s: 1") + OPS) as server:
        ann = await peer_of(server, "ann")
        for _ in range(2):
            await ann.ask(Exists(Keys(["k"])))
        while not (await tell(server, "/tenants")).json["tenants"][0]["pauses"]:
            await trio.lowlevel.checkpoint()


async def test_each_metric_of_tenants_is_scraped(serving: Serving) -> None:
    async with serving(entry("ann") + OPS) as server:
        ann = await peer_of(server, "ann")
        await put(ann, "a")
        found = {
            family.name: family
            for family in text_string_to_metric_families((await tell(server, "/metrics")).body.decode())
        }
        for metric in METRICS:
            if "tenant" in metric.name:
                family = found[metric.name.removesuffix("_total")]
                assert (family.type, family.documentation) == (metric.kind, metric.help)
                labels = [sample.labels for sample in family.samples]
                assert labels == ([{"tenant": "ann"}, {"tenant": "ops"}] if metric.labels else [{}])
        assert found["infinistore_tenant_used_bytes"].samples[0].value == KIB


async def test_any_number_of_tenants_has_a_bounded_number_of_series(serving: Serving) -> None:
    count = MOST_TENANTS + 10
    async with serving(OPS + "".join(entry(f"t{number}") for number in range(count))) as server:
        assert len((await tell(server, "/tenants")).json["tenants"]) == count + 1
        text = (await tell(server, "/metrics")).body.decode()
        assert text.count("infinistore_tenant_keys{") == MOST_TENANTS
        assert f"infinistore_tenants {count + 1}.0" in text


async def test_who_is_no_operator_sees_nobody_and_without_tenants_there_are_none(serving: Serving) -> None:
    async with serving(entry("ann", "roles: [monitor]") + OPS) as server:
        assert (await tell(server, "/tenants", TOKENS["ann"])).status == 403
        assert (await tell(server, "/tenants", "ann.wrong")).status == 401
    async with running_server() as server:
        answer = await tell(server, "/tenants")
        assert answer.status == 404
        assert answer.json["error"] == "this server has no tenants; start it with --tenants FILE"


async def test_figures_go_on_after_the_last_client_has_left_an_empty_store(serving: Serving) -> None:
    roles = "roles: [read, write, admin]"
    async with serving(entry("ann", roles) + entry("ben", roles) + OPS) as server:
        for rounds in (1, 2):
            ann = await peer_of(server, "ann")
            await put(ann, "k")
            await ann.ask(Get(Keys(["k", "gone"]), pack_u64()))
            await ann.payload()
            await ann.ask(Purge())
            ann.close()
            await server.quiet()
            assert server.server.tenancy is not None
            (group,) = server.server.tenancy.groups().values()
            await until(partial(lambda tenants: "ann" not in tenants.used_stores(), group.tenants))
            found = json.loads((await tell(server, "/tenants")).body)
            (figures,) = [one for one in found["tenants"] if one["tenant"] == "ann"]
            assert (figures["hits"], figures["misses"], figures["keys"]) == (rounds, rounds, 0)
            assert server.core.statistics().puts == rounds


async def test_a_rate_is_not_forgotten_with_the_store(serving: Serving, mock_clock: MockClock) -> None:
    async with serving(entry("ann", "requests_per_s: 0.01") + OPS) as server:
        tenancy = server.server.tenancy
        assert tenancy is not None
        for _ in range(2):  # the second one owes what the first one took
            ann = await peer_of(server, "ann")
            await ann.ask(Exists(Keys(["k"])))
            await trio.testing.wait_all_tasks_blocked()
            ann.close()
            await server.quiet()
        found = await tenancy.statistics(Counter(), Counter())
        assert [one.pauses for one in found if one.tenant == "ann"] == [1]
