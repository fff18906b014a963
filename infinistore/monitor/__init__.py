"""The live terminal screen, `infinistore monitor`.

`model.py` turns samples of a server's statistics into rates, history, percentiles and warnings; `view.py` turns that
into lines of text for a size of terminal; `controls.py` is what the keys do. They are pure: no clock, no input or
output. `app.py` brings them together with a server and a terminal, as Trio tasks.
"""
