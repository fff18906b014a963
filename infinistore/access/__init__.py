"""Who may use a server, and what for: tenants, tokens, roles and audit events.

Everything here is decided from what it is given. Files, sockets, clocks and randomness
are left to those who call it.
"""
