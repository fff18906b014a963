"""A client and a server of which one is of the last release: the packages as they were
and are, each in a process.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import warm
from tests.protocol.golden import record
from tests.protocol.golden.record import unpack

pytestmark = pytest.mark.nightly
THIS_RELEASE = Path(__file__).parents[2]
IMPORT = """
import sys
folder = sys.argv[1]
sys.path.insert(0, folder)
import infinistore
assert infinistore.__file__.startswith(folder + "/"), infinistore.__file__
"""
SERVER = (
    IMPORT
    + """
from infinistore.cli import main
main(["serve", "--host", "127.0.0.1", "--service-port", "0", "--manage-port", "off",
      "--prealloc-size", "64MiB", "--log-level", "error", "--unix-socket", sys.argv[2]])
"""
)
CLIENT = (
    IMPORT
    + """
from infinistore import blocking
block = bytes(range(256)) * 4096
with blocking.open_store(sys.argv[2]) as store:
    for _ in range(3):  # the second time, places are known and room is reserved
        assert store.put_many([(f"many/{index}", bytes([index]) * (5000 + index)) for index in range(8)]) == []
        store.put("small", b"x" * 100)
        store.put("long", block)
        for _ in range(3):
            assert store.get("long") == block
        assert store.get("small") == b"x" * 100
        room = bytearray(len(block))
        assert store.get_into("long", room) == len(room)
        assert room == block
        with store.lease(["long"]) as lease:
            assert len(lease) == 1
        assert store.get_many(["many/7", "none"]) == [b"\\7" * 5007, None]
    assert store.exists("long") and not store.exists("none")
    assert store.match_prefix(["small", "long", "none"]) == 2
    assert store.keys(prefix="many/") == [f"many/{index}" for index in range(8)]
    stats = store.stats(details=True)
    assert stats.store.keys == 10
    print(stats.transport)
    assert store.delete(["long"]) == 1
    assert store.purge() == 9
"""
)


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("last_release")
    try:
        unpack(folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the last release is not in the history of this checkout")
    return folder


def test_the_golden_frames_are_those_of_the_last_release(last_release: Path) -> None:
    golden = Path(record.__file__).parent
    program = (
        f"import sys; sys.path[:0] = [sys.argv[1], {str(golden)!r}]; import record; print(*record.frames(), sep='\\n')"
    )
    command = [sys.executable, "-P", "-c", program, str(last_release)]
    ran = warm.run(command, cold=True, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == (golden / "frames.hex").read_text()


@contextmanager
def serving(release: Path, socket: Path) -> Iterator[str]:
    """Run a server of a release; yield its TCP address."""
    command = [sys.executable, "-P", "-c", SERVER, str(release), str(socket)]
    with warm.Popen(command, cold=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"tcp://[\d.]+:\d+", process.stdout.readline())
            assert address is not None
            yield address.group()
        finally:
            process.terminate()


@pytest.mark.parametrize("older", ["server", "client"])
def test_a_server_and_a_client_of_which_one_is_older_serve_each_other(
    older: str, last_release: Path, tmp_path: Path
) -> None:
    releases = {"server": THIS_RELEASE, "client": THIS_RELEASE} | {older: last_release}
    socket = tmp_path / "socket"
    with serving(releases["server"], socket) as tcp:
        for url, transport in ((tcp, "tcp"), (f"shm://{socket}", "shm"), (f"unix://{socket}", "unix")):
            command = [sys.executable, "-P", "-W", "error", "-c", CLIENT, str(releases["client"]), url]
            ran = warm.run(command, cold=True, capture_output=True, text=True, timeout=60, check=False)
            assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, transport, "")
