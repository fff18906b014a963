"""Which environment `make` uses: its own for each Python that was asked for, never
another one that is there.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


def commands_of(*arguments: str) -> list[str]:
    """What make would run."""
    # What a `make test` around this test was told is not for this one.
    unset = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV", "TEST_TORCH"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_a_choice_it_is_the_environment_that_the_documents_name() -> None:
    assert " .venv/bin/pytest" in commands_of("test")[-1]


@pytest.mark.parametrize("target", ["test", "demo"])
def test_a_python_that_is_chosen_has_an_environment_of_its_own(target: str) -> None:
    assert f".venvs/{VERSION}/bin/" in commands_of(target, f"PYTHON={sys.executable}")[-1]


def test_a_python_that_does_not_run_is_not_replaced_by_another() -> None:
    assert ".venvs/unusable/bin/" in commands_of("test", "PYTHON=no-such-python")[-1]


def test_the_environment_can_be_named_too() -> None:
    assert " .venv/bin/pytest" in commands_of("test", f"PYTHON={sys.executable}", "VENV=.venv")[-1]


@pytest.mark.parametrize("finds", [0, 1], ids=["nothing", "something"])
def test_an_audit_covers_every_lock_and_fails_if_one_cannot_be_audited(finds: int, tmp_path: Path) -> None:
    """An index without advisories, or out of reach, is no good news."""
    audit = tmp_path / "pip-audit"
    audit.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit {finds}\n')
    audit.chmod(0o755)
    recipe = "\n".join(commands_of("audit"))
    recipe = recipe[recipe.index("failed=;") :].replace(".venvs/audit/bin/pip-audit", str(audit))

    done = subprocess.run(["bash", "-c", recipe], cwd=PROJECT, capture_output=True, text=True, check=False)

    locks = sorted(path.name for path in (PROJECT / "requirements").glob("*.lock"))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.rpartition("/")[2] for line in asked] == locks
    assert all("--strict" in line and "--require-hashes" in line for line in asked)
    assert done.returncode == finds
    assert ("for want of an index of advisories: requirements/server.lock" in done.stderr) == bool(finds)


@pytest.mark.parametrize(("torch", "extra"), [("", "test-tensors"), ("none", "test")])
def test_pytorch_can_be_left_out_and_the_tests_are_told(torch: str, extra: str) -> None:
    commands = commands_of("test", f"PYTHON={sys.executable}", "VENV=.venvs/none-such", f"TEST_TORCH={torch}")

    assert commands[-1].startswith(f"TEST_TORCH={torch} ")
    (install,) = [command for command in commands if "pip install" in command]
    assert f'".[{extra}]"' in install


@pytest.mark.process
def test_without_pytorch_folders_whose_conftest_needs_it_are_left_out() -> None:
    without = "import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    others = [f"--ignore={path}" for path in (PROJECT / "tests").iterdir() if path.name not in {"gpu", "tensors"}]
    command = [sys.executable, "-c", without, "--collect-only", "-q", "-p", "no:cacheprovider", *others, "tests"]
    done = subprocess.run(
        command, cwd=PROJECT, env={**os.environ, "TEST_TORCH": "none"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "test_blocks.py needs PyTorch" in done.stdout


def test_the_versions_that_tests_run_with_are_pinned_and_can_be_left_to_pip() -> None:
    fresh = ["test", "test-integrations", f"PYTHON={sys.executable}", "VENV=.venvs/none-such", "--always-make"]
    pinned = [line for line in commands_of(*fresh) if "--editable" in line]
    assert pinned
    for line in pinned:
        (pins,) = re.findall(r"--constraint (requirements/pins/\S+\.txt)", line)
        lines = (PROJECT / pins).read_text().splitlines()
        assert len(lines) > 10
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", one) for one in lines)

    assert not [line for line in commands_of(*fresh, "NEWEST=1") if "--constraint" in line]
