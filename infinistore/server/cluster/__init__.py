"""A server as a node of a cluster. Only a server with `--cluster` imports this."""
