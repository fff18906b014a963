"""One connection of a client: what is said on it, and what the client holds by it."""
