"""What a call to an embedded store asks of its driver besides a pause: to wait for a
disk.
"""

from collections.abc import Generator
from concurrent.futures import Future
from typing import NamedTuple

__all__ = ["AwaitDisk"]


class AwaitDisk(NamedTuple):
    """Wait until the future is done; the result is nothing.

    It ends by itself, in time. A call that is given up just forgets it.
    """

    done: "Future[None]"

    def __await__(self) -> Generator["AwaitDisk", None, None]:
        yield self
