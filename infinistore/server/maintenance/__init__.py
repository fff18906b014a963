"""What a server does beside its requests: growth, eviction, and long work in steps."""
