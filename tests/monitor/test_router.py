"""The screen of a router: what it shows, and what is no router."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import StoreUnavailable
from infinistore.monitor.controls import Controls
from infinistore.monitor.lines import ASCII
from infinistore.monitor.router import RouterModel, alarms, document, screen

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)


ENGINE: dict[str, Any] = {
    "role": "both",
    "up": True,
    "problem": "",
    "models": ["m"],
    "requests": 3,
    "waiting": 1,
    "queue_s": 1.25,
    "link_queue_s": 0.0,
    "busy_ratio": 0.5,
    "first_token_s": 0.8,
    "predicted_first_token_s": 0.75,
    "picks": {"soonest": 10},
    "failed": 0,
}


def engine(url: str = "http://a", **more: Any) -> dict[str, Any]:
    return {"url": url, **ENGINE, **more}


def model_of(*said: list[dict[str, Any]]) -> RouterModel:
    model = RouterModel("http://router")
    for number, engines in enumerate(said):
        model.observe({"policy": "soonest", "engines": engines}, now_s=2.0 * number, at=AT)
    return model


def text_of(model: RouterModel, width: int = 120, height: int = 12, controls: Controls | None = None) -> str:
    lines = screen(model.snapshot, controls or Controls(has_keyboard=True), width, height, ASCII)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def test_an_engine_has_a_row_with_its_queue_and_what_was_predicted() -> None:
    text = text_of(model_of([engine()], [engine(picks={"soonest": 16, "length": 4})]))
    row = next(line for line in text.splitlines() if line.startswith("http://a"))
    assert " ".join(row.split()) == "http://a up 3 1 1.25 s 0.00 s 50.0 % 0.80 s 0.75 s 20 0"
    assert "soonest, 5.0 requests/s" in text


def test_an_engine_that_is_down_is_told_with_the_reason() -> None:
    model = model_of([engine(up=False, problem="http://a cannot be reached")])
    assert [one.text for one in alarms(model.snapshot)] == ["http://a cannot be reached"]
    assert "down" in text_of(model)


def test_a_router_that_does_not_answer_any_more_keeps_its_figures() -> None:
    model = model_of([engine()])
    model.lose("the router does not answer")
    text = text_of(model)
    assert "the router does not answer (figures are of 12:00:00)" in text
    assert "http://a" in text


def test_engines_are_filtered_by_url_and_role() -> None:
    model = model_of([engine("http://a"), engine("http://b", role="prefill")])
    controls = Controls(has_keyboard=True, filter="prefill")
    text = text_of(model, controls=controls)
    assert "http://b" in text
    assert "http://a" not in text


def test_a_figure_that_is_not_known_is_null_in_the_document() -> None:
    (one,) = document(model_of([engine(first_token_s=None)]).snapshot)["engines"]
    assert (one["first_token_s"], one["requests_per_s"]) == (None, None)
    json.dumps(one)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(["url", *ENGINE]), value=JSON, width=st.integers(1, 140), height=st.integers(1, 30))
def test_whatever_a_router_says_is_shown_or_one_error(name: str, value: object, width: int, height: int) -> None:
    try:
        model = model_of([{**engine(), name: value}])
    except StoreUnavailable:
        return
    text_of(model, width, height)
    json.dumps(document(model.snapshot))


@pytest.mark.parametrize("said", [None, [], {}, {"error": "no"}, {"policy": "x"}, {"policy": "x", "engines": [{}]}])
def test_what_is_no_router_is_one_error(said: object) -> None:
    with pytest.raises(StoreUnavailable, match="this is no router"):
        RouterModel("http://router").observe(said, now_s=0.0, at=AT)
