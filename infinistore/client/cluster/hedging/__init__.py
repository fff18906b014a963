"""Reads that ask another copy when the first one is late."""
