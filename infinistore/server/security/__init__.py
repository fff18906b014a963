"""Who may talk to a server."""
