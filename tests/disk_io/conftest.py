"""A folder for a disk, and runners that end with the test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infinistore.disk_io import DiskFolder, ThreadRunner, open_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a disk may be made."""
    return tmp_path / "nvme0"


@pytest.fixture
def folder(path: Path) -> Iterator[DiskFolder]:
    """The open folder of a new disk."""
    opened = open_folder(path)
    yield opened
    opened.close()


@pytest.fixture
def runner_of() -> Iterator[Callable[..., ThreadRunner]]:
    """What makes runners, with the settings given, and closes them at the end."""
    made: list[ThreadRunner] = []

    def make(**settings: int) -> ThreadRunner:
        made.append(ThreadRunner(**settings))
        return made[-1]

    yield make
    for runner in made:
        assert runner.close(timeout_s=60)
