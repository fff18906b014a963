"""A test that goes through a table runs each case and names those that fail."""

import pytest

from tests.tables import for_each


def test_each_combination_is_a_case_and_all_that_fail_are_named(tmp_path: object) -> None:
    ran = []

    @for_each(number=[1, 2], letter="ab")
    def check(number: int, letter: str, tmp_path: object) -> None:
        ran.append((number, letter))
        assert letter == "a", tmp_path

    with pytest.raises(ExceptionGroup, match="2 of 4 cases") as caught:
        check(tmp_path=tmp_path)
    assert ran == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    notes = [error.__notes__ for error in caught.value.exceptions]
    assert notes == [["for {'number': 1, 'letter': 'b'}"], ["for {'number': 2, 'letter': 'b'}"]]


@for_each(number=[1, 2])
def test_a_table_leaves_the_other_arguments_to_fixtures(number: int, tmp_path: object) -> None:
    assert number
    assert tmp_path is not None
