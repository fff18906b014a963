"""The error of a store that is closed, which no later call gets over."""

from infinistore.errors import StoreUnavailable

__all__ = ["closed"]


def closed(why: str) -> StoreUnavailable:
    """Return the error for a store that was closed, or opened before a fork."""
    error = StoreUnavailable(why)
    error.store_is_closed = True
    return error
