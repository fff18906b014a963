"""What may stand between a client and the pool of a server on its own host: one clear
error, or another way.
"""

import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.errors import StoreUnavailable, VersionMismatch
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import ErrorReply
from tests.bad_days.test_fork import in_child
from tests.clients.on_this_host import best, run_client, serving
from tests.clients.shared_serving import Shared
from tests.clients.stores import Loops

NOBODY = 65534


def way(url: str) -> tuple[str, str]:
    """Which transport a store takes, and why; a block goes there and back."""
    with blocking.open_store(url, deadline_s=60) as store:
        store.put("way", bytes(100_000))
        assert store.get("way") == bytes(100_000)
        stats = store.stats()
        return stats.transport, stats.transport_reason


def as_somebody_else(check: Callable[[], None], path: Path) -> None:
    """Run `check` where this socket may not be opened."""
    if os.geteuid():
        path.chmod(0)
        check()
        return

    def other() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        check()

    in_child(other)


@pytest.mark.process
def test_the_socket_of_another_user_is_refused_with_the_remedy_or_tcp_is_taken(one_kind: Shared) -> None:
    url = best(one_kind.server)
    assert way(url)[0] == "shm"

    def check() -> None:
        with pytest.raises(StoreUnavailable, match=r"Permission denied; connect as the user .* or by TCP"):
            way(one_kind.url)
        transport, reason = way(url)
        assert (transport, "Permission denied" in reason) == ("tcp", True)

    as_somebody_else(check, one_kind.server.unix_path)


@pytest.mark.usefixtures("no_pauses")
def test_a_stale_socket_file_is_unavailable_or_tcp_is_taken(loops: Loops, tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    with loops.trio.entered(lambda: serving(tmp_path)) as server:
        assert way(best(server))[0] == "shm"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        with pytest.raises(StoreUnavailable, match="is the server running there"):
            way(f"shm://{path}")
        transport, reason = way(best(server))
        assert (transport, "Connection refused" in reason) == ("tcp", True)
    assert path.is_socket()
    with loops.trio.entered(lambda: serving(tmp_path)) as server:  # it replaces what a dead server left behind
        assert way(best(server))[0] == way(f"shm://{path}")[0] == "shm"


def test_a_server_of_another_version_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    path = tmp_path / "store.sock"
    refusal = bytearray(encode_head(ErrorReply(VersionMismatch.code, "this server speaks 2", fatal=True), request_id=1))
    refusal[4] = 2  # the version of the header
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(refusal)
                connection.recv(1)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(VersionMismatch, match="2"):
            way(f"shm://{path}")
        thread.join()


@pytest.mark.process
def test_a_process_without_address_space_or_descriptors_is_told_so_and_goes_on_later(one_kind: Shared) -> None:
    code = """
    import os, resource
    from infinistore import OutOfMemory, StoreUnavailable
    def put():
        store.put("large", bytes(100_000))
    def lease():
        with store.lease(["key"]):
            pass
    def reserve():
        with store.reserve({"other": 100_000}) as views:
            views[0][:] = bytes(100_000)
    def refused(error, *calls):
        for call in calls:
            try:
                call()
            except error as refusal:
                print(refusal)
    store.put("key", b"short")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    refused(StoreUnavailable, put)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 20), resource.RLIM_INFINITY))
    refused(OutOfMemory, lease, reserve, put)
    assert store.get("key") == b"short"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for call in (lease, reserve, put):
        call()
    assert store.get("large") == bytes(100_000)
    print(store.stats().transport, sorted(store.keys()), flush=True)
"""
    client = run_client(one_kind.url, code)
    output, _ = client.communicate()
    assert client.returncode == 0
    first, *errors, last = output.decode().splitlines()
    assert re.search(r"descriptors.*ulimit -n", first)
    assert len(errors) == 3
    assert all("mapping 4 MiB" in error and "ulimit -v" in error for error in errors)
    assert last == "shm ['key', 'large', 'other']"
    one_kind.until(clients=0, reservations=0, leases=0, quarantined_bytes=0)
