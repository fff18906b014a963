"""What the log and the statistics say when a larger pool would have had more."""

import logging

import pytest

from infinistore.eviction import WantedPool
from infinistore.server.maintenance import SizeAdvice
from tests.core.test_store import put
from tests.eviction.pools import turns
from tests.server.running import make_config, simulated_server

SAID = "a larger pool would have had blocks that were evicted and put again"
UNIT_BYTES = 16 * 1024


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == SAID]


async def test_a_server_says_once_how_large_a_pool_its_prompts_want(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(prealloc_bytes=1024 * UNIT_BYTES, minimal_allocate_bytes=UNIT_BYTES)
    async with simulated_server(config) as server:
        client = server.core.open_client("engine")
        for keys in turns(96, 6):  # one and a half pools
            put(server.core, client, dict.fromkeys(keys, bytes(UNIT_BYTES)))
        statistics = server.core.statistics()
        assert 1.5 <= statistics.wanted_capacity_bytes / statistics.capacity_bytes <= 1.75
        assert 0.5 < statistics.avoidable_puts <= 1
    (line,) = lines(caplog)
    assert vars(line)["wanted_bytes"] > vars(line)["capacity_bytes"] == 1024 * UNIT_BYTES
    assert 10 <= vars(line)["percent_of_puts"] <= 100


async def test_it_is_said_once_an_hour_however_the_figures_change(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    async with simulated_server() as server:
        advice = SizeAdvice(server.core.pool, lambda: now)
    advice.tell(WantedPool(2.0, 0.09))
    assert not lines(caplog)
    for _ in range(100):
        for wanted in (WantedPool(2.0, 0.1), WantedPool(), WantedPool(2.0, 0.5), WantedPool(2.0, 0.06)):
            advice.tell(wanted)
    assert len(lines(caplog)) == 1
    now += 3600
    advice.tell(WantedPool(2.0, 0.2))
    assert len(lines(caplog)) == 2
