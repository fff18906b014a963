"""A server of another version, as far as a client gets with it: it answers each
greeting with a header of its own.
"""

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["server_of_another_version"]


class _OfAnotherVersion(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(struct.pack("<4sBBHIIQQ", b"INFS", 250, 129, 0, 1, 0, 0, 0))


@contextmanager
def server_of_another_version() -> Iterator[str]:
    """Yield its URL."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OfAnotherVersion) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
