"""Files in a store: a small file is one value, a large file is blocks and a manifest.

A file of at most one block is stored unchanged under its key. A longer file is split:
its blocks are stored under `KEY#0`, `KEY#1`, ..., and then a manifest under `KEY`: the
line `infinistore-file 1` followed by JSON with the file's `size_bytes`, `block_bytes`,
`blocks` and `xxh3` (of the whole file, 16 hexadecimal digits). A file exists if its
manifest exists, and never takes more memory than one batch of blocks. An empty file is
a manifest without blocks, because a store does not accept empty values.

Any writer to a store can write a manifest. It is therefore accepted only if `put` can
have written it, and it causes no larger allocation than one batch of blocks.

A reader detects blocks of two different puts of one key by the checksum. Blocks can be
evicted one by one; a file that has lost a block is missing.
"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import attrs

from infinistore.errors import (
    BufferTooSmall,
    ChecksumMismatch,
    InfiniStoreException,
    KeyNotFound,
    LimitExceeded,
    OutOfMemory,
)
from infinistore.keys import MAX_KEY_BYTES
from infinistore.sizes import MIB, format_size

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore


MAGIC: Final = b"infinistore-file 1\n"
MAX_MANIFEST_BYTES: Final = 256
MAX_BLOCKS: Final = 1 << 20
"""The maximum number of blocks of one file: 4 TiB in blocks of 4 MiB."""
_KEYS_AT_ONCE: Final = 1024
_CHECKSUM: Final = re.compile("[0-9a-f]{16}")


class BadManifest(InfiniStoreException):
    """A stored value has the form of a manifest, but `put` cannot have written it."""


@attrs.frozen
class Manifest:
    """The value under the key of a file in blocks."""

    size_bytes: int
    block_bytes: int
    blocks: int
    xxh3: str

    def encode(self) -> bytes:
        """Return the value to store."""
        return MAGIC + json.dumps(attrs.asdict(self)).encode()

    def block_keys(self, key: str, most: int = _KEYS_AT_ONCE) -> Iterator[tuple[int, list[str]]]:
        """Yield the blocks' keys in groups, each with the number of its first one."""
        for start in range(0, self.blocks, most):
            yield start, [f"{key}#{index}" for index in range(start, min(start + most, self.blocks))]

    def length_of(self, index: int) -> int:
        """Return the length of a block; the last one may be shorter."""
        return min(self.block_bytes, self.size_bytes - index * self.block_bytes)


_NAMES: Final = set(attrs.fields_dict(Manifest))


def parse_manifest(key: str, value: bytes) -> Manifest | None:
    """Return the manifest under `key`; None if the value is a short file instead.

    Raises:
        BadManifest: it has the form of a manifest, and is invalid.
    """
    if not value.startswith(MAGIC) or len(value) > MAX_MANIFEST_BYTES:
        return None
    try:
        said: Any = json.loads(value[len(MAGIC) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or set(said) != _NAMES:
        return None
    manifest = Manifest(**said)
    problem = _problem(key, manifest)
    if problem:
        raise BadManifest(
            f"what is stored under {key!r} is no manifest that `infinistore put` writes: {problem}; put the file "
            f"again, or delete all that begins so: infinistore rm --prefix {key!r}"
        )
    return manifest


def _problem(key: str, manifest: Manifest) -> str:
    """Return the problem of a manifest; empty if it is valid."""
    for name in ("size_bytes", "block_bytes", "blocks"):
        number = getattr(manifest, name)
        if type(number) is not int or number < (name == "block_bytes"):
            return f"{name} is {number!r:.40}"
    if not isinstance(manifest.xxh3, str) or not _CHECKSUM.fullmatch(manifest.xxh3):
        return f"xxh3 is {manifest.xxh3!r:.40}"
    if manifest.blocks > MAX_BLOCKS:
        return f"it has {manifest.blocks} blocks, and {MAX_BLOCKS} are the most"
    if manifest.blocks != -(-manifest.size_bytes // manifest.block_bytes):
        return f"{manifest.blocks} blocks of {manifest.block_bytes} bytes are not {manifest.size_bytes} bytes"
    if manifest.blocks and len(f"{key}#{manifest.blocks - 1}".encode()) > MAX_KEY_BYTES:
        return "the keys of its blocks would be too long"
    return ""


DEFAULT_BLOCK_BYTES: Final = 4 * MIB
_BATCH_BYTES: Final = 64 * MIB
_MOST_BLOCKS_AT_ONCE: Final = 1024


@attrs.frozen
class StoredFile:
    """The result of a put."""

    key: str
    size_bytes: int
    blocks: int
    """0: the file is one value under its key."""
    stored: bool
    """False if the key existed and was kept."""


def put_file(
    store: "BlockingStore", key: str, source: BinaryIO, block_bytes: int, *, replace: bool, ttl_s: float | None = None
) -> StoredFile:
    """Store the contents of `source` under `key`; without `replace`, keep a stored
    file. With `ttl_s`, it ends after so many seconds.

    Raises the store's errors: OutOfMemory, ValueTooLarge, StoreUnavailable and so on.
    Blocks that were stored before are then deleted, if the store still answers.
    """
    if not replace and store.exists(key):
        return StoredFile(key, 0, 0, stored=False)
    before = _manifest_before(store, key)
    first = _read_block(source, block_bytes)
    second = _read_block(source, block_bytes) if len(first) == block_bytes else b""
    if first and not second and not first.startswith(MAGIC):
        skipped = store.put_many([(key, first)], replace=replace, ttl_s=ttl_s)
        stored = StoredFile(key, len(first), 0, stored=not skipped)
    else:
        manifest = _put_blocks(
            store, key, [block for block in (first, second) if block], source, block_bytes, ttl_s=ttl_s
        )
        skipped = store.put_many([(key, manifest.encode())], replace=replace, ttl_s=ttl_s)
        stored = StoredFile(key, manifest.size_bytes, manifest.blocks, stored=not skipped)
    if before is not None and stored.stored:
        for start, keys in before.block_keys(key):
            if left := keys[max(0, stored.blocks - start) :]:
                store.delete(left)
    return stored


def _put_blocks(
    store: "BlockingStore", key: str, ahead: list[bytes], source: BinaryIO, block_bytes: int, *, ttl_s: float | None
) -> Manifest:
    """Store the blocks `ahead` and the rest of `source`; return the manifest."""
    import xxhash

    checksum = xxhash.xxh3_64()
    size_bytes = count = 0
    batch: list[tuple[str, bytes]] = []
    batch_blocks = max(1, _BATCH_BYTES // block_bytes)
    try:
        for block in _blocks(ahead, source, block_bytes):
            name = f"{key}#{count}"
            if count == MAX_BLOCKS:
                raise LimitExceeded(f"a file may have {MAX_BLOCKS} blocks; give a larger --block-size")
            if len(name.encode()) > MAX_KEY_BYTES:
                raise LimitExceeded(
                    f"a file in blocks needs a shorter key: KEY#{count} has at most {MAX_KEY_BYTES} bytes"
                )
            checksum.update(block)
            size_bytes += len(block)
            batch.append((name, block))
            count += 1
            if len(batch) == batch_blocks:
                store.put_many(batch, ttl_s=ttl_s)
                batch = []
        if batch:
            store.put_many(batch, ttl_s=ttl_s)
    except (OutOfMemory, LimitExceeded):
        _delete_blocks(store, key, Manifest(size_bytes, block_bytes, count, ""))
        raise
    manifest = Manifest(size_bytes, block_bytes, count, checksum.hexdigest())
    if _missing_block(store, key, manifest) is not None:  # a file as large as the pool evicts its own first blocks
        _delete_blocks(store, key, manifest)
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
    """Read exactly one block, or the rest of the file, in as many reads as it needs."""
    parts: list[bytes] = []
    missing = block_bytes
    while missing and (part := source.read(missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_file(store: "BlockingStore", key: str) -> tuple[Manifest | None, Iterator[bytes | bytearray]]:
    """Return the manifest (None for a single value) and the file's bytes in pieces.

    Raises KeyNotFound if the key or a block is missing, and BadManifest. The iterator
    raises ChecksumMismatch, at its end at the latest, if the pieces are not the file
    that was put.
    """
    value = store.get(key)
    manifest = parse_manifest(key, bytes(value)) if len(value) <= MAX_MANIFEST_BYTES else None
    if manifest is None:
        return None, iter([value])
    missing = _missing_block(store, key, manifest)
    if missing is not None:
        raise _lost(key, manifest, missing)
    return manifest, _read_blocks(store, key, manifest)


def _missing_block(store: "BlockingStore", key: str, manifest: Manifest) -> int | None:
    """Return the number of the first missing block."""
    for start, keys in manifest.block_keys(key):
        present = store.exists_many(keys)
        if not all(present):
            return start + present.index(False)
    return None


def _delete_blocks(store: "BlockingStore", key: str, manifest: Manifest) -> None:
    for _, keys in manifest.block_keys(key):
        store.delete(keys)


def _read_blocks(store: "BlockingStore", key: str, manifest: Manifest) -> Iterator[bytes | bytearray]:
    import xxhash

    checksum = xxhash.xxh3_64()
    most = min(_MOST_BLOCKS_AT_ONCE, max(1, _BATCH_BYTES // manifest.block_bytes))
    for start, keys in manifest.block_keys(key, most):
        for index, block in enumerate(_read_batch(store, key, manifest, start, keys), start):
            if block is None:
                raise _lost(key, manifest, index)
            if len(block) != manifest.length_of(index):
                raise _another_file(key)
            checksum.update(block)
            yield block
    if checksum.hexdigest() != manifest.xxh3:
        raise _another_file(key)


def _read_batch(
    store: "BlockingStore", key: str, manifest: Manifest, start: int, keys: list[str]
) -> list[bytes | bytearray | None]:
    """Read blocks into bounded memory; a single block into memory of its length."""
    if len(keys) == 1:
        found: list[bytes | bytearray | None] = list(store.get_many(keys))
        return found
    buffers = [bytearray(manifest.length_of(index)) for index in range(start, start + len(keys))]
    try:
        lengths = store.get_many_into(list(zip(keys, buffers, strict=True)))
    except BufferTooSmall:
        raise _another_file(key) from None
    return [
        None if length is None else buffer if length == len(buffer) else buffer[:length]
        for buffer, length in zip(buffers, lengths, strict=True)
    ]


def _lost(key: str, manifest: Manifest, index: int) -> KeyNotFound:
    return KeyNotFound(f"{key!r} is missing block {index} of {manifest.blocks}, evicted or deleted; put the file again")


def _another_file(key: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{key!r} is not the file that was put: another put may have been under way; get it again, or put it again"
    )


def delete_files(store: "BlockingStore", keys: list[str]) -> int:
    """Delete the keys and their files' blocks. Returns how many of `keys` existed.

    Raises BadManifest before anything is deleted.
    """
    manifests = {key: manifest for key in keys if (manifest := _manifest_at(store, key)) is not None}
    deleted: int = store.delete(keys)
    for key, manifest in manifests.items():
        _delete_blocks(store, key, manifest)
    return deleted


def with_blocks(store: "BlockingStore", keys: list[str]) -> list[str]:
    """Return the keys, and those of the blocks of files among them.

    Raises BadManifest.
    """
    names = list(keys)
    for key in keys:
        manifest = _manifest_at(store, key)
        for _, blocks in manifest.block_keys(key) if manifest is not None else ():
            names += blocks
    return names


def _manifest_at(store: "BlockingStore", key: str) -> Manifest | None:
    """Return the manifest under `key`, without reading a value that is too long."""
    buffer = bytearray(MAX_MANIFEST_BYTES)
    try:
        length = store.get_into(key, buffer)
    except (KeyNotFound, BufferTooSmall):
        return None
    return parse_manifest(key, bytes(buffer[:length]))


def _manifest_before(store: "BlockingStore", key: str) -> Manifest | None:
    """Return the manifest that a put replaces; None for an invalid one."""
    try:
        return _manifest_at(store, key)
    except BadManifest:
        return None
