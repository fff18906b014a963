"""One connection of a client."""
