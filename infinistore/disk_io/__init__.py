"""Input and output of the SSD tier: folders, files, and the threads that run its jobs.

`open_folders` finds the folders of disks usable, and locks them. A `DiskRunner` runs
the jobs of `infinistore.disk` in them. `ThreadRunner` is the one there is; another one
could use io_uring. Nothing here decides what is read, written or forgotten.
"""

from infinistore.disk_io.folder import (
    DiskFolder,
    check_folder,
    lock_holder,
    open_existing_folder,
    open_folder,
    open_folders,
)
from infinistore.disk_io.runner import DiskRunner, RunnerStatistics, ThreadRunner

__all__ = [
    "DiskFolder",
    "DiskRunner",
    "RunnerStatistics",
    "ThreadRunner",
    "check_folder",
    "lock_holder",
    "open_existing_folder",
    "open_folder",
    "open_folders",
]
