"""The bytes of a volume: superblock, tables of batches, footers and ends of segments,
and the snapshot of the index.

docs/disk-format.md describes them byte by byte. Numbers are little-endian. Everything
has a checksum, and says which disk, segment, life of the segment and offset it belongs
to: bytes that are damaged, old, foreign or written to the wrong place are not taken for
anything else. Checksums of what lies beside blocks are keyed with the secret seed of
the disk, so a block cannot pretend to be a table.

`decode_*` returns None for what is not whole and in its place. Only a superblock gets
an error, because there somebody has to do something.

A `Listing` is records of the log as columns, with their keys: what tables and footers
have behind their headers, the columns one after the other, then the keys.

A snapshot is the index as it was, so that a start reads little else: a header, with the
state of every segment, then a section for each shard of the index. It is not of one
moment: its sections are made one after the other while the log goes on. It says which
sequence was applied before the first of them; recovery applies what came later again.
"""

import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import attrs
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from infinistore.disk.compression import check_zstandard
from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned
from infinistore.disk.records import SHARDS, Rows
from infinistore.errors import ConfigError

OWN_CHECKSUM = 1
"""The flag of a block whose checksum is the tier's, not its writer's."""
SAVED_SHIFT = 4
"""Where in its flags a record has how many pages compression saves; 0: none."""

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

    @property
    def saved(self) -> npt.NDArray[np.uint16]:
        """By how many pages each block is shorter on the disk; 0: not compressed."""
        saved: npt.NDArray[np.uint16] = self.flags >> np.uint16(SAVED_SHIFT)
        return saved

    @property
    def pages(self) -> npt.NDArray[np.int64]:
        """How many pages each block takes on the disk."""
        return -(-self.length.astype(np.int64) // ALIGNMENT_BYTES) - self.saved

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
        pages = self.pages
        ends = (self.page + pages) * ALIGNMENT_BYTES
        return not ends.size or (int(ends.max()) <= segment_bytes and bool((pages > 0)[self.saved > 0].all()))

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


@attrs.frozen
class Origin:
    """The segment that bytes must belong to, to be taken for what they say."""

    uuid: bytes
    """Of the disk."""
    seed: int
    segment: int
    segment_bytes: int


VERSION = 1
COMPRESSED_VERSION = 2
"""Of the superblock of a disk that may have compressed blocks. All else is the same."""
COPIES = 2
SUPERBLOCK_BYTES = ALIGNMENT_BYTES
"""Of one copy; the file `disk` has two, one after the other."""
END_BYTES = ALIGNMENT_BYTES

LEAD = struct.Struct("<8sQI")
"""What every structure begins with: magic, checksum of all behind it, version."""
_COVERED_FROM = 16


class Header:
    """Fields that are packed one after the other, behind a lead."""

    MAGIC: ClassVar[bytes]
    LAYOUT: ClassVar[struct.Struct]

    def pack(self) -> bytes:
        """Return the fields as bytes."""
        return self.LAYOUT.pack(*attrs.astuple(self, recurse=False))  # type: ignore[arg-type]

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Self:
        """Read the fields behind a lead."""
        return cls(*cls.LAYOUT.unpack_from(data, LEAD.size))


def checked(magic: bytes, body: bytes, seed: int, version: int = VERSION) -> bytes:
    """Return a body behind a lead."""
    covered = version.to_bytes(4, "little") + body
    return magic + xxh3_64_intdigest(covered, seed).to_bytes(8, "little") + covered


def is_whole(data: memoryview, magic: bytes, seed: int) -> bool:
    """Return whether these are all the bytes of a structure of this version."""
    if len(data) < LEAD.size:
        return False
    found, checksum, version = LEAD.unpack_from(data)
    return bool(found == magic and version == VERSION and checksum == xxh3_64_intdigest(data[_COVERED_FROM:], seed))


# Superblock


@attrs.frozen
class Superblock(Header):
    """What a disk is, in one page. Of the two copies, the higher `revision` counts."""

    MAGIC: ClassVar = b"INFSDISK"
    LAYOUT: ClassVar = struct.Struct("<I16s16sQQQQQQQI")

    clean: int
    """1 if the snapshot is all there is to know, else 0."""
    uuid: bytes
    """Of this disk."""
    store: bytes
    """The disks that belong together have the same."""
    seed: int
    """Secret: of fingerprints and of the checksums of tables."""
    revision: int
    session: int
    """How often the disk was opened. The upper half of every sequence."""
    segment_bytes: int
    floor: int
    """Records with a lower sequence are void."""
    membership: int
    """When the set of disks of the store last changed, as a number. A disk with a lower
    one was away meanwhile, and what it has may be out of date."""
    snapshot: int
    """If clean: the checksum of the snapshot's header."""
    compressed: int = 0
    """1 if there may be compressed blocks, else 0."""


def encode_superblock(superblock: Superblock) -> bytes:
    """Return a copy of the superblock."""
    body = superblock.pack()
    version = COMPRESSED_VERSION if superblock.compressed else VERSION
    return checked(Superblock.MAGIC, body + bytes(SUPERBLOCK_BYTES - LEAD.size - len(body)), 0, version)


def is_unwritten(data: bytes) -> bool:
    """Whether the file `disk` is new: empty, or the zeros that a crash leaves."""
    return not any(data)


def decode_superblocks(data: bytes, name: str = "the disk") -> Superblock:
    """Return the newest whole copy of the file `disk`.

    ConfigError: there is none, it has another version, or what decompresses its blocks
    is not installed. The message names the remedy.
    """
    found: list[Superblock] = []
    magic = False
    for copy in range(COPIES):
        page = memoryview(data)[copy * SUPERBLOCK_BYTES : (copy + 1) * SUPERBLOCK_BYTES]
        if len(page) < SUPERBLOCK_BYTES or page[:8] != Superblock.MAGIC:
            continue
        magic = True
        _, checksum, version = LEAD.unpack_from(page)
        if checksum != xxh3_64_intdigest(page[_COVERED_FROM:], 0):
            continue
        if version not in (VERSION, COMPRESSED_VERSION):
            raise ConfigError(
                f"{name} has format version {version}, and this release reads versions {VERSION} and"
                f" {COMPRESSED_VERSION}: use the release that wrote it, or wipe the disk (infinistore disk wipe)"
            )
        superblock = Superblock.unpack(page)
        if superblock.segment_bytes and not superblock.segment_bytes % ALIGNMENT_BYTES:
            found.append(superblock)
    if found:
        newest = max(found, key=lambda one: one.revision)
        if newest.compressed:
            check_zstandard(name)
        return newest
    if magic:
        raise ConfigError(
            f"both copies of the superblock of {name} are damaged, so nothing on it can be read: replace the disk,"
            " or wipe it (infinistore disk wipe)"
        )
    raise ConfigError(
        f"{name} has no superblock of InfiniStore: name another folder, or empty this one, if nothing in it is needed"
    )


# Table: what a batch begins with


@attrs.frozen
class Table(Header):
    """The header of a batch."""

    MAGIC: ClassVar = b"INFSTABL"
    LAYOUT: ClassVar = struct.Struct("<I16sQQQQQQIIII")

    segment: int
    uuid: bytes
    incarnation: int
    """The sequence of the first batch of this life of the segment."""
    offset: int
    """Of the table in its segment, in bytes."""
    sequence: int
    synced: int
    """When this was written, all batches up to this sequence were durable or lost."""
    floor: int
    """When this was written, records with a lower sequence were void."""
    batch_bytes: int
    """The table and its blocks, with padding: the next table is behind them."""
    number: int
    """Of the batch in its segment, from 0."""
    rows: int
    key_bytes: int
    reserved: int = 0


TABLE_BYTES = LEAD.size + Table.LAYOUT.size


def table_bytes(rows: int, key_bytes: int) -> int:
    """Return the length of a table with its rows, without padding."""
    return TABLE_BYTES + rows * ROW_BYTES + key_bytes


def encode_table(table: Table, listing: Listing, seed: int) -> bytes:
    """Return a table with its rows, without padding."""
    return checked(Table.MAGIC, b"".join([table.pack(), *listing.encoded()]), seed)


def decode_table(data: memoryview, origin: Origin, offset: int) -> tuple[Table, Listing] | int | None:
    """Read the table at the beginning of `data`, which was read at `offset`.

    Returns how many bytes to read if `data` may be the beginning of a longer table.
    """
    if len(data) < TABLE_BYTES or data[:8] != Table.MAGIC:
        return None
    table = Table.unpack(data)
    length = table_bytes(table.rows, table.key_bytes)
    room = origin.segment_bytes - offset
    if (table.uuid, table.segment, table.offset) != (origin.uuid, origin.segment, offset):
        return None
    if not aligned(length) <= table.batch_bytes <= room or table.batch_bytes % ALIGNMENT_BYTES:
        return None
    if len(data) < length:
        return length
    if not is_whole(data[:length], Table.MAGIC, origin.seed):
        return None
    listing = Listing.decoded(data[TABLE_BYTES:length], table.rows, table.key_bytes)
    return None if listing is None or not listing.is_within(origin.segment_bytes) else (table, listing)


def peek_table(data: memoryview, *, uuid: bytes, segment: int) -> int:
    """Return the incarnation that a segment's first page claims, or 0. Unverified."""
    if len(data) < TABLE_BYTES or data[:8] != Table.MAGIC:
        return 0
    table = Table.unpack(data)
    return table.incarnation if (table.uuid, table.segment, table.offset) == (uuid, segment, 0) else 0


# Footer: all tables of a segment again


@attrs.frozen
class Footer(Header):
    """The header of a footer. Behind it are the sequences of the batches, 8 bytes each,
    the numbers of their rows, 4 bytes each, and the rows."""

    MAGIC: ClassVar = b"INFSFOOT"
    LAYOUT: ClassVar = struct.Struct("<I16sQQIIII")

    segment: int
    uuid: bytes
    incarnation: int
    floor: int
    batches: int
    rows: int
    key_bytes: int
    reserved: int = 0


FOOTER_BYTES = LEAD.size + Footer.LAYOUT.size


def footer_bytes(batches: int, rows: int, key_bytes: int) -> int:
    """Return the length of a footer, without padding."""
    return FOOTER_BYTES + batches * 12 + rows * ROW_BYTES + key_bytes


def encode_footer(footer: Footer, sequences: Sequence[int], rows: Sequence[int], listing: Listing, seed: int) -> bytes:
    """Return a footer: of each batch its sequence and how many rows it has."""
    directory = np.array(sequences, "<u8").tobytes() + np.array(rows, "<u4").tobytes()
    return checked(Footer.MAGIC, b"".join([footer.pack(), directory, *listing.encoded()]), seed)


def decode_footer(
    data: memoryview, origin: Origin, incarnation: int
) -> tuple[Footer, list[int], list[int], Listing] | None:
    """Read a footer: its header, the sequences and rows of each batch, and all rows."""
    if len(data) < FOOTER_BYTES or not is_whole(data, Footer.MAGIC, origin.seed):
        return None
    footer = Footer.unpack(data)
    start = FOOTER_BYTES + footer.batches * 12
    belongs = (footer.uuid, footer.segment, footer.incarnation) == (origin.uuid, origin.segment, incarnation)
    if not belongs or start > len(data):
        return None
    listing = Listing.decoded(data[start:], footer.rows, footer.key_bytes)
    sequences = np.frombuffer(data, "<u8", footer.batches, FOOTER_BYTES).tolist()
    rows = np.frombuffer(data, "<u4", footer.batches, FOOTER_BYTES + footer.batches * 8).tolist()
    if listing is None or sum(rows) != footer.rows or not listing.is_within(origin.segment_bytes):
        return None
    return footer, sequences, rows, listing


# End: the last page of a segment


@attrs.frozen
class End(Header):
    """The last page of a segment. It says which life the segment is in."""

    MAGIC: ClassVar = b"INFSLAST"
    LAYOUT: ClassVar = struct.Struct("<I16sQQIQQ")

    segment: int
    uuid: bytes
    incarnation: int
    floor: int
    sealed: int
    """1 if there is a footer, and all batches are durable; else 0."""
    footer_bytes: int
    """The length of the footer, which ends, padded, where this page begins."""
    sequence: int
    """If sealed: of the last batch."""


def encode_end(end: End, seed: int) -> bytes:
    """Return the last page of a segment."""
    body = end.pack()
    return checked(End.MAGIC, body + bytes(END_BYTES - LEAD.size - len(body)), seed)


def decode_end(data: memoryview, origin: Origin) -> End | None:
    """Read the last page of a segment."""
    if len(data) != END_BYTES or not is_whole(data, End.MAGIC, origin.seed):
        return None
    end = End.unpack(data)
    belongs = (end.uuid, end.segment) == (origin.uuid, origin.segment)
    return end if belongs and end.footer_bytes <= origin.segment_bytes - END_BYTES else None


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
_SAVED = np.dtype("<u2")
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
    """With all that follows, without padding; sections begin at multiples of 4096."""
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
    compressed: int = 0
    """1 if a column `saved` follows the others, else 0: no block is compressed."""


_SECTION_BYTES = LEAD.size + SnapshotSection.LAYOUT.size


def header_bytes(segments: int, footer_bytes: int = 0) -> int:
    """Return the length of a header without padding."""
    return _FIXED_BYTES + SHARDS * 8 + segments * _SEGMENT.itemsize + footer_bytes


def most_footer_bytes(segment_bytes: int) -> int:
    """Return the longest footer that a snapshot takes along. A segment that has more
    records is sealed instead, because the disk keeps room for snapshots."""
    return min(1 << 20, segment_bytes // 16)


def most_snapshot_bytes(segments: int, segment_bytes: int) -> int:
    """Return the room for a snapshot beside the one before, with padding."""
    records = segments * (segment_bytes // ALIGNMENT_BYTES)
    header = aligned(header_bytes(segments, most_footer_bytes(segment_bytes)))
    sections = SHARDS * (_SECTION_BYTES + ALIGNMENT_BYTES) + records * SNAPSHOT_ROW_BYTES
    return 2 * (header + sections)


def encode_section(shard: int, rows: Rows, *, uuid: bytes, sequence: int, seed: int) -> bytes:
    """Return the section of a shard, with its padding."""
    columns = [getattr(rows, name).astype(kind).tobytes() for name, kind in ROW_COLUMNS]
    flags = (rows.own * np.uint8(_OWN) | rows.live * np.uint8(_LIVE)).tobytes()
    saved = rows.saved.astype(_SAVED).tobytes() if rows.saved.any() else b""
    header = SnapshotSection(shard, uuid, sequence, rows.low.size, int(bool(saved)))
    section = checked(SnapshotSection.MAGIC, b"".join([header.pack(), *columns, flags, saved]), seed)
    return section + bytes(aligned(len(section)) - len(section))


def decode_section(data: memoryview, *, shard: int, uuid: bytes, sequence: int, seed: int) -> Rows | None:
    """Read the section of a shard; None if it is damaged or another one."""
    if len(data) < _SECTION_BYTES:
        return None
    header = SnapshotSection.unpack(data)
    length = _SECTION_BYTES + header.rows * (SNAPSHOT_ROW_BYTES + header.compressed * _SAVED.itemsize)
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
    saved = np.zeros(header.rows, _SAVED)
    if header.compressed:
        saved = np.frombuffer(data, _SAVED, header.rows, offset + flags.nbytes)
    return Rows(**columns, saved=saved, own=(flags & _OWN) != 0, live=(flags & _LIVE) != 0)


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
