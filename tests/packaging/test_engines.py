"""The tests of an engine run in an environment that has what the engine needs, and not
all that other tests do.
"""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .conftest import PROJECT

ENGINES = sorted(path.name for path in (PROJECT / "tests/integrations").iterdir() if any(path.glob("test_*.py")))


def listed(file: Path) -> set[str]:
    """The packages in a file of requirements, and in those that it names."""
    names: set[str] = set()
    for line in file.read_text().splitlines():
        if line.startswith("--requirement "):
            names |= listed(file.with_name(line.split()[1]))
        elif name := re.match(r"[A-Za-z][\w.-]*", line):
            names.add(module_of(name[0]))
    return names


def module_of(package: str) -> str:
    return package.lower().replace("-", "_")


def imported_at_once(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """What is imported when a module is, so not in its functions or for its types."""
    for statement in statements:
        match statement:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield from (module, *(f"{module}.{name.name}" for name in statement.names))
            case ast.Try(body) | ast.With(body=body):
                yield from imported_at_once(body)
            case ast.If(test, body, other):
                yield from imported_at_once(other)
                if ast.unparse(test) != "TYPE_CHECKING":
                    yield from imported_at_once(body)


def reached_from(files: Iterable[Path]) -> dict[str, Path]:
    """Which modules these files of tests import, by way of others, too, and a file that
    does so.
    """
    found: dict[str, Path] = {}
    left = list(files)
    seen = set(left)
    while left:
        file = left.pop()
        for name in imported_at_once(ast.parse(file.read_text()).body):
            found.setdefault(name.partition(".")[0], file)
            other = PROJECT / f"{name.replace('.', '/')}.py"
            if name.startswith("tests.") and other.is_file() and other not in seen:
                seen.add(other)
                left.append(other)
    return found


def test_there_are_engines() -> None:
    assert {"lmcache", "sglang", "vllm"} <= set(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_tests_import_what_its_environment_has(engine: str) -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_other_tests = {module_of(re.split(r"[<>=\[]", package)[0]) for package in extras["test"]}
    missing = of_other_tests - listed(PROJECT / f"requirements/{engine}.txt")
    assert "schemathesis" in missing

    tests = PROJECT / "tests"
    reached = reached_from(
        [tests / "conftest.py", *tests.glob("integrations/*.py"), *tests.glob(f"integrations/{engine}/*.py")]
    )

    assert "pytest" in reached
    assert {name: file for name, file in reached.items() if name in missing} == {}
