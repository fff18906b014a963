"""What a store can do: over a connection, and embedded."""
