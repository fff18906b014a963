"""The cache outlives a restart by systemd itself: its user instance, which root can run
in a mount namespace. It does not know most of the sandbox, so the service has only
those lines of the unit that concern its start, its end and its descriptors.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from infinistore import blocking
from infinistore.errors import StoreUnavailable
from tests.end_to_end.test_take_over import Load, open_at, there_of, value_of
from tests.ports import own_ports

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "infinistore.service"
KEPT = ("Type", "WatchdogSec", "Restart", "RestartSec", "TimeoutStartSec", "TimeoutStopSec", "KillMode")
SYSTEMD = Path("/lib/systemd/systemd")
HIERARCHIES = [Path("/sys/fs/cgroup", name) for name in ("", "systemd", "unified")]
# It looks for a folder that the system's own instance has, and takes all processes of
# its control group into a new one.
IN_NAMESPACE = f"""
mount -t tmpfs none /run && mkdir -p /run/systemd/system || exit 1
for group in "$@"; do mkdir "$group" && echo $$ >"$group/cgroup.procs"; done 2>/dev/null
exec {SYSTEMD} --user
"""
KEYS = [f"{n}" for n in range(100)]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("INFINISTORE_TEST_DEPLOY" not in os.environ, reason="`make test-deploy` runs this"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None, reason="needs root and systemd"
    ),
]


class Service:
    """The server as a service of an instance of systemd."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.port = min(own_ports(shards))
        self.socket = folder / "socket"
        self._environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "HOME": str(folder), "SYSTEMD_PAGER": ""}
        units = folder / ".config" / "systemd" / "user"
        units.mkdir(parents=True)
        lines = [line for line in UNIT.read_text().splitlines() if line.startswith((*KEPT, "FileDescriptorStoreMax"))]
        command = [sys.executable, "-P", "-m", "infinistore", "serve", "--host", "127.0.0.1", "--manage-port", "off"]
        command += ["--service-port", str(self.port), "--unix-socket", str(self.socket), "--prealloc-size", "64MiB"]
        command += ["--minimal-allocate-size", "4", "--log-level", "warning", "--shards", str(shards)]
        text = ["[Service]", *lines, "Environment=FDSTORE=512", f"ExecStart={' '.join(command)}"]
        (units / "infinistore.service").write_text("\n".join([*text, f"StandardError=append:{folder}/log", ""]))
        self.log = folder / "log"
        self._groups = [path / folder.name for path in HIERARCHIES if (path / "cgroup.procs").exists()]
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_NAMESPACE, "sh"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.bind(str(folder / "notices"))
            notices.settimeout(60)
            environment = self._environment | {"NOTIFY_SOCKET": str(folder / "notices")}
            self._manager = subprocess.Popen([*command, *map(str, self._groups)], env=environment)
            assert b"READY=1" in notices.recv(4096), "systemd did not start"

    def control(self, *arguments: str) -> str:
        command = ["systemctl", "--user", *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{self.log.read_text() if self.log.exists() else ''}"
        return done.stdout

    def shown(self, name: str) -> str:
        return self.control("show", "infinistore.service", "--property", name).strip().removeprefix(f"{name}=")

    def open(self, transport: str) -> AbstractContextManager[blocking.BlockingStore]:
        return open_at(transport, self.port, str(self.socket))

    def there(self) -> int:
        """How many of the blocks are there; none is wrong."""
        with self.open("shm") as store:
            return there_of(store, KEYS)

    def close(self) -> None:
        self._manager.terminate()  # which stops its services first
        self._manager.wait(60)
        for group in self._groups:
            for path in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                path.rmdir()
            with suppress(FileNotFoundError):
                group.rmdir()


@pytest.fixture
def shards() -> int:
    return 1


@pytest.fixture
def service(shards: int) -> Iterator[Service]:
    with TemporaryDirectory(prefix="service") as folder:  # a path that is short enough for sockets
        made = Service(Path(folder), shards)
        try:
            made.control("start", "infinistore.service")
            yield made
        finally:
            made.close()


def test_a_restart_under_load_keeps_the_cache_and_no_client_sees_an_error(service: Service) -> None:
    with ExitStack() as stack:
        loads = [Load(transport, stack.enter_context(service.open(transport))) for transport in ("tcp", "unix", "shm")]
        loads[0].store.put_many({key: value_of(key, 0) for key in KEYS})
        for load in loads:
            load.start()
        try:
            for _ in range(2):
                before = service.shown("MainPID")
                service.control("restart", "infinistore.service")
                assert service.shown("MainPID") != before
                assert service.shown("NFileDescriptorStore") == "0"  # all taken back
                assert service.there() == len(KEYS)
        finally:
            for load in loads:
                load.stop()
        for load in loads:
            load.check()
        assert [load.faults for load in loads] == [[], [], []]


@pytest.mark.parametrize("shards", [2])
def test_a_restart_keeps_the_cache_of_shards(service: Service) -> None:
    with service.open("unix") as store:
        store.put_many({key: value_of(key, 0) for key in KEYS})
    for _ in range(2):
        service.control("restart", "infinistore.service")
        assert service.shown("NFileDescriptorStore") == "0"
        assert service.there() == len(KEYS)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_stop_gives_the_memory_back(service: Service) -> None:
    with service.open("unix") as store:
        store.put_many({key: value_of(key, 0) for key in KEYS})
    service.control("stop", "infinistore.service")
    assert service.shown("NFileDescriptorStore") == "0"
    with (
        pytest.raises(StoreUnavailable),
        blocking.open_store(f"tcp://127.0.0.1:{service.port}", deadline_s=0.2) as store,
    ):
        store.stats()
    service.control("start", "infinistore.service")
    assert service.there() == 0


def test_a_server_that_was_killed_starts_empty(service: Service) -> None:
    with service.open("unix") as store:
        store.put_many({key: value_of(key, 0) for key in KEYS})
    before = service.shown("MainPID")
    service.control("kill", "--signal", "KILL", "infinistore.service")
    deadline = time.monotonic() + 60
    while (now := service.shown("MainPID")) in (before, "0") or service.shown("ActiveState") != "active":
        assert time.monotonic() < deadline
    assert re.fullmatch(r"\d+", now)
    assert service.there() == 0
