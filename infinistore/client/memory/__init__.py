"""Memory of the caller and of the pool: buffers, views, and their deferred release."""
