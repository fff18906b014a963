"""The stores that `bench/compare.py` measures beside each other.

`systems.py` starts their servers, `clients.py` says how each is called, `worker.py` is
the process of one client, `work.py` is what all of them are asked to do, and
`report.py` and `plots.py` show what came of it.
"""
