"""A server as people start it: a process of its own, on a free port of this machine."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infinistore import blocking
from tests import warm

SERVER = ["--host", "127.0.0.1", "--service-port", "0", "--manage-port", "0", "--unix-socket", "off"]


def command(*arguments: str) -> list[str]:
    """Return the command line `infinistore ARGUMENTS`, of the package under test."""
    return [sys.executable, "-P", "-m", "infinistore", *arguments]


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `infinistore ARGUMENTS`; at the end it is killed, should it still run."""
    pipe = subprocess.PIPE
    with warm.Popen(command(*arguments), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """The address of a server with a pool of 128 MiB, one for all tests of a module."""
    with started(*SERVER, "--prealloc-size", "128MiB", "--log-level", "error") as server:
        assert server.stdout is not None
        address = re.search(r"tcp://[\d.]+:\d+", server.stdout.readline())
        assert address is not None
        yield address.group()
        server.terminate()
        server.communicate()


@pytest.fixture
def url(server_url: str) -> str:
    """The address of a server that is empty."""
    with blocking.open_store(server_url) as store:
        store.purge()
    return server_url
