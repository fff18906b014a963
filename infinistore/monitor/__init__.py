"""The live terminal screen, `infinistore monitor`.

`model.py` converts samples of a server's statistics to rates, history, percentiles and
warnings. `view.py` renders them as lines of text for a terminal size. `controls.py`
implements the keys. `cluster_view.py` has the same for a cluster: a row for each node,
and the screen of a store behind it. These modules are pure: no clock, no I/O. `app.py`
and `cluster.py` connect them to servers and a terminal with Trio tasks.
"""
