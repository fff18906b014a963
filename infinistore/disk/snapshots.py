"""The bytes of a snapshot: the index as it was, so that a start reads little else.

A header, with the state of every segment, then a section for each shard of the index.
docs/disk-format.md describes them. A snapshot is not of one moment: its sections are
made one after the other while the log goes on. It says which sequence was applied
before the first of them; recovery applies what came later again.
"""

import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from infinistore.disk.format import LEAD, Header, checked, is_whole
from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned
from infinistore.disk.records import SHARDS, Rows

__all__ = [
    "ABANDONED",
    "OPEN",
    "ROW_COLUMNS",
    "SEALED",
    "SEGMENT_COLUMNS",
    "SNAPSHOT_ROW_BYTES",
    "SnapshotHeader",
    "SnapshotSection",
    "SnapshotSegment",
    "decode_section",
    "decode_snapshot_header",
    "encode_section",
    "encode_snapshot_header",
    "header_bytes",
    "most_footer_bytes",
    "most_snapshot_bytes",
]

OPEN, SEALED, ABANDONED = 0, 1, 2
SEGMENT_COLUMNS = (
    ("number", "<u4"),
    ("state", "<u4"),
    ("incarnation", "<u8"),
    ("end_bytes", "<u8"),
    ("sequence", "<u8"),
)
_SEGMENT = np.dtype(list(SEGMENT_COLUMNS))
ROW_COLUMNS = (("low", "<u8"), ("seal", "<u8"), ("segment", "<u4"), ("page", "<u4"), ("length", "<u4"))
_OWN, _LIVE = 1, 2
SNAPSHOT_ROW_BYTES = sum(np.dtype(kind).itemsize for _, kind in ROW_COLUMNS) + 1


@attrs.frozen
class SnapshotSegment:
    """What a snapshot says of one segment."""

    number: int
    state: int
    """OPEN, SEALED or ABANDONED, when the snapshot was begun."""
    incarnation: int
    end_bytes: int
    """Where the next batch would be."""
    sequence: int
    """Of its last batch."""


@attrs.frozen
class SnapshotHeader(Header):
    """The beginning of a snapshot. Behind it are the lengths of the sections, 8 bytes
    each, the segments, and the footer of the open segment, if there is one."""

    MAGIC: ClassVar = b"INFSSNAP"
    LAYOUT: ClassVar = struct.Struct("<I16sQQIII")

    header_bytes: int
    """With all that is behind it, without padding. The first section begins at the next
    multiple of 4096."""
    uuid: bytes
    sequence: int
    """All batches up to this one are in the sections."""
    floor: int
    """Records with a lower sequence were void."""
    segments: int
    sections: int
    footer_bytes: int


_FIXED_BYTES = LEAD.size + SnapshotHeader.LAYOUT.size


@attrs.frozen
class SnapshotSection(Header):
    """The beginning of a section. Behind it are the columns of its records."""

    MAGIC: ClassVar = b"INFSSHRD"
    LAYOUT: ClassVar = struct.Struct("<I16sQII")

    shard: int
    uuid: bytes
    sequence: int
    rows: int
    reserved: int = 0


_SECTION_BYTES = LEAD.size + SnapshotSection.LAYOUT.size


def header_bytes(segments: int, footer_bytes: int = 0) -> int:
    """Return the length of a header without padding."""
    return _FIXED_BYTES + SHARDS * 8 + segments * _SEGMENT.itemsize + footer_bytes


def most_footer_bytes(segment_bytes: int) -> int:
    """Return the longest footer that a snapshot takes along. A segment that has more
    records is sealed instead, because the disk keeps room for snapshots."""
    return min(1 << 20, segment_bytes // 16)


def most_snapshot_bytes(segments: int, segment_bytes: int) -> int:
    """Return the most that a snapshot takes on a disk, with padding, while the disk
    still has the one before."""
    records = segments * (segment_bytes // ALIGNMENT_BYTES)
    header = aligned(header_bytes(segments, most_footer_bytes(segment_bytes)))
    sections = SHARDS * (_SECTION_BYTES + ALIGNMENT_BYTES) + records * SNAPSHOT_ROW_BYTES
    return 2 * (header + sections)


def encode_section(shard: int, rows: Rows, *, uuid: bytes, sequence: int, seed: int) -> bytes:
    """Return the section of a shard, with its padding."""
    columns = [getattr(rows, name).astype(kind).tobytes() for name, kind in ROW_COLUMNS]
    flags = (rows.own * np.uint8(_OWN) | rows.live * np.uint8(_LIVE)).tobytes()
    header = SnapshotSection(shard, uuid, sequence, rows.low.size)
    section = checked(SnapshotSection.MAGIC, b"".join([header.pack(), *columns, flags]), seed)
    return section + bytes(aligned(len(section)) - len(section))


def decode_section(data: memoryview, *, shard: int, uuid: bytes, sequence: int, seed: int) -> Rows | None:
    """Read the section of a shard; None if it is damaged or another one."""
    if len(data) < _SECTION_BYTES:
        return None
    header = SnapshotSection.unpack(data)
    length = _SECTION_BYTES + header.rows * SNAPSHOT_ROW_BYTES
    if len(data) < length:
        return None
    data = data[:length]
    if not is_whole(data, SnapshotSection.MAGIC, seed) or (header.shard, header.uuid, header.sequence) != (
        shard,
        uuid,
        sequence,
    ):
        return None
    columns: dict[str, Any] = {}
    offset = _SECTION_BYTES
    for name, kind in ROW_COLUMNS:
        columns[name] = np.frombuffer(data, kind, header.rows, offset)
        offset += columns[name].nbytes
    flags = np.frombuffer(data, np.uint8, header.rows, offset)
    return Rows(**columns, own=(flags & _OWN) != 0, live=(flags & _LIVE) != 0)


def encode_snapshot_header(
    *,
    uuid: bytes,
    sequence: int,
    floor: int,
    sections: Sequence[int],
    segments: Sequence[SnapshotSegment],
    footer: bytes,
    seed: int,
) -> bytes:
    """Return the header of a snapshot, with its padding. `sections` are lengths."""
    table = np.array([attrs.astuple(segment) for segment in segments], _SEGMENT).tobytes()
    length = header_bytes(len(segments), len(footer))
    header = SnapshotHeader(length, uuid, sequence, floor, len(segments), len(sections), len(footer))
    data = checked(
        SnapshotHeader.MAGIC, b"".join([header.pack(), np.array(sections, "<u8").tobytes(), table, footer]), seed
    )
    return data + bytes(aligned(length) - length)


def decode_snapshot_header(
    data: memoryview, *, uuid: bytes, seed: int
) -> tuple[SnapshotHeader, list[int], list[SnapshotSegment], memoryview] | int | None:
    """Read the header: its fields, the lengths of the sections, the segments and the
    footer.

    Returns how many bytes to read if `data` may be the beginning of a longer header.
    """
    if len(data) < _FIXED_BYTES or data[:8] != SnapshotHeader.MAGIC:
        return None
    header = SnapshotHeader.unpack(data)
    if header.uuid != uuid or header.sections != SHARDS:
        return None
    length = header_bytes(header.segments, header.footer_bytes)
    if length != header.header_bytes:
        return None
    if len(data) < length:
        return length
    if not is_whole(data[:length], SnapshotHeader.MAGIC, seed):
        return None
    offset = _FIXED_BYTES
    sections = np.frombuffer(data, "<u8", SHARDS, offset).tolist()
    offset += SHARDS * 8
    table = np.frombuffer(data, _SEGMENT, header.segments, offset)
    segments = [SnapshotSegment(*row) for row in table.tolist()]
    return header, sections, segments, data[length - header.footer_bytes : length]
