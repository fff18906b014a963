"""Reports that a server is allocating its pool, which takes up to 1 s per GiB."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from infinistore.sizes import describe_size

if TYPE_CHECKING:
    import trio

__all__ = ["first_arena_bytes", "tell_of_taking"]

_log = logging.getLogger("infinistore.server")
_SILENT_S: Final = 0.2  # what takes no longer, or fails at once, needs no word
_REFRESH_S: Final = 0.25
_BLOCK_BYTES: Final = 512


async def tell_of_taking(
    pool_bytes: int, scope: "trio.CancelScope", taken_bytes: Callable[[], int] | None = None
) -> None:
    """Report the allocation of a pool in the log, or with progress on a terminal.

    It runs until the caller cancels `scope`. `taken_bytes` returns how much is taken so
    far.
    """
    import trio

    what = f"taking a pool of {describe_size(pool_bytes)}"
    with scope:
        await trio.sleep(_SILENT_S)
        if not sys.stderr.isatty():  # each line there is JSON
            _log.info("taking the pool", extra={"pool_bytes": pool_bytes})
            return
        try:
            while True:
                sys.stderr.write(
                    f"\rinfinistore: {what}: {min(100, 100 * (taken_bytes or first_arena_bytes)() // pool_bytes)} %"
                )
                sys.stderr.flush()
                await trio.sleep(_REFRESH_S)
        finally:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def first_arena_bytes() -> int:
    """Return the size of the first arena of this process, and of its shards, so far."""
    taken = 0
    for process in ("self", *_children()):
        with suppress(OSError):
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    if os.readlink(entry).startswith("/memfd:infinistore-arena-0"):
                        taken += os.stat(entry).st_blocks * _BLOCK_BYTES
    return taken


def _children() -> Iterator[str]:
    """Return the processes that threads of this one have started."""
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that is gone, or a kernel that does not tell
            yield from file.read_text(encoding="ascii").split()
