"""What is said of mutants is true, as far as can be told without making them: `make
mutants` does that.
"""

import ast
from pathlib import Path

import pytest

from .files import EQUIVALENT, HERE, LEFT, Mutant, known_survivors, list_of_survivors, mutants_in, mutated_files

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", mutated_files())
def test_a_file_that_is_mutated_exists_and_so_do_its_tests(file: str) -> None:
    assert (PROJECT / file).is_file()
    for test in mutated_files()[file]:
        path, _, name = test.removeprefix("--deselect=").partition("::")
        assert (PROJECT / path).exists()
        assert not name or f"def {name}" in (PROJECT / path).read_text()


@pytest.mark.parametrize("file", mutated_files())
def test_a_survivor_is_listed_with_a_function_that_exists_and_a_reason(file: str) -> None:
    functions = {
        f"{outer.name}.{node.name}" if isinstance(outer, ast.ClassDef) else node.name
        for outer in ast.walk(ast.parse((PROJECT / file).read_text()))
        for node in ast.iter_child_nodes(outer)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for mutant, reason in known_survivors(file).items():
        assert mutant.function in functions
        assert reason.startswith((EQUIVALENT, LEFT))
        assert not mutant.only_asserts_less


def test_every_list_of_survivors_is_of_a_file_that_is_mutated() -> None:
    assert set((HERE / "survivors").iterdir()) <= set(map(list_of_survivors, mutated_files()))


MUTATED = """
@_mutmut_mutated(mutants_x_first__mutmut)
def first(
    some: list[int], default: int = 1
) -> int:
    return 0

def x_first__mutmut_orig(
    some: list[int], default: int = 1
) -> int:
    a = some[0]

    a = some[0]
    return a

def x_first__mutmut_1(
    some: list[int], default: int = 2
) -> int:
    a = some[0]

    a = some[0]
    return a

def x_first__mutmut_2(
    some: list[int], default: int = 1
) -> int:
    a = None

    a = some[0]
    return a

def x_first__mutmut_3(
    some: list[int], default: int = 1
) -> int:
    a = some[0]

    a = None
    return a

class Some:
    def xǁSomeǁ__len____mutmut_orig(self) -> int:
        return min(
            1,
            2,
        )

    def xǁSomeǁ__len____mutmut_1(self) -> int:
        return min(
            None,
            2,
        )

    length = 3
"""


def test_a_mutant_is_known_by_its_function_and_by_what_is_replaced_by_what() -> None:
    assert mutants_in(MUTATED) == {
        "x_first__mutmut_1": Mutant(
            "first", "some: list[int], default: int = 1", "some: list[int], default: int = 2", 1
        ),
        "x_first__mutmut_2": Mutant("first", "a = some[0]", "a = None", 1),
        "x_first__mutmut_3": Mutant("first", "a = some[0]", "a = None", 2),
        "xǁSomeǁ__len____mutmut_1": Mutant("Some.__len__", "1,", "None,", 1),
    }


@pytest.mark.parametrize("now", ["zip(a, b, )", "zip(a, b, strict=None)", "zip(a, b, strict=False)"])
def test_a_mutant_that_only_asserts_less_needs_no_reason(now: str) -> None:
    assert Mutant("f", "zip(a, b, strict=True)", now, 1).only_asserts_less


@pytest.mark.parametrize("now", ["zip(a, strict=True)", "zip(None, b, strict=True)", "None", "zip(a, )"])
def test_a_mutant_that_does_something_else_needs_one(now: str) -> None:
    assert not Mutant("f", "zip(a, b, strict=True)", now, 1).only_asserts_less
