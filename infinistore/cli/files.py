"""Files in a store: a small one is one value, a big one is a row of blocks and a manifest.

A file of at most one block is stored as it is, under its key. A longer one is cut: its blocks are stored under `KEY#0`,
`KEY#1`, ..., and then, last, a manifest under `KEY`: the line `infinistore-file 1` followed by JSON with the file's
`size_bytes`, `block_bytes`, `blocks` and `xxh3` (of the whole file, 16 hexadecimal digits). So a file is there when its
manifest is, and never longer in memory than one batch of blocks. An empty file is a manifest without blocks, because a
store does not keep empty values.

A reader that meets blocks of two different puts of one key finds out by the checksum. Blocks can be evicted one by one;
a file that lost one is missing.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, Final

import attrs

from infinistore.errors import BufferTooSmall, ChecksumMismatch, KeyNotFound, OutOfMemory
from infinistore.sizes import MIB, format_size

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

__all__ = ["DEFAULT_BLOCK_BYTES", "Manifest", "StoredFile", "delete_files", "open_file", "put_file"]

DEFAULT_BLOCK_BYTES: Final = 4 * MIB
_BATCH_BYTES: Final = 64 * MIB
_MAGIC: Final = b"infinistore-file 1\n"
_MAX_MANIFEST_BYTES: Final = 256


@attrs.frozen
class Manifest:
    """What is stored under the key of a file that was cut into blocks."""

    size_bytes: int
    block_bytes: int
    blocks: int
    xxh3: str

    def encode(self) -> bytes:
        """Return the value to store."""
        return _MAGIC + json.dumps(attrs.asdict(self)).encode()

    def block_keys(self, key: str) -> list[str]:
        """Return the keys of the blocks, in order."""
        return [f"{key}#{index}" for index in range(self.blocks)]


@attrs.frozen
class StoredFile:
    """What a put wrote."""

    key: str
    size_bytes: int
    blocks: int
    """0: the file is one value under its key."""
    stored: bool
    """False: the key was there already, and was to be kept."""


def put_file(store: "BlockingStore", key: str, source: BinaryIO, block_bytes: int, *, replace: bool) -> StoredFile:
    """Store all that `source` has to read under `key`; with `replace` False keep what is there.

    Raises what the store raises: OutOfMemory, ValueTooLarge, StoreUnavailable and so on. Blocks that were stored before
    that are dropped again as far as the store still answers.
    """
    if not replace and store.exists(key):
        return StoredFile(key, 0, 0, stored=False)
    before = _manifest_at(store, key)
    first = _read_block(source, block_bytes)
    second = _read_block(source, block_bytes) if len(first) == block_bytes else b""
    if first and not second and not first.startswith(_MAGIC):
        skipped = store.put_many([(key, first)], replace=replace)
        stored = StoredFile(key, len(first), 0, stored=not skipped)
    else:
        manifest = _put_blocks(store, key, [block for block in (first, second) if block], source, block_bytes)
        skipped = store.put_many([(key, manifest.encode())], replace=replace)
        stored = StoredFile(key, manifest.size_bytes, manifest.blocks, stored=not skipped)
    if before is not None and stored.stored and before.blocks > stored.blocks:
        store.delete(before.block_keys(key)[stored.blocks :])
    return stored


def _put_blocks(store: "BlockingStore", key: str, ahead: list[bytes], source: BinaryIO, block_bytes: int) -> Manifest:
    """Store the blocks `ahead` and the rest of `source` in batches, and return the manifest, not yet stored."""
    import xxhash

    checksum = xxhash.xxh3_64()
    size_bytes = count = 0
    batch: list[tuple[str, bytes]] = []
    batch_blocks = max(1, _BATCH_BYTES // block_bytes)
    try:
        for block in _blocks(ahead, source, block_bytes):
            checksum.update(block)
            size_bytes += len(block)
            batch.append((f"{key}#{count}", block))
            count += 1
            if len(batch) == batch_blocks:
                store.put_many(batch)
                batch = []
        if batch:
            store.put_many(batch)
    except OutOfMemory:
        store.delete([f"{key}#{index}" for index in range(count)])
        raise
    manifest = Manifest(size_bytes, block_bytes, count, checksum.hexdigest())
    lost = store.exists_many(manifest.block_keys(key)).count(False) if count else 0
    if lost:  # a file as large as the pool pushes its own first blocks out
        store.delete(manifest.block_keys(key))
        size = format_size(size_bytes)
        raise OutOfMemory(
            f"the file ({size}) does not fit in the store's pool; give the server a larger --prealloc-size"
        )
    return manifest


def _blocks(ahead: list[bytes], source: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    yield from ahead
    if ahead and len(ahead[-1]) < block_bytes:
        return
    while block := _read_block(source, block_bytes):
        yield block


def _read_block(source: BinaryIO, block_bytes: int) -> bytes:
    """Read exactly one block; less only at the end of the file. A pipe gives what it has, so it is asked again."""
    parts: list[bytes] = []
    missing = block_bytes
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_file(store: "BlockingStore", key: str) -> tuple[Manifest | None, Iterator[bytes | bytearray]]:
    """Return the manifest (None: the file is one value) and the file's bytes, piece by piece, checked as they come.

    Raises KeyNotFound if the key or one of the blocks is missing. The iterator raises ChecksumMismatch at its end if
    the pieces are not the file that was put.
    """
    value = store.get(key)
    manifest = _decode(bytes(value[:_MAX_MANIFEST_BYTES])) if len(value) <= _MAX_MANIFEST_BYTES else None
    if manifest is None:
        return None, iter([value])
    present = store.exists_many(manifest.block_keys(key)) if manifest.blocks else []
    if not all(present):
        raise _lost(key, manifest, present.index(False))
    return manifest, _read_blocks(store, key, manifest)


def _read_blocks(store: "BlockingStore", key: str, manifest: Manifest) -> Iterator[bytes | bytearray]:
    import xxhash

    checksum = xxhash.xxh3_64()
    keys = manifest.block_keys(key)
    batch_blocks = max(1, _BATCH_BYTES // manifest.block_bytes)
    for start in range(0, len(keys), batch_blocks):
        for index, block in enumerate(store.get_many(keys[start : start + batch_blocks]), start):
            if block is None:
                raise _lost(key, manifest, index)
            checksum.update(block)
            yield block
    if checksum.hexdigest() != manifest.xxh3:
        raise ChecksumMismatch(
            f"{key!r} is not the file that was put: another put may have been under way; get it again"
        )


def _lost(key: str, manifest: Manifest, index: int) -> KeyNotFound:
    return KeyNotFound(f"{key!r} is missing block {index} of {manifest.blocks}, evicted or deleted; put the file again")


def delete_files(store: "BlockingStore", keys: list[str]) -> int:
    """Delete the keys, and the blocks of those that are files in blocks. Return how many of `keys` were there."""
    blocks: list[str] = []
    for key in keys:
        manifest = _manifest_at(store, key)
        if manifest is not None:
            blocks += manifest.block_keys(key)
    deleted: int = store.delete(keys)
    if blocks:
        store.delete(blocks)
    return deleted


def _manifest_at(store: "BlockingStore", key: str) -> Manifest | None:
    """Return the manifest under `key`, without moving a value that is too long to be one."""
    buffer = bytearray(_MAX_MANIFEST_BYTES)
    try:
        length = store.get_into(key, buffer)
    except (KeyNotFound, BufferTooSmall):
        return None
    return _decode(bytes(buffer[:length]))


def _decode(value: bytes) -> Manifest | None:
    if not value.startswith(_MAGIC):
        return None
    try:
        return Manifest(**json.loads(value[len(_MAGIC) :]))
    except (ValueError, TypeError):
        return None
