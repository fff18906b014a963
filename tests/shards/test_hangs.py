"""A shard that hangs is killed and started again; one that stood still for less than
the bound, or together with its supervisor, is left alone.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from infinistore import blocking
from infinistore.server.shards.shard import beat_of

from .conftest import HOST, RunningShards, running_shards
from .test_supervisor import metrics_of

BOUND_S = 3.0


def bounded(environment: dict[str, str], bound_s: float) -> AbstractContextManager[RunningShards]:
    """Two shards, each with a loop that may stand still for so long, as a service
    manager has said."""
    return running_shards({**environment, "WATCHDOG_USEC": f"{bound_s * 1e6:.0f}"})


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[RunningShards]:
    with bounded(environment, BOUND_S) as started:
        yield started


def events_of(server: RunningShards, name: str) -> list[dict[str, object]]:
    """End the server; return what its log has of an event."""
    server.process.send_signal(signal.SIGTERM)
    _, log = server.process.communicate()
    assert "Traceback" not in log
    found = [json.loads(line) for line in log.splitlines()]
    return [one for one in found if one["event"] == name]


@pytest.mark.process
@pytest.mark.nightly
def test_a_shard_that_hangs_is_started_again_and_the_other_one_is_undisturbed(server: RunningShards) -> None:
    before = server.shards()
    with blocking.open_store(f"infinistore://{HOST}:{server.port}", deadline_s=60) as store:
        store.put_many({f"{n}": b"value" for n in range(40)})
        os.kill(before[1]["pid"], signal.SIGSTOP)
        server.wait_for_restart(1, 1)
        after = server.shards()
        assert after[0] == before[0]
        assert after[1]["pid"] != before[1]["pid"]
        assert (after[1]["port"], after[1]["restarts"], after[1]["hangs"]) == (before[1]["port"], 1, 1)
        there = store.exists_many([f"{n}" for n in range(40)])
        assert 0 < sum(there) < 40
        store.put_many({f"{n}": b"again" for n in range(40)})
        assert store.exists_many([f"{n}" for n in range(40)]) == [True] * 40
    metrics = metrics_of(server)
    assert [metrics["infinistore_shard_hangs_total", shard] for shard in ("0", "1")] == [0, 1]
    (said,) = events_of(server, "a shard hangs, and is killed")
    assert (said["shard"], said["pid"], said["silent_s"]) == (1, before[1]["pid"], BOUND_S)


@pytest.mark.process
@pytest.mark.nightly
def test_a_shard_that_stood_still_for_less_than_the_bound_is_left_alone(environment: dict[str, str]) -> None:
    """It owes two signs of life, and a test that is stopped meanwhile does no harm."""
    bound_s = 60.0
    with bounded(environment, bound_s) as server:
        before = server.shards()
        os.kill(before[1]["pid"], signal.SIGSTOP)
        time.sleep(2 * beat_of(bound_s))  # real time: the shard stands still
        os.kill(before[1]["pid"], signal.SIGCONT)
        server.told("/selftest")
        assert server.shards() == before
        assert events_of(server, "a shard hangs, and is killed") == []


@pytest.mark.process
@pytest.mark.nightly
def test_a_shard_that_was_stopped_together_with_its_supervisor_is_left_alone(server: RunningShards) -> None:
    before = server.shards()
    everybody = [server.process.pid, *(shard["pid"] for shard in before)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * BOUND_S)  # real time: all stand still for longer than the bound
    for pid in reversed(everybody):  # the supervisor never runs alone
        os.kill(pid, signal.SIGCONT)
    server.told("/selftest")
    assert server.shards() == before
    assert events_of(server, "a shard hangs, and is killed") == []
