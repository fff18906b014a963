"""Adapters for the programs that use a KV cache. Each is a module of its own, and needs its program to be installed."""
