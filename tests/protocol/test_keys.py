"""Keys against a naive model: what is refused, what is said about it, and how a batch
travels.
"""

import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.keys import (
    MAX_JOINED_KEYS,
    MAX_KEY_BYTES,
    CheckedKeys,
    check_distinct,
    check_keys,
    join_keys,
    split_keys,
)

from .strategies import lists_of_keys

# A short alphabet, so that odd keys are met often: ASCII, two and four bytes of UTF-8,
# NUL, half a surrogate pair.
odd_texts = st.text("ab\u00e9\U0001f4a9\0\ud800", max_size=6)
long_texts = st.integers(MAX_KEY_BYTES // 4 - 2, MAX_KEY_BYTES + 2).flatmap(
    lambda length: st.sampled_from(["x", "\u00e9", "\U0001f4a9"]).map(lambda character: character * length)
)


def is_key(key: object, max_key_bytes: int) -> bool:
    """The naive model."""
    if not isinstance(key, str) or not key or "\0" in key:
        return False
    try:
        return len(key.encode()) <= max_key_bytes
    except UnicodeEncodeError:
        return False


def outcome(check: Callable[[], object]) -> type[Exception] | None:
    try:
        check()
    except (TypeError, ValueError) as error:
        return type(error)
    return None


@given(st.lists(odd_texts | long_texts, max_size=6), st.sampled_from([1, 4, 1000, MAX_KEY_BYTES]))
@example([""], MAX_KEY_BYTES)
@example(["a", "", "b"], MAX_KEY_BYTES)
@example(["a\0b"], MAX_KEY_BYTES)
@example(["x" * 600, "y" * 600], MAX_KEY_BYTES)
def test_a_batch_is_refused_exactly_when_one_of_its_keys_is_none(keys: list[str], max_key_bytes: int) -> None:
    expected = None if all(is_key(key, max_key_bytes) for key in keys) else ValueError
    assert outcome(lambda: check_keys(keys, max_key_bytes)) == expected


@given(st.lists(odd_texts | st.none() | st.binary() | st.integers(), max_size=6))
def test_what_is_not_text_is_a_type_error(keys: list[object]) -> None:
    if all(isinstance(key, str) for key in keys):
        return
    assert outcome(lambda: check_keys(keys)) is TypeError  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("", "key 2 is empty"),
        ("a\0b", "key 2 has a NUL"),
        ("\ud800", "key 2 has a lone surrogate"),
        ("x" * 1025, "key 2 has 1025 bytes; at most 1024"),
        ("\u00e9" * 513, "key 2 has 1026 bytes; at most 1024"),
    ],
)
def test_the_error_names_the_first_offender_and_what_is_wrong(bad: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_keys(["a", "b", bad, bad])


def test_of_two_bad_keys_the_first_is_named_whatever_is_wrong_with_it() -> None:
    for keys in (["a", "\u00e9" * 513, "\ud800"], ["a", "\ud800", "\u00e9" * 513]):
        with pytest.raises(ValueError, match="key 1 has"):
            check_keys(keys)


@pytest.mark.parametrize("last", ["\u00e9", "\u00e9" * 513, "\ud800", ""], ids=["good", "long", "no text", "empty"])
def test_no_key_of_many_is_looked_at_alone(last: str) -> None:
    """Whatever a batch has: to check it takes a few calls for each kilobyte."""
    keys = ["\u00e9"] * 50_000 + [last, *["\u00e9"] * 50_000]
    joined, calls = "\0".join(keys), list[str]()
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        outcome(lambda: split_keys(joined))
        outcome(lambda: check_keys(keys))
    finally:
        sys.setprofile(None)
    assert len(calls) < 3000


def test_the_type_error_names_the_first_offender() -> None:
    with pytest.raises(TypeError, match=r"key 1 is bytes, not text \(str\): b'x'"):
        check_keys(["a", b"x", 3])  # type: ignore[list-item]


@given(st.lists(st.sampled_from("abc"), max_size=4))
def test_a_key_that_stands_twice_is_found(keys: list[str]) -> None:
    expected = ValueError if len(set(keys)) < len(keys) else None
    assert outcome(lambda: check_distinct(keys)) == expected


@given(lists_of_keys)
def test_a_batch_comes_back_from_the_text_that_it_travels_as(keys: list[str]) -> None:
    assert check_keys(keys) == join_keys(keys)
    assert split_keys(join_keys(keys)) == keys
    assert CheckedKeys(iter(keys)) == keys
    assert join_keys(CheckedKeys(keys)) == join_keys(keys)


@given(st.text("ab\u00e9\0\ud800", max_size=12) | st.lists(long_texts, max_size=3).map("\0".join))
@example("\0")
@example("a\0")
@example("\0a")
def test_a_joined_text_is_refused_exactly_when_one_of_its_keys_is_none(joined: str) -> None:
    keys = joined.split("\0") if joined else []
    expected = None if all(is_key(key, MAX_KEY_BYTES) for key in keys) else ValueError
    assert outcome(lambda: split_keys(joined)) == expected


def test_a_joined_text_has_at_most_a_million_keys() -> None:
    joined = "a" + "\0a" * (MAX_JOINED_KEYS - 1)
    assert len(split_keys(joined)) == MAX_JOINED_KEYS
    with pytest.raises(ValueError, match="more than 1000000 keys"):
        split_keys(joined + "\0a")
