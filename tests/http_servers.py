"""HTTP servers in a thread of the tests, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Quiet", "serving_http"]


class Quiet:
    """A part of a handler: it logs nothing."""

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as http.server calls it
        """Say nothing."""


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[int]:
    """Answer with this handler until the block ends; yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
