"""The programming interface of the original InfiniStore (bytedance/InfiniStore, up to 0.2.42), on this package.

A program that was written for it finds the same names at the top of `infinistore`, with the same arguments, units and
answers; what was a crash or a hang there is an error here. `config.py` has the settings of both ends, `connection.py`
the client, `memory.py` the caller's memory by address, `registered_server.py` a server inside the caller's process.
New programs are better served by `open_store`.
"""
