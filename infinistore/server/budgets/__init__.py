"""Bounds on the memory, descriptors and log lines that clients and strangers can
use.
"""
