"""The screen of a router: rows and rates of what it says, and anything else that may
answer at its URL.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from infinistore import StoreUnavailable
from infinistore.addresses import ROUTER_STATUS_PATH
from infinistore.monitor.app import Pace, Source, sample, still
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import ASCII, UNICODE
from infinistore.monitor.router import RouterModel, RouterSnapshot, document, screen
from tests.cli.in_process import server_here
from tests.http_servers import Quiet, serving_http
from tests.ports import own_ports

from .conftest import INFINISTORE, Start
from .made import NOON, plain

URL = "http://127.0.0.1:8000"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def engine(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "url": f"http://10.0.0.{number}:8001", "role": "both", "up": True, "problem": "", "models": ["m"],
        "blocks": "", "requests": 3, "waiting": 2, "queue_s": 1.25, "link_queue_s": 0.0, "busy_ratio": 0.5,
        "first_token_s": 0.21, "predicted_first_token_s": 0.2, "picks": {"soonest": 100, "length": 20}, "failed": 1,
    } | changes  # fmt: skip


def said(*engines: Any) -> dict[str, Any]:
    """What `GET /infinistore/engines` answers."""
    return {"policy": "soonest", "engines": list(engines)}


def watching(*answers: Any) -> RouterModel:
    """A model that was shown these answers, two seconds apart."""
    model = RouterModel(URL)
    for number, one in enumerate(answers):
        model.observe(one, now_s=2.0 * number, at=NOON + timedelta(seconds=2 * number))
    return model


def lost(*answers: Any) -> RouterSnapshot:
    model = watching(*answers)
    for _ in range(3):
        model.lose(f"{URL}: the router does not answer: Connection refused", now_s=9.0, at=NOON)
    return model.snapshot()


def shown(snapshot: RouterSnapshot, width: int = 120, height: int = 24, controls: Controls | None = None) -> list[str]:
    return plain(screen(snapshot, controls or Controls(), width, height), width, height)


def row_of(name: str, lines: list[str]) -> list[str]:
    return next(one for one in lines if one.startswith(name)).split()[1:]


DOWN = engine(2, up=False, problem="it has not answered yet", role="prefill")
SNAPSHOTS = {
    "first": watching(said(engine(1))).snapshot(),
    "empty": watching(said()).snapshot(),
    "mixed": watching(said(engine(1), DOWN), said(engine(1), DOWN)).snapshot(),
    "all down": watching(said(DOWN)).snapshot(),
    "many": watching(said(*(engine(number, up=number % 9 != 0) for number in range(50)))).snapshot(),
    "lost": lost(said(engine(1), DOWN)),
}


def test_a_row_says_what_its_engine_does_and_how_well_that_was_predicted() -> None:
    later = engine(1, picks={"soonest": 1_110, "length": 20})
    lines = shown(watching(said(engine(1), DOWN), said(later, DOWN)).snapshot())
    assert lines[0].startswith(f"infinistore {URL}")
    assert lines[1] == "engines   2, 1 down  soonest, 505 requests/s"
    assert lines[2] == "! http://10.0.0.2:8001 is down: it has not answered yet"
    assert lines[5] == "sent      soonest 1,210, length 40"
    figures = "up 3 2 1.25 s 0.00 s 50.0 % 0.21 s 0.20 s 505 1 soonest 1,110, …"
    assert row_of("http://10.0.0.1:8001", lines) == figures.split()
    assert row_of("http://10.0.0.2:8001", lines)[:2] == ["prefill", "down"]


def test_rates_are_those_between_two_samples_and_unknown_after_another_start_of_the_router() -> None:
    picks = {"soonest": 104, "length": 20, "decode": 2}
    model = watching(said(engine(1)), said(engine(1, picks=picks), engine(2)))
    assert [one.requests_per_s for one in model.snapshot().engines] == [3.0, None]
    for fewer in ({"soonest": 500}, {"soonest": 1, "length": 500, "decode": 2}, {}):
        model.observe(said(engine(1, picks=picks)), now_s=4.0, at=NOON)
        model.observe(said(engine(1, picks=fewer)), now_s=6.0, at=NOON)
        assert [one.requests_per_s for one in model.snapshot().engines] == [None]


def test_a_router_that_does_not_answer_is_told_in_full_and_keeps_its_figures() -> None:
    lines = shown(SNAPSHOTS["lost"], 80)
    assert "NO ANSWER since 12:00:00" in lines[0]
    reason = " ".join(one[2:] for one in lines[2:5]).strip()
    assert reason == (f"{URL}: the router does not answer: Connection refused (tried 3 times; figures are of 12:00:00)")
    assert row_of("http://10.0.0.1:8001", lines)[:2] == ["up", "3"]
    model = watching(said(engine(1)))
    model.lose("away", now_s=2.0, at=NOON)
    model.observe(said(engine(1)), now_s=4.0, at=NOON)
    assert "NO ANSWER" not in "".join(shown(model.snapshot()))


def test_of_many_engines_those_that_are_down_come_first_and_a_filter_and_an_order_choose() -> None:
    lines = shown(SNAPSHOTS["many"], 80)
    assert ["down" in one for one in lines[8:15]] == [True] * 6 + [False]
    assert lines[-1].endswith("15 of 50")
    assert shown(SNAPSHOTS["many"], 80, 24, Controls(reversed=True))[8].startswith("http://10.0.0.45:8001")
    assert [one.split()[:1] for one in shown(SNAPSHOTS["many"], 80, 24, Controls(filter="0.48:"))[8:10]] == [
        ["http://10.0.0.48:8001"], [],
    ]  # fmt: skip
    only = shown(SNAPSHOTS["mixed"], 80, 24, Controls(filter="PREF"))
    assert [one.split()[:1] for one in only[8:10]] == [["http://10.0.0.2:8001"], []]


def test_a_router_without_engines_and_one_without_a_live_one_are_told() -> None:
    assert "! the router has no engines" in shown(SNAPSHOTS["empty"])
    assert any("1, none is up" in one for one in shown(SNAPSHOTS["all down"]))


@given(
    st.integers(1, 250), st.integers(1, 60), st.sampled_from(sorted(SNAPSHOTS)), st.sampled_from([UNICODE, ASCII]),
    st.lists(st.sampled_from(["?", "/", "x", "s", "S", "t", "r", "p", "enter"]), max_size=5),
)  # fmt: skip
def test_any_size_is_filled_exactly(width: int, height: int, name: str, glyphs: Any, pressed: list[str]) -> None:
    controls = Controls()
    for key in pressed:
        controls = controls.press(key)
    plain(screen(SNAPSHOTS[name], controls, width, height, glyphs), width, height)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(engine(1))), JSON), JSON)
def test_figures_that_are_none_are_unknown_and_nothing_unprintable_is_shown(
    changes: Mapping[str, Any], policy: Any
) -> None:
    answer = {"policy": policy, "engines": [changes, engine(1)]}
    snapshot = watching(answer, answer).snapshot()
    for width in (80, 160):
        assert all(one.isprintable() for one in shown(snapshot, width))
    json.dumps(document(snapshot), allow_nan=False)


def test_huge_texts_are_cut_and_control_characters_are_shown_as_such() -> None:
    huge = "\x1b[2J" + "x" * 1_000_000
    changes = {"url": huge, "role": huge, "problem": huge, "up": False, "picks": {huge: 1}}
    snapshot = watching({"policy": huge, "engines": [changes]}).snapshot()
    assert len(json.dumps(document(snapshot))) < 10_000
    assert "\x1b" not in "".join(shown(snapshot))


@pytest.mark.parametrize(
    "answer", [None, 7, [], "text", {}, {"engines": 7}, {"engines": [7]}, {"engines": {"url": "u"}}, {"tenants": []}]
)
def test_what_is_no_list_of_engines_is_one_error_and_changes_nothing(answer: Any) -> None:
    model = watching(said(engine(1)))
    before = model.snapshot()
    with pytest.raises(StoreUnavailable, match="this is no router; give the URL that"):
        model.observe(answer, now_s=9.0, at=NOON)
    assert model.snapshot() == before


def test_what_is_printed_has_every_engine_and_no_keys() -> None:
    printed = [one.plain for one in still(SNAPSHOTS["many"], 1.0, 120, 24, UNICODE)]
    assert sum(one.startswith("http://10.0.0.") for one in printed) == 50
    assert not any("quit" in one for one in printed)


async def test_a_router_that_never_answers_is_given_up_at_the_deadline(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_sync(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    with pytest.raises(StoreUnavailable, match="has not answered within 5 s"):
        await sample(Source(URL, deadline_s=5.0, engines=dict), Pace(1.0), RouterModel(URL), lambda: None)
    assert trio.current_time() == 5.0


class Answers(Quiet, BaseHTTPRequestHandler):
    """Gives answers one after the other, the last one for good; notes what is asked."""

    answers: list[tuple[int, bytes]]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        status, body = self.answers[min(len(self.asked), len(self.answers)) - 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def answering(*answers: tuple[int, Any], port: int = 0) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Run what gives these answers; its URL, and what it is asked."""
    asked: list[tuple[str, str | None]] = []
    encoded = [(status, one if isinstance(one, bytes) else json.dumps(one).encode()) for status, one in answers]
    with serving_http(type("Own", (Answers,), {"answers": encoded, "asked": asked}), port) as own:
        yield f"http://127.0.0.1:{own}", asked


def test_once_prints_a_row_for_each_engine_and_json_says_the_same_to_programs(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    with answering((200, said(engine(1), DOWN))) as (url, asked):
        printed = run("monitor", url, "--once", "--ascii", "--interval", "0.1", "--token-file", str(token))
        assert (printed.returncode, printed.stderr, printed.stdout.isascii()) == (0, "", True)
        assert asked == [(ROUTER_STATUS_PATH, "Bearer secret")] * 2
        for part in (url, "http://10.0.0.1:8001", "prefill down", "soonest 200, length 40"):
            assert part in printed.stdout
        piped = run("monitor", "--url", url, "--interval", "0.1")
        assert (piped.returncode, "standard output is no terminal" in piped.stderr) == (0, True)
        made = json.loads(run("monitor", url, "--json", "--once", "--interval", "0.1").stdout)
    assert (made["url"], made["state"], made["policy"]) == (url, "routing", "soonest")
    assert [(one["url"], one["up"], one["queue_s"], one["requests_per_s"]) for one in made["engines"]] == [
        ("http://10.0.0.1:8001", True, 1.25, 0.0), ("http://10.0.0.2:8001", False, 1.25, 0.0),
    ]  # fmt: skip
    assert [one["kind"] for one in made["warnings"]] == ["down"]


@pytest.mark.parametrize(
    ("status", "body", "code", "told"),
    [
        (200, b"<html>welcome</html>", 3, "the router does not answer: Expecting value"),
        (404, b"<html>not here</html>", 3, "the router does not answer: Expecting value"),
        (200, b"[" * 100_000, 3, "the router does not answer: maximum recursion depth"),
        (200, {"keys": 7}, 3, "this is no router"),
        (404, {"error": "no\x1b[2Jsuch thing" + "x" * 9999}, 2, "no?[2Jsuch thing"),
        (404, {"detail": "Not Found"}, 2, "Not Found"),
    ],
    ids=["page", "no page", "deep", "other", "no such path", "an engine"],
)
def test_what_is_no_router_is_one_line_with_a_remedy(run: Run, status: int, body: Any, code: int, told: str) -> None:
    with answering((status, body)) as (url, _):
        for more in ("--once", "--json"):
            ended = run("monitor", url, more)
            assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "", 1)
            assert ended.stderr.startswith(f"infinistore: {url}: ") and len(ended.stderr) < 500
            assert told in ended.stderr
            assert "give the URL that `infinistore route` printed" in ended.stderr


def test_a_wrong_token_is_told_in_the_words_of_the_router(run: Run) -> None:
    with answering((401, {"error": {"message": "the token is missing or wrong", "code": 401}})) as (url, _):
        ended = run("monitor", url, "--once")
    assert ended.returncode == 3
    assert ended.stderr == f"infinistore: {url}: the token is missing or wrong; give it with --token-file FILE\n"


def test_one_screen_of_a_router_that_is_lost_half_way_is_an_error(run: Run) -> None:
    with answering((200, said(engine(1))), (503, {"error": "it stops"})) as (url, _):
        ended = run("monitor", url, "--once", "--interval", "0.1")
    assert (ended.returncode, ended.stdout) == (3, "")
    assert f"{url}: it stops" in ended.stderr


def test_the_management_api_of_a_server_is_no_router(run: Run, environment: dict[str, str]) -> None:
    with server_here(environment, "--unix-socket", "off", "--prealloc-size", "16MiB") as server:
        ended = run("monitor", server.management, "--once")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "give the URL that `infinistore route` printed" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["http://127.0.0.1:PORT", "--once"], 3, "Connection refused; give the URL that `infinistore route` printed"),
        (["HTTP://127.0.0.1:PORT", "--wait", "0.1"], 3, "Connection refused"),
        (["http://127.0.0.1:1/v1"], 2, "must look like http://127.0.0.1:8000"),
        (["http://a b:1"], 2, "must look like http://127.0.0.1:8000"),
        (["http://127.0.0.1:1", "--manage-url", "http://127.0.0.1:1"], 2, "not of a router"),
        (["--cluster", "http://127.0.0.1:1"], 2, "names no cluster"),
        (["https://127.0.0.1:1", "--ca", "/nowhere.pem"], 2, "give a file with certificates"),
    ],
    ids=["nobody", "wait", "path", "space", "manage", "cluster", "authorities"],
)
def test_what_cannot_be_asked_is_one_line(run: Run, arguments: list[str], code: int, told: str) -> None:
    ended = run("monitor", *(one.replace("PORT", str(own_ports(1)[0])) for one in arguments))
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "", 1)
    assert told in ended.stderr


@pytest.mark.process
def test_a_router_that_goes_away_is_shown_as_gone_and_found_again_when_it_is_back(start: Start) -> None:
    port = own_ports(1)[0]
    with answering((200, said(engine(1))), port=port) as (url, _):
        session = start(*INFINISTORE, "monitor", url, "--interval", "0.2")
        session.wait_for("engines   1  soonest")
        session.press("?")
        session.wait_for("of a router")
        session.press("x")
        session.resize(100, 30)
        session.wait_for("q quit")
    session.wait_for("NO ANSWER since")
    session.wait_for("see that it runs")
    with answering((200, said(engine(1), DOWN)), port=port):
        session.wait_for("engines   2, 1 down")
        session.wait_until(lambda screen: "NO ANSWER" not in screen.text)
        session.press("q")
        assert session.end() == 0
    assert session.is_restored()
