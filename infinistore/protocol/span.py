"""A list of views as one sequence of bytes, and a position in it."""

from collections.abc import Sequence

__all__ = ["Span"]

MAX_VIEWS = 1024
"""The maximum number of views that one system call takes (IOV_MAX on Linux)."""


class Span:
    """Consecutive views that are filled or emptied from the front.

    `complete` counts the views that are finished, `remaining` the bytes that are not.
    """

    __slots__ = ("_offset", "_views", "complete", "remaining")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._offset = 0
        self.complete = 0
        self.remaining = sum(map(len, views))
        if views and not len(views[0]):
            self.advance(0)  # past empty views, so that `next_views` starts with bytes

    def next_views(self, most_bytes: int) -> list[memoryview]:
        """Return the next views: 1 to `most_bytes` bytes, at most `MAX_VIEWS` views."""
        views: list[memoryview] = []
        offset = self._offset
        room = most_bytes
        for view in self._views[self.complete : self.complete + MAX_VIEWS]:
            length = len(view) - offset
            if length >= room:
                views.append(view[offset : offset + room])
                break
            views.append(view[offset:] if offset else view)
            room -= length
            offset = 0
        return views

    def advance(self, count: int) -> None:
        """Move on by `count` bytes."""
        self.remaining -= count
        count += self._offset
        complete = self.complete
        views = self._views
        while complete < len(views) and count >= len(views[complete]):
            count -= len(views[complete])
            complete += 1
        self.complete = complete
        self._offset = count

    def copy_in(self, data: memoryview) -> None:
        """Fill the front with `data`, no longer than what remains, and move on."""
        position = 0
        for view in self.next_views(len(data)) if len(data) else ():
            view[:] = data[position : position + len(view)]
            position += len(view)
        self.advance(position)
        if position < len(data):  # more views than fit one call
            self.copy_in(data[position:])
