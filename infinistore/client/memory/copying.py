"""Copies blocks inside one host, for the embedded store and the shared-memory
client."""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

from infinistore.protocol.effects import Pause

__all__ = ["PAUSE_BYTES", "copy_blocks", "hash_blocks"]

PAUSE_BYTES = 4 * 1024 * 1024
"""How many bytes are copied before other tasks get their turn."""


async def copy_blocks(sources: Iterable[memoryview], targets: Iterable[memoryview], *, hash_targets: bool) -> list[int]:
    """Copy block by block; return the hashes of the copies if they are wanted.

    Each copy is hashed while it is in the cache.
    """
    checksums: list[int] = []
    copied = 0
    for source, target in zip(sources, targets, strict=True):
        if copied >= PAUSE_BYTES:
            copied = 0
            await Pause()
        target[:] = source
        if hash_targets:
            checksums.append(xxh3_64_intdigest(target))
        copied += len(source)
    return checksums


async def hash_blocks(views: Sequence[memoryview]) -> list[int]:
    """Return the hash of each block, computed in place."""
    checksums: list[int] = []
    hashed = 0
    for view in views:
        checksums.append(xxh3_64_intdigest(view))
        hashed += len(view)
        if hashed >= PAUSE_BYTES:
            hashed = 0
            await Pause()
    return checksums
