"""Keys and settings that are refused, where they enter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.core import CoreLimits, Watermarks, check_keys


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "must not be empty"),
        (b"bytes", "must be a str, not bytes"),
        (7, "must be a str, not int"),
        (None, "must be a str, not NoneType"),
        ("x" * 1025, r"at most 1024 bytes of UTF-8, not 1025.*hash long keys"),
        ("ü" * 513, r"not 1026"),
        ("\ud800", "surrogates"),
        (type("Text", (str,), {})("subclass"), "must be a str, not Text"),
        (["unhashable"], "must be a str, not list"),
    ],
)
def test_a_bad_key_is_refused_with_a_message_that_helps(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_keys(["good", key, "schlüssel"])
    with pytest.raises(ValueError, match=message):
        check_keys([key])


def test_the_longest_keys_are_accepted() -> None:
    check_keys(["x" * 1024, "ü" * 512, "鍵" * 341])
    check_keys([])
    with pytest.raises(ValueError, match="at most 10 bytes"):
        check_keys(["x" * 11], max_key_bytes=10)


@given(st.lists(st.text(max_size=12) | st.text(alphabet="ab", max_size=12)))
def test_keys_are_accepted_exactly_if_each_is_short_utf8(keys: list[str]) -> None:
    good = all(0 < len(key.encode(errors="surrogatepass")) <= 10 for key in keys)
    try:
        check_keys(keys, max_key_bytes=10)
    except ValueError:
        assert not good
    else:
        assert good


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.9, 0.8), (0.5, 1.1), (-0.1, 0.5)])
def test_impossible_watermarks_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"low|high"):
        Watermarks(low, high)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_key_bytes": 0},
        {"max_key_bytes": 1025},
        {"max_value_bytes": 0},
        {"max_batch_keys": 0},
        {"max_pinned_ratio": 0},
        {"max_pinned_ratio": 1.5},
        {"max_hold_s": 0},
        {"max_held_ratio": -1},
    ],
)
def test_impossible_limits_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        CoreLimits(**setting)  # type: ignore[arg-type]
