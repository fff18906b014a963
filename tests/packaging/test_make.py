"""Which environment `make` uses: its own for each Python that was asked for, never
another one that is there.
"""

import os
import subprocess
import sys

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


@pytest.mark.parametrize(("torch", "extra"), [("", "test-tensors"), ("none", "test")])
def test_pytorch_can_be_left_out_and_the_tests_are_told(torch: str, extra: str) -> None:
    commands = commands_of("test", f"PYTHON={sys.executable}", "VENV=.venvs/none-such", f"TEST_TORCH={torch}")

    assert commands[-1].startswith(f"TEST_TORCH={torch} ")
    (install,) = [command for command in commands if "pip install" in command]
    assert f'".[{extra}]"' in install
