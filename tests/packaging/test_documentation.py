"""What the documents say can be done: links lead somewhere, targets exist, the first example of the README runs."""

import re
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT, run

DOCUMENTS = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("changes/README.md")])


def identify(document: Path) -> str:
    return str(document.relative_to(PROJECT))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_a_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_a_make_target_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
    assert named <= make_targets()


def test_the_quick_start_is_two_commands_and_ci_runs_both() -> None:
    readme = (PROJECT / "README.md").read_text()
    quick_start = readme.partition("## Quick start")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)\n```", quick_start, flags=re.DOTALL)
    assert commands == ["make demo", "make test"]
    ci = PROJECT / ".ci" / "run"
    assert set(commands) <= {line.removeprefix("run ") for line in ci.read_text().splitlines()}


def test_the_first_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), flags=re.DOTALL)[0]

    done = run([sys.executable, "-W", "error", "-c", example], cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "2\nb'second block'\n", "")
