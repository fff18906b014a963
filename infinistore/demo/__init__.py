"""The demonstration: server, prefill and decode share the KV cache of a text.

`infinistore demo` runs it; `run.py` tells the story. Like an engine, it uses only the
public API.
"""
