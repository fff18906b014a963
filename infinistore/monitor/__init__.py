"""The live terminal screen, `infinistore monitor`.

`model.py` converts samples of a server's statistics to rates, history, percentiles and
warnings. `view.py` renders them as lines of text for a terminal size. `controls.py`
implements the keys. These modules are pure: no clock, no I/O. `app.py` connects them to
a server and a terminal with Trio tasks.
"""
