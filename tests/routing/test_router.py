"""A router before engines in memory, with a clock that jumps: what clients see."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from infinistore.addresses import ROUTER_STATUS_PATH
from infinistore.monitor.router import RouterModel
from infinistore.routing import Address, Role
from infinistore.routing.http import Asked, EngineFailed, asking
from infinistore.scheduling import Engine, Request
from tests.routing.fakes import LIMITS, LISTENERS, MODEL, FakeEngine, routed


async def test_an_answer_is_passed_on_as_it_came(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        status, text, headers = await world.complete()
    assert (status, text) == (200, "one two three")
    assert headers["content-type"] == "text/event-stream"
    assert headers["x-infinistore-engine"] == "http://a"
    assert int(headers["x-infinistore-predicted-ms"]) >= 0


async def test_pieces_are_not_held_back(autojump_clock: MockClock) -> None:
    """Each of them takes the engine 10 ms: the first is there before the second is."""
    async with routed("a") as world, world.asking("/v1/completions", {"model": MODEL, "prompt": "x"}) as answer:
        assert await answer.piece() == b"one "
        assert await answer.piece() == b"two "


async def test_engines_take_turns_and_all_ask_for_the_same_body(autojump_clock: MockClock) -> None:
    async with routed("a", "b") as world:
        for _ in range(4):
            await world.complete("a prompt")
        asked = [one for engine in world.engines.values() for one in engine.asked]
        assert [len(engine.asked) for engine in world.engines.values()] == [2, 2]
    assert {json.loads(one.body)["prompt"] for one in asked} == {"a prompt"}


async def test_other_paths_go_to_an_engine_unchanged(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        status, _, headers = await world.ask("/v1/embeddings?x=1", {"model": MODEL, "input": "y"}, x_mine="z")
        (asked,) = world.engines["http://a"].asked
    assert (status, headers["x-engine"]) == (200, "http://a")
    assert (asked.method, asked.target) == (b"POST", b"/v1/embeddings?x=1")
    assert (asked.header(b"x-mine"), json.loads(asked.body)["input"]) == (b"z", "y")


async def test_a_request_that_no_engine_answers_does_not_go_to_all(autojump_clock: MockClock) -> None:
    def die(engine: FakeEngine) -> None:
        engine.stops_after = 0

    async with routed(*"abcde", prepare=die) as world:
        status, text, _ = await world.complete()
        assert status == 502
        assert "http://a did not answer to the end: it closed the connection" in text
        assert sum(len(engine.asked) for engine in world.engines.values()) == 3


async def test_an_answer_that_is_no_stream_may_take_longer_than_a_first_byte(autojump_clock: MockClock) -> None:
    limits = LIMITS.__class__(first_byte_s=7)
    async with routed("a", limits=limits, prepare=lambda engine: setattr(engine, "seconds_per_token", 2.0)) as world:
        assert (await world.ask("/v1/completions", {"model": MODEL, "prompt": "hello"}))[0] == 200


async def test_an_engine_that_says_that_it_is_ill_is_down(autojump_clock: MockClock) -> None:
    async with routed("a", "b") as world:
        world.engines["http://a"].health = 503
        await trio.sleep(5)
        assert [member.is_up for member in world.router.fleet] == [False, True]
        assert "answers 503" in next(iter(world.router.fleet)).problem


async def test_an_engine_that_wants_a_key_says_so(autojump_clock: MockClock) -> None:
    async with routed("a", prepare=lambda engine: setattr(engine, "key", b"Bearer key")) as world:
        status, text, _ = await world.complete()
        assert (status, "--engine-key-file" in text) == (503, True)


async def test_a_full_router_still_says_that_it_is_well(autojump_clock: MockClock) -> None:
    async with routed("a", most_connections=2) as world:
        idle = [await world.connected() for _ in range(2)]
        await wait_all_tasks_blocked()
        assert (await world.complete())[0] == 503
        assert (await world.ask("/health"))[0] == 200
        for stream in idle:
            await stream.aclose()
        await wait_all_tasks_blocked()
        assert (await world.complete())[0] == 200


async def test_errors_are_no_measure_of_an_engines_speed(autojump_clock: MockClock) -> None:
    async with routed("a", prepare=lambda engine: setattr(engine, "seconds_per_token", 0.01)) as world:
        for letter in "abcdefgh":
            await world.complete(letter * 400)
        before = int((await world.complete("y" * 400))[2]["x-infinistore-predicted-ms"])
        engine = world.engines["http://a"]
        engine.status, engine.seconds_per_token = 400, 0.0
        for letter in "ijklmnopq":
            await world.complete(letter * 400)
        assert int((await world.complete("z" * 400))[2]["x-infinistore-predicted-ms"]) >= before


async def test_an_error_of_an_engine_is_passed_on_and_no_failure(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        world.engines["http://a"].status = 400
        assert (await world.complete())[0] == 400
        assert [member.is_up for member in world.router.fleet] == [True]


async def test_an_engine_that_is_down_is_passed_over_and_comes_back(autojump_clock: MockClock) -> None:
    async with routed("a", "b") as world:
        down = world.engines["http://a"]
        down.is_down = True
        for _ in range(6):
            assert (await world.complete())[0] == 200
        assert [member.is_up for member in world.router.fleet] == [False, True]
        down.is_down = False
        await trio.sleep(2)
        for _ in range(2):
            await world.complete()
        assert down.asked


async def test_without_an_engine_the_error_says_what_is_wrong_with_each(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        world.engines["http://a"].is_down = True
        status, text, _ = await world.complete()
        assert status == 502
        assert "http://a cannot be reached: Connection refused" in json.loads(text)["error"]["message"]
        await trio.sleep(5)
        assert (await world.complete())[0] == 503
        status, text, _ = await world.ask("/health")
        assert status == 503
        assert "http://a cannot be reached" in json.loads(text)["error"]["message"]


async def test_a_request_without_a_byte_of_an_answer_is_sent_to_another_engine(autojump_clock: MockClock) -> None:
    def kill_the_first(engine: FakeEngine) -> None:
        engine.stops_after = 0 if engine.url == "http://a" else None

    async with routed("a", "b", prepare=kill_the_first) as world:
        status, text, headers = await world.complete()
    assert (status, text, headers["x-infinistore-engine"]) == (200, "one two three", "http://b")


async def test_an_answer_that_has_begun_is_broken_off_where_the_engine_is_killed(autojump_clock: MockClock) -> None:
    def kill_later(engine: FakeEngine) -> None:
        engine.stops_after = 2

    async with routed("a", "b", prepare=kill_later) as world:
        async with world.asking("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}) as answer:
            assert [await answer.piece(), await answer.piece()] == [b"one ", b"two "]
            with pytest.raises(EngineFailed, match="did not answer to the end"):
                await answer.piece()
        assert sum(len(engine.asked) for engine in world.engines.values()) == 1


async def test_an_engine_that_says_nothing_is_given_up_in_time(autojump_clock: MockClock) -> None:
    def hang(engine: FakeEngine) -> None:
        if engine.url == "http://a":
            engine.goes_on = trio.Event()

    limits = LIMITS.__class__(first_byte_s=7)
    async with routed("a", "b", prepare=hang, limits=limits) as world:
        began = trio.current_time()
        assert (await world.complete())[2]["x-infinistore-engine"] == "http://b"
        assert 7 <= trio.current_time() - began < 8


async def test_a_stream_that_never_ends_is_ended(autojump_clock: MockClock) -> None:
    def go_on_for_ever(engine: FakeEngine) -> None:
        engine.pieces = ["x"] * 100_000

    limits = LIMITS.__class__(answer_s=3)
    async with routed("a", prepare=go_on_for_ever, limits=limits) as world:
        began = trio.current_time()
        with pytest.raises(EngineFailed):
            await world.complete()
        assert trio.current_time() - began < 4


async def test_a_client_that_leaves_ends_its_request_at_the_engine(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        engine = world.engines["http://a"]
        engine.goes_on = trio.Event()
        with trio.move_on_after(1):
            await world.complete()
        await wait_all_tasks_blocked()
        assert (len(engine.asked), engine.cancelled) == (1, 1)
        (member,) = world.router.fleet
        assert (member.under_way, member.engine.requests) == (0, 0)


async def test_a_client_that_takes_nothing_of_its_answer_is_given_up(autojump_clock: MockClock) -> None:
    async with routed("a", limits=LIMITS.__class__(send_s=20)) as world:
        ours, theirs = lockstep_stream_pair()
        world.nursery.start_soon(world.router.serve_client, theirs)
        body = json.dumps({"model": MODEL, "prompt": "hello", "stream": True})
        await ours.send_all(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert b"200" in bytes(await ours.receive_some())  # the head, and then no more
        for seconds, requests in ((19, 1), (2, 0)):
            await trio.sleep(seconds)
            assert world.router.status()["engines"][0]["requests"] == requests


async def test_three_hundred_streams_run_at_once(autojump_clock: MockClock) -> None:
    async with routed("a", "b", "c") as world:
        for engine in world.engines.values():
            engine.goes_on = trio.Event()
        outcomes: list[str] = []

        async def ask() -> None:
            outcomes.append((await world.complete())[1])

        async with trio.open_nursery() as clients:
            for _ in range(300):
                clients.start_soon(ask)
            await wait_all_tasks_blocked()
            assert sum(len(engine.asked) for engine in world.engines.values()) == 300
            for engine in world.engines.values():
                engine.goes_on.set()
    assert Counter(outcomes) == {"one two three": 300}


async def test_requests_go_to_engines_of_their_model(autojump_clock: MockClock) -> None:
    other = FakeEngine("http://b", ("large",))
    engines = {"http://b": other}
    async with routed("a", engines=engines) as world:
        status, text, _ = await world.ask("/v1/completions", {"model": "large", "prompt": "x"})
        assert (status, json.loads(text)["error"]["message"]) == (404, "no engine serves the model 'large', but small")


async def test_the_models_of_all_engines_are_listed(autojump_clock: MockClock) -> None:
    def serve_two(engine: FakeEngine) -> None:
        if engine.url == "http://b":
            engine.models.append({"id": "adapter", "root": "/x", "parent": MODEL})

    async with routed("a", "b", prepare=serve_two) as world:
        status, text, _ = await world.ask("/v1/models")
        assert [one["id"] for one in json.loads(text)["data"]] == ["adapter", MODEL]
        await world.ask("/v1/completions", {"model": "adapter", "prompt": "x"})
        assert [len(engine.asked) for engine in world.engines.values()] == [0, 1]
    assert status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"17", b'{"model": 3, "prompt": {}}', b'{"prompt": [[], "x", 3]}'])
async def test_a_body_that_is_no_request_is_left_to_the_engine(autojump_clock: MockClock, body: bytes) -> None:
    def refuse(engine: FakeEngine) -> None:
        engine.models = [{"id": MODEL}]
        engine.status = 400

    async with routed("a", prepare=refuse) as world:
        asked = Asked(b"POST", b"/v1/completions", [], body)
        async with asking(Address.of("http://router"), asked, LIMITS, world.connected) as answer:
            assert answer.status == 400
        assert [one.body for one in world.engines["http://a"].asked] == [body]


async def test_a_body_that_is_too_long_is_refused_before_it_is_read(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        stream = await world.connected()
        await stream.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        answer = bytes(await stream.receive_some())
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"--max-body-size" in answer
        assert not world.engines["http://a"].asked


async def test_of_long_bodies_few_are_kept_and_the_others_wait(autojump_clock: MockClock) -> None:
    limits = LIMITS.__class__(short_body_bytes=1000, body_s=600)
    async with routed("a", limits=limits) as world:
        engine = world.engines["http://a"]
        engine.goes_on = trio.Event()
        async with trio.open_nursery() as clients:
            for _ in range(40):
                clients.start_soon(world.complete, "x" * 2000)
            await wait_all_tasks_blocked()
            assert len(engine.asked) == 16
            assert (await world.ask("/health"))[0] == 200
            engine.goes_on.set()
        assert len(engine.asked) == 40


@pytest.mark.parametrize("data", [b"\x16\x03\x01junk\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000, b"GET / HTTP/3\r\n\r\n"])
async def test_what_is_no_http_is_answered_and_ends_its_connection_alone(
    autojump_clock: MockClock, data: bytes
) -> None:
    async with routed("a") as world:
        stream = await world.connected()
        await stream.send_all(data)
        assert b" 4" in bytes(await stream.receive_some())
        assert (await world.complete())[0] == 200


async def test_connections_are_used_again_and_requests_may_wait_in_them(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        stream = await world.connected()
        await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        got = b""
        while got.count(b"{}") < 2:
            got += await stream.receive_some()
        assert got.count(b"HTTP/1.1 200 ") == 2


async def test_a_token_is_wanted_and_not_shown_to_engines(autojump_clock: MockClock) -> None:
    async with routed("a", token="secret", engine_key="key") as world:
        assert (await world.complete())[0] == 401
        status, _, _ = await world.ask("/v1/completions", {"prompt": "x"}, authorization="Bearer secret")
        (asked,) = world.engines["http://a"].asked
        assert (status, asked.header(b"authorization")) == (200, b"Bearer key")
        assert (await world.ask("/health"))[0] == 200


@pytest.mark.parametrize(("token", "shown"), [(None, b"Bearer mine"), ("mine", b"")])
async def test_without_a_key_for_engines_a_client_shows_its_own(
    autojump_clock: MockClock, token: str | None, shown: bytes
) -> None:
    async with routed("a", token=token) as world:
        await world.ask("/v1/completions", {"prompt": "x"}, authorization="Bearer mine")
        (asked,) = world.engines["http://a"].asked
    assert asked.header(b"authorization") == shown


async def test_a_stopped_router_finishes_what_is_under_way(autojump_clock: MockClock) -> None:
    async with routed("a") as world:
        engine, stop, texts = world.engines["http://a"], trio.Event(), []
        engine.goes_on = trio.Event()

        async def ask() -> None:
            texts.append((await world.complete())[1])

        async with trio.open_nursery() as nursery:
            idle = await world.connected()
            await idle.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await idle.receive_some()
            nursery.start_soon(ask)
            nursery.start_soon(world.router.serve, LISTENERS, stop)
            await wait_all_tasks_blocked()
            stop.set()
            assert await idle.receive_some() == b""  # an idle connection is closed at once
            assert (await world.ask("/health"))[0] == 503
            engine.goes_on.set()
        assert texts == ["one two three"]


async def test_a_stopped_router_waits_no_longer_than_it_may(autojump_clock: MockClock) -> None:
    async with routed("a", drain_s=5) as world:
        world.engines["http://a"].goes_on = trio.Event()
        stop = trio.Event()
        stop.set()
        world.nursery.start_soon(world.complete)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await world.router.serve(LISTENERS, stop)
        assert trio.current_time() - began == pytest.approx(5, abs=0.1)


class Raising:
    """A policy that fails."""

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        """Raise."""
        raise ZeroDivisionError


async def test_a_policy_that_raises_is_told_once_and_requests_are_served(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infinistore.routing.router.create_policy", lambda name: Raising())
    async with routed("a", "b") as world:
        with caplog.at_level(logging.ERROR):
            for _ in range(4):
                assert (await world.complete())[0] == 200
    assert [record.getMessage()[:17] for record in caplog.records] == ["the policy failed"]


async def test_what_waits_at_an_engine_by_other_routers_counts(autojump_clock: MockClock) -> None:
    def be_slow(engine: FakeEngine) -> None:
        engine.seconds_per_token = 0.5

    async with routed("a", "b", policy="least-work", prepare=be_slow) as world:
        for _ in range(4):
            await world.complete("x" * 8)
        world.engines["http://a"].waiting = 50
        await trio.sleep(2)
        for engine in world.engines.values():
            engine.asked.clear()
        for _ in range(4):
            await world.complete("x" * 8)
        assert [len(engine.asked) for engine in world.engines.values()] == [0, 4]


async def test_the_first_token_is_predicted_by_what_came_before(autojump_clock: MockClock) -> None:
    def take_time(engine: FakeEngine) -> None:
        engine.seconds_per_token = 0.025

    async with routed("a", prepare=take_time) as world:
        for letter in "abcdefghijk":
            await world.complete(letter * 400)
        _, _, headers = await world.complete("l" * 400)
        assert int(headers["x-infinistore-predicted-ms"]) == pytest.approx(10_000, rel=0.1)
        status = json.loads((await world.ask(ROUTER_STATUS_PATH))[1])
        (engine,) = status["engines"]
        assert engine["first_token_s"] == pytest.approx(10, rel=0.05)
        metrics = (await world.ask("/metrics"))[1]
        assert 'infinistore_router_picks_total{engine="http://a",reason="round-robin"} 12.0' in metrics


async def test_the_monitor_reads_what_a_router_says_of_its_engines(autojump_clock: MockClock) -> None:
    async with routed("a", "b") as world:
        world.engines["http://b"].is_down = True
        model = RouterModel("http://router")
        for number in range(2):
            for _ in range(4):
                await world.complete()
            said = json.loads((await world.ask(ROUTER_STATUS_PATH))[1])
            model.observe(said, now_s=float(number), at=datetime(2026, 1, 1, tzinfo=UTC))
        rows = {one.url: (one.up, one.requests_per_s) for one in model.snapshot().engines}
        assert rows == {"http://a": (True, 4.0), "http://b": (False, 0.0)}


async def test_the_next_turn_of_a_chat_tokenizes_its_end_only(autojump_clock: MockClock) -> None:
    first = "tell me a long story about an engine " * 40
    turns = [first, "once there was one that computed. " * 20, "and then?"]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    async with routed("a") as world:
        await world.ask("/v1/chat/completions", {"model": MODEL, "messages": messages[:1]})
        await world.ask("/v1/chat/completions", {"model": MODEL, "messages": messages})
        await world.ask("/v1/chat/completions", {"model": MODEL, "messages": messages})
        asked = [len(one["messages"]) for one in world.engines["http://a"].tokenized]
    assert asked == [1, 3]


async def test_an_engine_that_tokenizes_too_slowly_costs_no_request_its_time(autojump_clock: MockClock) -> None:
    async with routed("a", tokenize_s=0.05) as world:
        engine = world.engines["http://a"]
        engine.tokenize_s = 60.0
        began = trio.current_time()
        assert (await world.complete())[0] == 200
        assert trio.current_time() - began < 1


async def test_a_long_prompt_is_computed_by_one_engine_and_answered_by_another(autojump_clock: MockClock) -> None:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    async with routed("p", "d", roles=roles, split_above_tokens=100) as world:
        status, text, headers = await world.complete("x" * 200, max_tokens=50, stream_options={"include_usage": True})
        assert (status, text, headers["x-infinistore-engine"]) == (200, "one two three", "http://d")
        (first,), (second,) = (engine.asked for engine in world.engines.values())
        assert json.loads(first.body) == {"model": MODEL, "prompt": "x" * 200, "stream": False, "max_tokens": 1}
        assert json.loads(second.body)["max_tokens"] == 50
        await world.complete("y" * 50)
        assert [len(engine.asked) for engine in world.engines.values()] == [1, 2]


@pytest.mark.parametrize("problem", ["down", "error"])
async def test_a_prompt_that_nobody_computes_ahead_is_answered_all_the_same(
    autojump_clock: MockClock, problem: str
) -> None:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    async with routed("p", "d", roles=roles, split_above_tokens=0) as world:
        world.engines["http://p"].is_down = problem == "down"
        world.engines["http://p"].status = 500
        assert (await world.complete("x" * 200))[:2] == (200, "one two three")


async def test_a_prompt_that_kills_engines_does_not_go_to_all_that_could_compute_it(autojump_clock: MockClock) -> None:
    roles: dict[str, Role] = {**dict.fromkeys("abcde", "prefill"), "z": "decode"}

    def die(engine: FakeEngine) -> None:
        engine.stops_after = None if engine.url == "http://z" else 0

    async with routed(*roles, roles=roles, prepare=die, split_above_tokens=0) as world:
        assert (await world.complete("x" * 200))[0] == 200
        asked = {url: len(engine.asked) for url, engine in world.engines.items()}
    assert (asked.pop("http://z"), sum(asked.values())) == (1, 3)
