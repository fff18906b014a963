"""Listings: records of the log as columns, with their keys, in memory and as bytes.

What tables of batches and footers of segments have behind their headers: the columns
one after the other, then the keys. docs/disk-format.md describes them.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from infinistore.disk.jobs import ALIGNMENT_BYTES

__all__ = ["COLUMNS", "OWN_CHECKSUM", "ROW_BYTES", "Listing", "joined"]

OWN_CHECKSUM = 1
"""The flag of a block whose checksum is the tier's, not its writer's."""

COLUMNS: tuple[tuple[str, str], ...] = (
    ("low", "<u8"),
    ("high", "<u8"),
    ("checksum", "<u8"),
    ("expiry", "<u8"),
    ("page", "<u4"),
    ("length", "<u4"),
    ("tenant", "<u4"),
    ("flags", "<u2"),
    ("key_length", "<u2"),
)
ROW_BYTES = sum(np.dtype(kind).itemsize for _, kind in COLUMNS)


@attrs.frozen(kw_only=True, eq=False)
class Listing:
    """Records of the log, as columns, with their keys. Length 0 is a tombstone."""

    low: npt.NDArray[np.uint64]
    high: npt.NDArray[np.uint64]
    checksum: npt.NDArray[np.uint64]
    expiry: npt.NDArray[np.uint64]
    """When the block ends, in seconds since 1970; 0: never."""
    page: npt.NDArray[np.uint32]
    """Where the block is in its segment, in units of 4 KiB."""
    length: npt.NDArray[np.uint32]
    """In bytes."""
    tenant: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint16]
    key_length: npt.NDArray[np.uint16]
    key_bytes: bytes | memoryview
    """The keys in UTF-8, one after the other."""

    @classmethod
    def of(
        cls, keys: Sequence[bytes], low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64], **others: Any
    ) -> "Listing":
        """Make a listing of keys in UTF-8, their fingerprints and the other columns; a
        number stands for a column that has it in every row."""
        columns: dict[str, Any] = {**others, "low": low, "high": high, "key_length": list(map(len, keys))}
        count = len(keys)
        return cls(
            **{name: np.broadcast_to(np.asarray(columns[name], kind), count) for name, kind in COLUMNS},
            key_bytes=b"".join(keys),
        )

    def __len__(self) -> int:
        return self.low.size

    def keys(self) -> list[str]:
        """Return the keys."""
        ends = np.cumsum(self.key_length, dtype=np.int64).tolist()
        data = bytes(self.key_bytes)
        return [data[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]

    def only(self, wanted: npt.NDArray[np.bool_]) -> "Listing":
        """Return a listing of some of the rows."""
        if wanted.all():
            return self
        of_byte = np.repeat(wanted, self.key_length)
        kept = np.frombuffer(self.key_bytes, np.uint8)[of_byte].tobytes()
        return Listing(**{name: getattr(self, name)[wanted] for name, _ in COLUMNS}, key_bytes=kept)

    def between(self, start: int, stop: int) -> "Listing":
        """Return a listing of the rows from `start` up to `stop`."""
        first = int(self.key_length[:start].sum(dtype=np.int64))
        last = first + int(self.key_length[start:stop].sum(dtype=np.int64))
        return Listing(
            **{name: getattr(self, name)[start:stop] for name, _ in COLUMNS}, key_bytes=self.key_bytes[first:last]
        )

    def is_within(self, segment_bytes: int) -> bool:
        """Return whether all blocks are inside a segment."""
        ends = self.page.astype(np.int64) * ALIGNMENT_BYTES + self.length
        return not ends.size or int(ends.max()) <= segment_bytes

    def encoded(self) -> list[bytes]:
        """Return the columns, then the keys."""
        return [*(getattr(self, name).astype(kind).tobytes() for name, kind in COLUMNS), bytes(self.key_bytes)]

    @classmethod
    def decoded(cls, data: memoryview, rows: int, key_bytes: int) -> "Listing | None":
        """Read it back; None if the lengths are wrong."""
        if len(data) != rows * ROW_BYTES + key_bytes:
            return None
        columns: dict[str, Any] = {}
        offset = 0
        for name, kind in COLUMNS:
            columns[name] = np.frombuffer(data, kind, rows, offset)
            offset += columns[name].nbytes
        if int(columns["key_length"].sum(dtype=np.int64)) != key_bytes:
            return None
        return cls(**columns, key_bytes=data[offset:])


def joined(listings: Sequence[Listing]) -> Listing:
    """Return several listings as one."""
    columns = {
        name: np.concatenate([np.zeros(0, kind), *(getattr(one, name) for one in listings)]) for name, kind in COLUMNS
    }
    return Listing(**columns, key_bytes=b"".join(one.key_bytes for one in listings))
