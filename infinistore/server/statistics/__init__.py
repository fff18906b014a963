"""What the server counts, and what it gathers when somebody asks."""
