"""Bugs in the product are found, and which bugs count as such."""

import ast
import math
import sys

import pytest

from tests.simulation.drawn import TOP, changed_lines, does_the_same, is_run
from tests.simulation.hunt import Plant, hunt, look_for
from tests.simulation.mutants import planted
from tests.simulation.planted import PLANTED, Planted
from tests.simulation.shared_memory_mutants import MUTANTS

INDEX = TOP / "infinistore" / "core" / "index.py"


def test_each_planted_bug_fits_the_product_and_is_a_program() -> None:
    misfits = {}
    for bug in PLANTED:
        try:
            for source in bug.sources().values():
                ast.parse(source)
        except (ValueError, SyntaxError) as error:
            misfits[bug.name] = error
    assert misfits == {}
    assert len(PLANTED) > 40


def test_a_bug_whose_place_is_gone_says_so() -> None:
    with pytest.raises(ValueError, match="0 places"):
        Planted("a bug", "infinistore.core.index", "not there", "").source()


@pytest.mark.process
def test_a_planted_bug_is_found_in_a_process_of_its_own() -> None:
    bug = next(bug for bug in PLANTED if bug.name == "commit before payload")
    found = hunt(Plant(bug.sources()), 30.0, first_seed=36)
    assert found.found
    assert found.calls


def test_a_bug_of_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    found = look_for(Plant(shared_memory="replacement not announced"), math.inf, first_seed=4)
    assert found.found
    assert found.calls


def test_every_bug_has_a_name_of_its_own() -> None:
    assert len(planted()) == len(PLANTED) + len(MUTANTS)


def test_a_hunt_without_time_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    came = look_for(Plant({"infinistore.core.index": INDEX.read_text()}), 0.0, first_seed=1)
    assert (came.found, came.seeds, came.calls) == ("", 0, 0)


@pytest.mark.parametrize(
    ("was", "now", "same"),
    [
        ("        return len(self._entries)", "        return len(self._entries) + 1", False),
        ("return position", "return position + 1", False),
        ('"""Return the number of keys."""', '"""XXReturn the number of keys.XX"""', True),
        ("    found: Iterable[str] = filter(", "    found: Iterable[str] = list(", False),
    ],
)
def test_a_mutant_that_changes_only_a_text_is_none(was: str, now: str, same: bool) -> None:
    original = INDEX.read_text()
    if was not in original:
        original = f"def f():\n    {was}\n    return 1\n"
    changed = changed_lines(original, original.replace(was, now, 1))
    assert changed is not None
    assert does_the_same(INDEX, original, changed) is same


def test_a_mutant_of_the_arguments_of_an_error_is_none() -> None:
    original = 'def f(a):\n    if a:\n        raise ValueError(f"{a} is wrong")\n'
    changed = changed_lines(original, original.replace("{a} is", "{None} is"))
    assert changed is not None
    assert does_the_same(INDEX, original, changed)


def test_a_statement_of_several_lines_is_run_if_one_of_them_is() -> None:
    tree = ast.parse("def f(a):\n    b = [\n        a,\n        1,\n    ]\n    if b:\n        return b\n    return a\n")
    assert is_run(tree, 4, {2})
    assert is_run(tree, 6, {6})
    assert not is_run(tree, 6, {7})
    assert not is_run(tree, 8, {7})
