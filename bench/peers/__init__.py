"""The stores that `bench/compare.py` measures beside each other.

`systems.py` starts their servers, `clients.py` and `original.py` say how each is
called, `worker.py` is the process of one client, `work.py` is what all of them are
asked to do, `wanted.py` compares what came of it with what is wanted, and `report.py`
and `plots.py` show it.
"""
