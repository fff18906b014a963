"""Growth: whether a larger pool would help, and by how much it may still grow.

To make an arena is I/O, so the store only says when it would help. While
`growable_bytes` is positive and a reservation had to evict, or was refused, `wanted` is
set and `on_wanted` is called once. Somebody then makes an arena and calls
`StoreCore.add_arena`, which clears it (or `stop`, if there is no memory). Meanwhile,
what does not fit is OutOfMemory.
"""

from collections.abc import Callable

__all__ = ["Growth"]


class Growth:
    """How a pool may grow: by `growable_bytes` in all."""

    __slots__ = ("growable_bytes", "on_wanted", "wanted")

    def __init__(self, growable_bytes: int = 0, on_wanted: Callable[[], object] | None = None) -> None:
        self.growable_bytes = growable_bytes
        """How much larger the pool may still become: as set, less what was added
        since."""
        self.wanted = False
        """A reservation had to evict, or was refused, while the pool could still
        grow."""
        self.on_wanted = on_wanted
        """Called, without arguments, each time that `wanted` becomes true."""

    def want(self) -> None:
        """Say that a larger pool would help, if it may grow at all."""
        if self.growable_bytes > 0 and not self.wanted:
            self.wanted = True
            if self.on_wanted is not None:
                self.on_wanted()

    def added(self, arena_bytes: int) -> None:
        """Note that the pool has grown."""
        self.growable_bytes = max(0, self.growable_bytes - arena_bytes)
        self.wanted = False

    def stop(self) -> None:
        """Say that the pool stays as it is, because there is no memory for another
        arena."""
        self.growable_bytes = 0
        self.wanted = False
