"""Copying blocks inside one host: what the embedded store and the client by shared memory have in common."""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

from infinistore.protocol.effects import Exchange, Pause

__all__ = ["PAUSE_BYTES", "copy_blocks", "hash_blocks"]

PAUSE_BYTES = 4 * 1024 * 1024
"""After so many bytes others have their turn."""


def copy_blocks(
    sources: Iterable[memoryview], targets: Iterable[memoryview], *, hash_targets: bool
) -> Exchange[list[int]]:
    """Copy block by block; return the hashes of what has arrived, made while it is in the cache, if they are wanted."""
    checksums: list[int] = []
    copied = 0
    for source, target in zip(sources, targets, strict=True):
        if copied >= PAUSE_BYTES:
            copied = 0
            yield Pause()
        target[:] = source
        if hash_targets:
            checksums.append(xxh3_64_intdigest(target))
        copied += len(source)
    return checksums


def hash_blocks(views: Sequence[memoryview]) -> Exchange[list[int]]:
    """Return the hash of each block, where it lies."""
    checksums: list[int] = []
    hashed = 0
    for view in views:
        checksums.append(xxh3_64_intdigest(view))
        hashed += len(view)
        if hashed >= PAUSE_BYTES:
            hashed = 0
            yield Pause()
    return checksums
