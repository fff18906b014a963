"""The screen of a cluster: a row for each node, and the screen of a store behind it.

`model.py`, `controls.py`, `view.py` and `document.py` are pure. `sampling.py` follows
the cluster and asks its nodes; `app.py` shows what it finds.
"""
