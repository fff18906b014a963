"""The table of `docs/testing.md` that says which tests run where is true to the
Makefile and to `.ci/run`.
"""

import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
MAKEFILE = (TOP / "Makefile").read_text()
CI = re.sub(r"#.*", "", (TOP / ".ci" / "run").read_text())
NIGHTLY = MAKEFILE.partition("\nNIGHTLY :=")[2].partition("\n# Skips")[0]
TABLE = (TOP / "docs" / "testing.md").read_text().partition("## Which runs where")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in TABLE.splitlines()
    if "`" in line and line[0] == "|"
][1:]
TARGETS = re.findall(r"^([a-z-]+):.*?## ", MAKEFILE, flags=re.MULTILINE)
NO_TESTS = {
    "help",
    "dist",
    "lock",
    "pins",
    "pyverbs",
    "generate",
    "format",
    "release",
    "nightly",
    "help-nightly",
    "clean",
    "pictures",
}


def commands(cell: str) -> list[str]:
    """What is run, as it stands in a file that runs it."""
    said = re.findall(r"`(make [a-z-]+|[a-z]+/[a-z_]+\.py|python -m [a-z.]+)", cell)
    return [one.replace("make ", "").replace("python ", "").removeprefix("bench/").removesuffix(".py") for one in said]


def runs(text: str, command: str) -> bool:
    before = r"make|\$\(MAKE\)|python"
    return re.search(rf"(?:{before}) (?:bench/)?{re.escape(command)}(?![\w/-])", text) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_what_runs_where(row: list[str]) -> None:
    what, command, _, ci, nightly = row
    mutants = "MUTANTS=1" in command
    for one in commands(command):
        in_ci = runs(CI, one) and not mutants
        in_nightly = runs(NIGHTLY, one)
        assert in_ci or ci in {"no", "as `make test`"}, what
        assert not in_ci or ci != "no", what
        assert in_nightly or nightly == "no" or nightly.startswith("as part of"), what
        assert not in_nightly or nightly != "no", what


def test_every_target_that_tests_something_has_a_row() -> None:
    named = {one for row in ROWS for one in commands(row[1])}
    assert set(TARGETS) - NO_TESTS <= named
