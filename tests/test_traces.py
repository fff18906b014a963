"""Traces in Mooncake's format: what is read, and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import ConfigError
from infinistore.traces import TracedRequest, read_trace

GOOD = {"timestamp": 1500, "input_length": 513, "output_length": 7, "hash_ids": [0, 1]}


@st.composite
def traced(draw: st.DrawFn) -> TracedRequest:
    tokens = draw(st.integers(1, 5000))
    blocks = draw(st.lists(st.integers(0, 1 << 40), min_size=-(-tokens // 512), max_size=-(-tokens // 512)))
    return TracedRequest(draw(st.integers(0, 10**7)) / 1000, tokens, draw(st.integers(0, 5000)), tuple(blocks))


def line(request: TracedRequest) -> str:
    return json.dumps(
        {
            "timestamp": round(request.arrived_s * 1000),
            "input_length": request.tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
        }
    )


@given(st.lists(traced(), min_size=1, max_size=5), st.booleans())
def test_what_is_written_is_read_in_the_order_of_arrival(requests: list[TracedRequest], blank_lines: bool) -> None:
    text = ("\n\n" if blank_lines else "\n").join(map(line, requests)) + "\n"
    assert read_trace(text.splitlines(keepends=True)) == sorted(requests, key=lambda request: request.arrived_s)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": None}, "timestamp is None"),
        ({"timestamp": -1}, "timestamp is -1"),
        ({"timestamp": float("nan")}, "timestamp is nan"),
        ({"input_length": "513"}, "input_length is '513'"),
        ({"input_length": True}, "input_length is True"),
        ({"input_length": 0, "hash_ids": []}, "0 blocks for an input_length of 0"),
        ({"output_length": -7}, "output_length is -7"),
        ({"hash_ids": [0]}, "1 blocks for an input_length of 513"),
        ({"hash_ids": [0, 1.5]}, "no list of whole numbers"),
        ({"hash_ids": "01"}, "no list of whole numbers"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 3 of the trace .*{reason}.* like \{{\"timestamp\""):
        read_trace([json.dumps(GOOD), "", json.dumps(GOOD | change)])


@pytest.mark.parametrize("text", ["no JSON", "[1, 2]", "{", '"text"', "[" * 100_000])
def test_a_line_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="line 1 of the trace is not a request"):
        read_trace([text])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(["\n"])


def test_a_trace_with_blocks_of_another_size_says_so() -> None:
    (request,) = read_trace([json.dumps(GOOD | {"hash_ids": [1, 2, 3]})], block_tokens=256)
    assert request.blocks == (1, 2, 3)
