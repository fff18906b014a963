"""Sizes as people write them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.sizes import GIB, KIB, MIB, TIB, describe_size, format_size, in_units, parse_size

sizes = st.one_of(
    st.integers(0, 1 << 60), st.builds(int.__mul__, st.integers(0, 1023), st.sampled_from([1, KIB, MIB, GIB, TIB]))
)


@given(sizes)
def test_what_is_formatted_is_read_back_to_the_byte(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(sizes, st.integers(1, 1 << 40))
def test_a_unit_is_stronger_than_the_bare_unit(size_bytes: int, bare_unit_bytes: int) -> None:
    assert parse_size(format_size(size_bytes), bare_unit_bytes) == size_bytes


@given(sizes)
def test_a_described_size_is_within_one_percent(size_bytes: int) -> None:
    assert abs(parse_size(describe_size(size_bytes)) - size_bytes) <= size_bytes * 0.01


@given(sizes)
def test_a_size_in_an_error_can_be_read_back_to_the_byte(size_bytes: int) -> None:
    rounded, _, exact = in_units(size_bytes).partition(" (")
    exact = exact.removesuffix(")") or rounded
    assert parse_size(exact.replace(",", "").removesuffix("bytes")) == size_bytes
    assert len(rounded) <= len("1023.5 KiB")


@pytest.mark.parametrize(
    ("size_bytes", "told"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (64 * GIB, "64 GiB"),
        (1536 * MIB, "1.5 GiB"),
        (MIB + 1, "1 MiB (1,048,577 bytes)"),
    ],
)
def test_a_size_in_an_error_is_in_units_that_people_read(size_bytes: int, told: str) -> None:
    assert in_units(size_bytes) == told


@given(st.integers(0, 1 << 20), st.sampled_from([1, KIB, GIB]))
def test_a_bare_number_counts_in_the_bare_unit(number: int, bare_unit_bytes: int) -> None:
    assert parse_size(str(number), bare_unit_bytes) == parse_size(number, bare_unit_bytes) == number * bare_unit_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("512mb", 512 * MIB),
        ("512M", 512 * MIB),
        (" 2 GiB ", 2 * GIB),
        ("0.5GiB", GIB // 2),
        (".5k", 512),
        ("7B", 7),
        ("1TiB", TIB),
        ("0.1", 0),
    ],
)
def test_the_usual_spellings_are_understood(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "lots", "-1", "1e9", "1.2.3GiB", "5 elephants", "MiB", "5iB", "nan", "inf", "٣MiB"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size|unknown unit"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_size(text) >= 0


def test_true_is_not_one_byte() -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(True)
