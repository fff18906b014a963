"""Connections to a server: the pool of them, routing, retries and the circuit
breaker.
"""
