"""How blocks move between a client and its server."""
