"""How bytes move between a client and the server.

`base` says what a stream is. `sockets`, `rdma` and `cuda` reach the system, `tls` is a
stream over a stream. `registry` finds the transports that other packages bring.
"""

from infinistore.transports.registry import Transport, installed_transports, load_transport, transport_names

__all__ = ["Transport", "installed_transports", "load_transport", "transport_names"]

if __name__ != "infinistore.transports":
    raise ImportError("import infinistore.transports, not transports: two names would make two sets of classes")
