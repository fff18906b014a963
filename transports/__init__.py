"""How bytes move between a client and the server.

A transport is a control stream and, later, a mover for payload. `base` says what a stream is; `sockets` has TCP and
Unix sockets for Trio.
"""

if __name__ != "infinistore.transports":
    raise ImportError("import infinistore.transports, not transports: two names would make two sets of classes")
