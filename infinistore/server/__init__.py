"""The server: a Trio nursery around the store core. `serve` runs one."""

from infinistore.server.service import Server, ServerAddresses, serve

__all__ = ["Server", "ServerAddresses", "serve"]
