"""How much of the memory of servers a process keeps from the machine: what it has
mapped of it, or could map.
"""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["kept_by"]


def kept_by(*processes: int) -> dict[int, int]:
    """Return the files of servers (arenas and tables) that any of these processes
    keeps: their lengths, by inode.

    One that has ended keeps none.
    """
    kept: dict[int, int] = {}
    for process in processes:
        folder = Path(f"/proc/{process}")
        with suppress(OSError):
            for link in [*(folder / "fd").iterdir(), *(folder / "map_files").iterdir()]:
                with suppress(OSError):  # closed meanwhile
                    if os.readlink(link).startswith("/memfd:infinistore-"):
                        found = link.stat()
                        kept[found.st_ino] = found.st_size
    return kept
