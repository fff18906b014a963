"""The manifest of a file in blocks: contents, format and validation.

Any writer to a store can write a manifest. It is therefore accepted only if `put` can
have written it, and it causes no larger allocation than one batch of blocks. `files.py`
reads and stores it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import attrs

from infinistore.errors import InfiniStoreException
from infinistore.keys import MAX_KEY_BYTES

__all__ = ["MAGIC", "MAX_BLOCKS", "MAX_MANIFEST_BYTES", "BadManifest", "Manifest", "parse_manifest"]

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
        """Yield the keys of the blocks in groups, each with the number of its first
        block.
        """
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
