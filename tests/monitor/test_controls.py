"""Bytes to keys, keys to choices."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.monitor.controls import (
    BACKSPACE,
    DOWN,
    END,
    ENTER,
    ESCAPE,
    HOME,
    PAGE_DOWN,
    PAGE_UP,
    UP,
    ClientOrder,
    Controls,
    KeyParser,
    PrefixOrder,
)

NAMED = (BACKSPACE, DOWN, END, ENTER, ESCAPE, HOME, PAGE_DOWN, PAGE_UP, UP)


def keys(*pieces: bytes) -> list[str]:
    parser = KeyParser()
    return [key for piece in pieces for key in parser.feed(piece)]


def pressed(*names: str, controls: Controls | None = None) -> Controls:
    state = controls or Controls()
    for name in names:
        state = state.press(name)
    return state


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"qs?", ["q", "s", "?"]),
        (b"\r\n\x7f\x08", [ENTER, ENTER, BACKSPACE, BACKSPACE]),
        (b"\x1b", [ESCAPE]),
        (b"\x1b[A\x1b[1;5B\x1bOBq", [UP, DOWN, "q"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", [PAGE_UP, PAGE_DOWN, HOME, END]),
        (b"\x1bOPq", ["q"]),
        (b"\x1bq", []),
        ("größe".encode(), list("größe")),
        (b"\x01\x02", []),
    ],
    ids=["plain", "named", "escape", "arrows", "pages", "function key", "alt", "utf-8", "control"],
)
def test_bytes_are_turned_into_keys(data: bytes, expected: list[str]) -> None:
    assert keys(data) == expected


@given(st.text(st.characters(codec="utf-8", categories=["L", "N"])), st.data())
def test_characters_may_be_cut_anywhere(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cut = data.draw(st.integers(0, len(encoded)))
    assert keys(encoded[:cut], encoded[cut:]) == list(text)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_bytes_upset_the_parser_and_every_key_is_printable_or_named(pieces: list[bytes]) -> None:
    assert all(key in NAMED or (len(key) == 1 and key.isprintable()) for key in keys(*pieces))


@given(st.lists(st.sampled_from([*"qsSrp/+-?hx ", *NAMED])))
def test_any_sequence_of_keys_leaves_a_usable_state(names: list[str]) -> None:
    state = pressed(*names)
    assert 0.2 <= state.interval_s <= 60
    assert state.typing is None or len(state.typing) <= 60


def test_s_goes_through_the_orders_and_back_to_the_first() -> None:
    assert pressed("s").client_order is ClientOrder.REQUESTS
    assert pressed(*"sssss").client_order is ClientOrder.TRAFFIC
    assert pressed("S").prefix_order is PrefixOrder.KEYS
    assert pressed("r").reversed and not pressed("r", "r").reversed


def test_a_filter_is_typed_kept_changed_and_dropped() -> None:
    assert pressed("/", "q", "b", BACKSPACE).typing == "q"  # no key has its usual meaning meanwhile
    kept = pressed("/", "q", "w", ENTER)
    assert (kept.filter, kept.typing) == ("qw", None)
    assert kept.shows("QWEN/") and not kept.shows("llama/")
    assert pressed("/", "x", ESCAPE, controls=kept).filter == "qw"
    assert pressed("/", BACKSPACE, BACKSPACE, ENTER, controls=kept).filter == ""
    assert pressed(ESCAPE, controls=kept).filter == ""


def test_a_filter_works_while_it_is_typed() -> None:
    assert not pressed("/", "z").shows("abc")


def test_the_interval_goes_up_and_down_in_steps_and_stays_within_bounds() -> None:
    assert pressed("+").interval_s == 2
    assert pressed("-").interval_s == 0.5
    assert pressed(*"+" * 20).interval_s == 60
    assert pressed(*"-" * 20).interval_s == 0.2
    assert pressed("+", controls=Controls(interval_s=3.0)).interval_s == 5
    assert pressed("+", controls=Controls(interval_s=100.0)).interval_s == 100


def test_help_is_left_by_any_key_and_q_quits_from_there_too() -> None:
    assert pressed("?").help
    assert pressed("?", "s") == Controls()
    assert pressed("?", "q").quit


def test_an_unknown_key_changes_nothing() -> None:
    assert pressed("x") == Controls()
    assert pressed("p").paused and attrs.evolve(pressed("p"), paused=False) == Controls()
