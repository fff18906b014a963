"""Shared memory: the client maps the pool, and copies."""
