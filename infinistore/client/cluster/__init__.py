"""A store made of stores: one for each node of a cluster."""
