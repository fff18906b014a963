"""What the supervisor decides, told what happened and when."""

from pathlib import Path

from infinistore.protocol.messages import Shard
from infinistore.server.listeners import ServerAddresses
from infinistore.server.shards.fleet import Fleet, ShardState


def at(port: int, unix_socket: str = "") -> ServerAddresses:
    return ServerAddresses((("127.0.0.1", port),), Path(unix_socket) if unix_socket else None)


def serve(shard: ShardState, now: float) -> None:
    shard.started(100 + shard.index)
    shard.serving(now)


def fleet(count: int = 2) -> Fleet:
    return Fleet([ShardState(index, None) for index in range(count)])


def test_a_shard_that_ends_again_and_again_is_started_after_doubling_pauses() -> None:
    shard = ShardState(0, None)
    pauses = []
    for now in range(10):
        serve(shard, float(now))
        pauses.append(shard.ended(now + 0.5))
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == 15.0
    assert shard.restarts == 10


def test_after_a_minute_of_service_the_pauses_begin_anew() -> None:
    shard = ShardState(0, None)
    for now in (0.0, 1.0, 2.0):
        serve(shard, now)
        shard.ended(now + 0.5)
    serve(shard, 10.0)
    assert shard.ended(70.0) == 0.1


def test_a_shard_that_never_served_has_no_long_life() -> None:
    shard = ShardState(0, None)
    shard.started(1)
    assert shard.ended(1000.0) == 0.1
    shard.started(2)
    assert shard.ended(2000.0) == 0.2


def test_the_state_of_a_shard_is_that_of_its_process() -> None:
    shard = ShardState(1, None)
    assert shard.state == "down"
    shard.started(5)
    assert (shard.state, shard.serves) == ("starting", False)
    shard.addresses = at(5001, "/run/s.1")
    shard.serving(1.0)
    assert shard.described() == {
        "shard": 1,
        "state": "serving",
        "pid": 5,
        "port": 5001,
        "unix_socket": "/run/s.1",
        "restarts": 0,
        "hangs": 0,
    }
    shard.ended(2.0)
    assert (shard.state, shard.described()["pid"], shard.described()["port"]) == ("down", None, 5001)


def test_shards_meet_when_the_last_of_them_listens() -> None:
    both = fleet()
    assert both.places() is None
    both.shards[1].addresses = at(5001, "/run/s.1")
    assert both.places() is None
    both.shards[0].addresses = at(5000)
    assert both.places() == [Shard(5000), Shard(5001, "/run/s.1")]


def test_all_have_served_before_the_whole_does_and_one_that_restarts_does_not_change_that() -> None:
    both = fleet()
    serve(both.shards[0], 0.0)
    assert both.state == "starting"
    serve(both.shards[1], 0.0)
    assert (both.state, both.all_serve) == ("serving", True)
    both.shards[0].ended(1.0)
    assert (both.state, both.all_serve) == ("serving", False)
    both.draining = True
    assert both.state == "draining"
