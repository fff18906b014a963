"""Blocks in shared memory: copied by the client itself."""
