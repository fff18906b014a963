"""A server that may open few descriptors: strangers take none that clients and probes
need.
"""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from infinistore import blocking
from infinistore.errors import LimitExceeded
from tests import warm
from tests.end_to_end.conftest import SERVER

LIMITED = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from infinistore.cli import main
main(sys.argv[2:])
"""


@contextmanager
def serving(descriptors: int) -> "Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]":
    """A server that may open so many, and what it says that it listens on."""
    arguments = [sys.executable, "-P", "-c", LIMITED, str(descriptors), *SERVER, "--prealloc-size", "1MiB", "--json"]
    pipe = subprocess.PIPE
    with warm.Popen(arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield process, json.loads(line) if line else {}
        finally:
            process.kill()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def probe(url: str) -> int:
    with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
        return int(answer.status)


def test_strangers_at_both_ports_leave_descriptors_for_clients_and_probes() -> None:
    with serving(64) as (process, said), ExitStack() as strangers:
        (url,), (management,) = said["listening"], said["management"]
        for port in (port_of(url), port_of(management)):
            for _ in range(100):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.sendall(b"G")
        with blocking.open_store(url, deadline_s=60) as store:
            store.put("key", b"value")
            assert store.get("key") == b"value"
        assert probe(management) == 200

        def connect_many() -> None:
            for _ in range(64):
                strangers.enter_context(blocking.open_store(url, deadline_s=60))

        with pytest.raises(LimitExceeded, match="64 descriptors"):
            connect_many()
        assert probe(management) == 200
        process.terminate()
        _, log = process.communicate()
    assert "fewer connections than --max-connections" in log
    assert "cannot accept" not in log
    assert len(log.splitlines()) < 60


def test_a_process_that_may_open_too_few_is_told_so() -> None:
    with serving(24) as (process, said):
        assert said == {}
        _, log = process.communicate()
        assert process.returncode == 2
        assert re.search(r"24 descriptors.*ulimit -n", log)
