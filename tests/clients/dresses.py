"""Stores of each dress, over TLS or not, as a URL and options describe them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import infinistore
from infinistore import aio, blocking
from infinistore.blocking import BlockingStore
from tests.clients.event_loops import Loops, as_blocking
from tests.server.running import MIB, RunningServer, make_config, running_server
from tests.transports.certificates import Files

__all__ = ["DRESSES", "opened", "serving", "url_of"]

DRESSES = ("threads", "trio", "asyncio")


@contextmanager
def opened(loops: Loops, dress: str, url: str | None, **options: Any) -> Iterator[BlockingStore]:
    """A store of each dress, as a blocking one."""
    if dress == "threads":
        with blocking.open_store(url, **options) as store:
            yield store
    elif dress == "trio":
        with loops.trio.entered(lambda: infinistore.open_store(url, **options)) as other:
            yield as_blocking(other, loops.trio)
    else:
        with loops.asyncio.entered(lambda: aio.open_store(url, **options)) as other:
            yield as_blocking(other, loops.asyncio)


@contextmanager
def serving(loops: Loops, files: Files | None, **settings: Any) -> Iterator[RunningServer]:
    if files is not None:
        settings |= {"tls_cert": files.cert, "tls_key": files.key}
    with loops.trio.entered(lambda: running_server(make_config(prealloc_bytes=16 * MIB, **settings))) as server:
        yield server


def url_of(server: RunningServer, options: str = "", *, host: str = "127.0.0.1", scheme: str = "infinistores") -> str:
    return f"{scheme}://{host}:{server.server.addresses.port}{options}"
