"""Bugs that nobody thought of: mutants that mutmut makes of `core/` and `protocol/`,
drawn by a seed.

Left out are those that no run could tell from the product:

- what only changes a text, the arguments of an error, a representation, or whether a
  `zip` asserts that its arguments are as long as each other;
- what the mutation tests of the file list as equivalent (`tests/mutants/survivors/`);
- what changes only how a simulation buggifies the product (`core/buggified.py`);
- what changes a line that the simulation does not run at all, as in the code that asks
  the kernel for memory. `Drawn.not_run` says how many of these were drawn.
"""

import ast
import contextlib
import difflib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import attrs

from tests.mutants.files import EQUIVALENT, known_survivors

__all__ = ["TOP", "Drawn", "DrawnMutant", "changed_lines", "does_the_same", "draw", "is_run"]

TOP = Path(__file__).parents[2]
_FOLDERS = ("core", "protocol")
_SEEDS_RUN = range(1, 16)


@attrs.frozen
class DrawnMutant:
    """A mutant of one module."""

    module: str
    source: str
    was: str
    now: str

    @property
    def name(self) -> str:
        """The change in a line."""
        return f"{self.module.removeprefix('infinistore.')}: {self.was} -> {self.now}"


@attrs.define
class Drawn:
    """The mutants that were drawn, and how many were left out."""

    mutants: list[DrawnMutant] = attrs.field(factory=list)
    same: int = 0
    """Left out because they do the same."""
    not_run: int = 0
    """Left out because the simulation does not run what they change."""


def draw(seed: int, count: int) -> Drawn:
    """Draw mutants, the same ones for the same seed and the same product."""
    files = [path for folder in _FOLDERS for path in sorted((TOP / "infinistore" / folder).glob("*.py"))]
    everything = [(path, number) for path in files for number in range(len(_mutations(path)[1]))]
    random.Random(seed).shuffle(everything)
    lines = _lines_run()
    drawn = Drawn()
    for path, number in everything:
        if len(drawn.mutants) == count:
            break
        original = path.read_text()
        mutated = _mutated(path, number)
        changed = changed_lines(original, mutated)
        if changed is None or does_the_same(path, original, changed):
            drawn.same += 1
        elif not is_run(ast.parse(original), changed[0], set(lines.get(path.stem, []))):
            drawn.not_run += 1
        else:
            module = f"infinistore.{path.parent.name}.{path.stem}"
            drawn.mutants.append(DrawnMutant(module, mutated, changed[1], changed[2]))
    return drawn


_cache: dict[Path, tuple[Any, list[Any]]] = {}


def _mutmut() -> Any:
    """Return what mutmut mutates files with. It has an environment of its own."""
    return import_module("mutmut.mutation.file_mutation")


def _mutations(path: Path) -> tuple[Any, list[Any]]:
    if path not in _cache:
        with TemporaryDirectory() as folder, contextlib.chdir(folder):  # where it looks for its settings
            Path("setup.cfg").write_text("[mutmut]\nsource_paths=.\n")
            module, mutations, _, _ = _mutmut().create_mutations(str(path), path.read_text())
        _cache[path] = module, mutations
    return _cache[path]


def _mutated(path: Path, number: int) -> str:
    module, mutations = _mutations(path)
    mutation = mutations[number]
    source: str = _mutmut().deep_replace(module, mutation.original_node, mutation.mutated_node).code
    return source


def changed_lines(original: str, mutated: str) -> tuple[int, str, str] | None:
    """Return the number of the first line that differs, what was there, and what is."""
    before, after = original.splitlines(), mutated.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            was, now = (" ".join(line.strip() for line in lines) for lines in (before[i1:i2], after[j1:j2]))
            return i1 + 1, was, now
    return None


def does_the_same(path: Path, original: str, changed: tuple[int, str, str]) -> bool:
    """Whether no run could tell a change of this file, by what it looks like."""
    line, was, now = changed
    known = known_survivors(str(path.relative_to(TOP)))
    if any((was, now) == (one.was, one.now) and why.startswith(EQUIVALENT) for one, why in known.items()):
        return True
    if was.replace("strict=True", "") in (now.replace("strict=False", ""), now.replace("strict=None", "")):
        return True
    statement = _innermost(ast.parse(original), line)
    if isinstance(statement, ast.Raise) or (isinstance(statement, ast.Return) and _is_error(statement.value)):
        return True
    if statement is None or not _differs_in_more_than_texts(was, now):
        return True
    return any(
        isinstance(node, ast.FunctionDef) and node.name == "__repr__" and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(original))
    )


def _is_error(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith(("Error", "OutOfMemory", "Exceeded"))


def _differs_in_more_than_texts(was: str, now: str) -> bool:
    """Whether two pieces of code differ in anything but the contents of texts."""

    def code(text: str) -> str:
        return "".join(text.split('"')[::2]).replace("XX", "")

    return code(was) != code(now)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _innermost(tree: ast.AST, line: int) -> ast.stmt | None:
    around = [one for one in _statements(tree) if one.lineno <= line <= (one.end_lineno or one.lineno)]
    return min(around, key=lambda one: (one.end_lineno or one.lineno) - one.lineno, default=None)


def is_run(tree: ast.AST, line: int, run: set[int]) -> bool:
    """Whether the statement at a line is run, if these lines are."""
    statement = _innermost(tree, line)
    if statement is None:
        return False
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):  # a default: it counts if the body is run
        end = statement.end_lineno or end
        return any(statement.body[0].lineno <= one <= end for one in run)
    return any(statement.lineno <= one <= end for one in run)


def _lines_run() -> dict[str, list[int]]:
    """Return the lines that some seeds run, by the name of the file."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.drawn"], capture_output=True, text=True, check=True, cwd=TOP
    )
    lines: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return lines


def _trace_lines() -> None:
    """Print the lines of core and protocol that some seeds run, as JSON."""
    from tests.simulation.scenario import Scenario
    from tests.simulation.simulate import simulate

    lines: dict[str, set[int]] = {}
    folders = tuple(f"{TOP}/infinistore/{folder}/" for folder in _FOLDERS)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(folders):
            return None
        of_file = lines.setdefault(Path(path).stem, set())

        def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
            of_file.add(frame.f_lineno)
            return trace_line

        return trace_line

    sys.settrace(trace)
    for seed in _SEEDS_RUN:
        simulate(Scenario.from_seed(seed))
    sys.settrace(None)
    sys.stdout.write(json.dumps({name: sorted(found) for name, found in sorted(lines.items())}))


if __name__ == "__main__":
    _trace_lines()
