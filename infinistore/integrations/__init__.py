"""Adapters for programs that use a KV cache, one module each.

A module needs its program to be installed.
"""
