"""What may stand between a client and the pool of a server on its own host: one clear
error, or another way.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infinistore import blocking
from infinistore.errors import StoreUnavailable, VersionMismatch
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import ErrorReply
from tests.bad_days.servers import ServerProcess
from tests.bad_days.test_fork import in_child
from tests.clients.test_shared_memory import best, run_client, server_process

NOBODY = 65534


def way(url: str) -> tuple[str, str]:
    """Which transport a store takes, and why; a block goes there and back."""
    with blocking.open_store(url, deadline_s=20) as store:
        store.put("way", bytes(100_000))
        assert store.get("way") == bytes(100_000)
        stats = store.stats()
        return stats.transport, stats.transport_reason


@contextmanager
def announcing_server(folder: Path) -> Iterator[ServerProcess]:
    with server_process(folder) as server:
        assert way(best(server))[0] == "shm"
        yield server


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


def test_the_socket_of_another_user_is_refused_with_the_remedy_or_tcp_is_taken(tmp_path: Path) -> None:
    with announcing_server(tmp_path) as server:

        def check() -> None:
            with pytest.raises(StoreUnavailable, match=r"Permission denied; connect as the user .* or by TCP"):
                way(f"shm://{tmp_path}/store.sock")
            transport, reason = way(best(server))
            assert (transport, "Permission denied" in reason) == ("tcp", True)

        as_somebody_else(check, tmp_path / "store.sock")


def test_a_stale_socket_file_is_unavailable_or_tcp_is_taken(tmp_path: Path) -> None:
    with announcing_server(tmp_path) as server:
        path = tmp_path / "store.sock"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as left_behind:
            left_behind.bind(str(path))
        with pytest.raises(StoreUnavailable, match="is the server running there"):
            way(f"shm://{path}")
        transport, reason = way(best(server))
        assert (transport, "Connection refused" in reason) == ("tcp", True)
        server.restart()  # it replaces what a dead server left behind
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


def test_a_process_without_address_space_for_the_pool_is_told_so_and_holds_nothing_back(tmp_path: Path) -> None:
    code = """
    import resource
    from infinistore import OutOfMemory
    def told(call):
        try:
            call()
        except OutOfMemory as error:
            print(error)
    def lease():
        with store.lease(["key"]):
            pass
    def reserve():
        with store.reserve({"other": 100_000}) as views:
            views[0][:] = bytes(100_000)
    store.put("key", b"short")
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 20), resource.RLIM_INFINITY))
    for call in (lease, reserve, lambda: store.put("large", bytes(100_000))):
        told(call)
    assert store.get("key") == b"short"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for call in (lease, reserve, lambda: store.put("large", bytes(100_000))):
        call()
    print(sorted(store.keys()), flush=True)
"""
    with server_process(tmp_path):
        client = run_client(f"shm://{tmp_path}/store.sock", code)
        output, _ = client.communicate()
        assert client.returncode == 0
        *errors, last = output.decode().splitlines()
        assert len(errors) == 3
        assert all("mapping 16 MiB" in error and "ulimit -v" in error for error in errors)
        assert last == "['key', 'large', 'other']"
        with blocking.open_store(f"shm://{tmp_path}/store.sock") as store:
            while (found := store.stats().store).clients > 1:
                os.sched_yield()
            assert (found.reservations, found.leases, found.quarantined_bytes) == (0, 0, 0)
