"""Sessions: one for each connection of a client, from its hello to its end."""
