"""Generated files are what their sources make of them, and `scripts/generate.py
--check` notices when they are not.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT

pytest.importorskip("ruff", reason="the generated files are formatted by ruff, which `make check` installs")

STORE = Path("infinistore/client/api/store.py")
BLOCKING_STORE = Path("infinistore/client/api/blocking_store.py")


def generate(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command: list[str | Path] = [sys.executable, PROJECT / "scripts" / "generate.py", "--project", project, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that are generated, and those they are generated from, to be
    changed.
    """
    for folder in ("bench", "docs", "infinistore", "tests/gpu"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_generated_files_are_up_to_date() -> None:
    done = generate(PROJECT, "--check")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.nightly
def test_a_file_that_is_not_what_its_source_makes_of_it_is_named_and_left_alone_until_it_is_made_again(
    copy: Path,
) -> None:
    source = (copy / STORE).read_text()
    changed = source.replace("async def purge(self) -> int:", "async def purge_all(self) -> int:")
    assert changed != source
    (copy / STORE).write_text(changed)
    before = (copy / BLOCKING_STORE).read_text()

    done = generate(copy, "--check")
    said = f"out of date, run `make generate`: {BLOCKING_STORE}\nout of date, run `make generate`: docs/public-api.md\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, said, "")
    assert (copy / BLOCKING_STORE).read_text() == before

    done = generate(copy)
    assert (done.returncode, done.stdout) == (0, f"written: {BLOCKING_STORE}\nwritten: docs/public-api.md\n")
    assert "    def purge_all(self) -> int:" in (copy / BLOCKING_STORE).read_text()


def test_what_has_no_blocking_counterpart_is_refused(copy: Path) -> None:
    (copy / STORE).write_text((copy / STORE).read_text() + "\n\nasync_only = 1\n")

    done = generate(copy)

    assert done.returncode == 1
    assert "'async_only' in infinistore/client/api/store.py has no blocking counterpart" in done.stderr


def test_a_row_of_the_table_that_applies_nowhere_is_refused(copy: Path) -> None:
    source = (copy / STORE).read_text()
    (copy / STORE).write_text(source.replace("    Any call may be cancelled.\n\n", ""))

    done = generate(copy)

    assert done.returncode == 1
    assert "is nowhere in infinistore/client/api/store.py" in done.stderr


def test_the_first_line_of_a_generated_module_says_what_to_change_instead() -> None:
    first = (PROJECT / BLOCKING_STORE).read_text().splitlines()[0]

    assert first.startswith("# Generated from ")
    assert first.endswith("by scripts/generate.py: change that one instead.")
