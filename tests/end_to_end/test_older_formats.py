"""An upgrade to this release from one whose state of the pool has an older format, and
the way back. The older server is the code of that time, out of git.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from infinistore.core.pool_state import FORMAT
from tests.core.golden.record import COMMITS
from tests.end_to_end.kept_descriptors import Manager
from tests.end_to_end.test_kept_cache import KEYS, fill, flags, manager, there
from tests.end_to_end.test_take_over import Servers, give_tenants, loads_of, loads_of_tenants, servers, upgrade_twice
from tests.protocol.golden.record import unpack

__all__ = ["flags", "manager", "servers"]

pytestmark = pytest.mark.nightly
Older = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module", params=COMMITS)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """An older format, and a folder with the last code that wrote it."""
    folder = tmp_path_factory.mktemp("older")
    try:
        unpack(folder, COMMITS[request.param])
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"the last commit with format {request.param} is not in the history of this checkout")
    return request.param, folder


@pytest.fixture
def older(release: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> Older:
    """Returns older(): processes that are started within it run the older code."""

    @contextmanager
    def running() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(release[1]))
            command = [sys.executable, "-P", "-c", "import infinistore; print(infinistore.__file__)"]
            found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert found.startswith(f"{release[1]}{os.sep}")
            yield

    return running


@pytest.mark.parametrize("tenants", [False, True])
def test_an_older_server_is_taken_over_under_load_with_all_its_blocks(
    servers: Servers, older: Older, tenants: bool
) -> None:
    tokens = give_tenants(servers) if tenants else {}
    with older():
        process = servers.start()
    loads = loads_of_tenants(servers, tokens) if tenants else loads_of(servers)
    upgrade_twice(servers, process, loads, servers.open("shm", tokens.get("ann", "")))


@pytest.mark.parametrize("disk", [False, True])
def test_an_older_process_that_would_take_over_is_refused_and_the_server_serves_on(
    servers: Servers, older: Older, disk: bool
) -> None:
    servers.flags = ("--disk", f"{servers.folder / 'disk'}:64MiB") if disk else ()
    process = servers.start()
    loads = loads_of(servers)
    for load in loads:
        load.start()
    with older(), (servers.folder / "log").open("wb") as log:
        successor = servers.spawn("--take-over", stderr=log)
    assert successor.wait(60) == 2
    for load in loads:
        load.stop()
        load.check()
    assert [load.faults for load in loads] == [[]] * len(loads)
    assert process.poll() is None
    said = (servers.folder / "log").read_text().splitlines()
    assert len(said) == 1
    assert "the server is of a newer release than the process that takes over" in said[0]


def test_what_systemd_has_kept_of_an_older_server_is_served(
    manager: Manager, flags: list[str], older: Older, release: tuple[int, Path]
) -> None:
    with older():
        process = manager.start(*flags)
    fill(flags)
    process.terminate()
    assert process.wait(60) == 0
    assert struct.unpack_from("=Q", os.pread(manager.kept["infinistore-state"], 16, 0), 8) == (release[0],)
    manager.start(*flags)
    assert there(flags) == len(KEYS)
    assert "WARN" not in manager.log


def test_an_older_server_starts_empty_after_a_newer_one_and_says_why(
    manager: Manager, flags: list[str], older: Older
) -> None:
    process = manager.start(*flags)
    fill(flags)
    process.terminate()
    assert process.wait(60) == 0
    with older():
        manager.start(*flags)
    assert there(flags) == 0
    assert f"it has format {FORMAT}, and this release reads format" in manager.log
