"""A process takes the place of a running server, and keeps its cache."""
