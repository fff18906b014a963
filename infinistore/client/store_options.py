# Generated from options.py by scripts/generate.py: change that one instead.
"""The keyword arguments of every `open_store`, for type checkers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from ssl import SSLContext

__all__ = ["StoreOptions"]


class StoreOptions(TypedDict, total=False):
    """The keyword arguments of every `open_store`, which explains them."""

    deadline_s: float
    verify: Literal["always", "never"]
    token: str
    tls: "SSLContext | None"
    ca: Path | None
    cert: Path | None
    key: Path | None
    unencrypted_rdma: bool
    max_connections: int
    transport: str
    spin_us: int | Literal["adaptive", "off"]
    name: str
    lazy: bool
    inline_bytes: int
    copy_threads: int
    known_blocks: int
    device: str
    ib_port: int
    gid_index: int
    staging_bytes: int
    lookup_deadline_s: float
    hedged_reads: bool
    pool_bytes: int
    minimal_allocate_bytes: int
    allocator: str
    huge_pages: bool
    numa_node: int
    disk: str | Sequence[str]
    disk_admission: Literal["lazy", "eager", "second-use"]
    disk_wait_s: float
