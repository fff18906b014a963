"""How requests are carried out: over a connection (`remote.py`), or by a store in this
process (`embedded.py`).
"""
