"""The programming interface of the original InfiniStore, implemented by this package.

The original is bytedance/InfiniStore, up to 0.2.42. A program written for it finds the
same names at the top level of `infinistore`, with the same arguments, units and return
values. Its crashes and hangs are errors here. `config.py` has the settings of both
ends, `connection.py` the client, `memory.py` access to the caller's memory by address,
`registered_server.py` a server inside the caller's process. New programs should use
`open_store`.
"""
