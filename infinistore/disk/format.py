"""The bytes of a volume: superblock, tables of batches, footers and ends of segments.

docs/disk-format.md describes them byte by byte; `snapshots` has the snapshot. Numbers
are little-endian. Everything has a checksum, and says which disk, segment, life of the
segment and offset it belongs to: bytes that are damaged, old, foreign or written to the
wrong place are not taken for anything else. Checksums of what lies beside blocks are
keyed with the secret seed of the disk, so a block cannot pretend to be a table.

`decode_*` returns None for what is not whole and in its place. Only a superblock gets
an error, because there somebody has to do something.
"""

import struct
from collections.abc import Sequence
from typing import ClassVar, Self

import attrs
import numpy as np
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import ALIGNMENT_BYTES, aligned
from infinistore.disk.listings import ROW_BYTES, Listing
from infinistore.errors import ConfigError

__all__ = [
    "COPIES",
    "END_BYTES",
    "FOOTER_BYTES",
    "LEAD",
    "SUPERBLOCK_BYTES",
    "TABLE_BYTES",
    "VERSION",
    "End",
    "Footer",
    "Header",
    "Superblock",
    "Table",
    "checked",
    "decode_end",
    "decode_footer",
    "decode_superblocks",
    "decode_table",
    "encode_end",
    "encode_footer",
    "encode_superblock",
    "encode_table",
    "footer_bytes",
    "is_unwritten",
    "is_whole",
    "peek_table",
    "table_bytes",
]

VERSION = 1
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


def checked(magic: bytes, body: bytes, seed: int) -> bytes:
    """Return a body behind a lead."""
    covered = VERSION.to_bytes(4, "little") + body
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
    LAYOUT: ClassVar = struct.Struct("<I16s16sQQQQQQQ")

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


def encode_superblock(superblock: Superblock) -> bytes:
    """Return a copy of the superblock."""
    body = superblock.pack()
    return checked(Superblock.MAGIC, body + bytes(SUPERBLOCK_BYTES - LEAD.size - len(body)), 0)


def is_unwritten(data: bytes) -> bool:
    """Whether the file `disk` is that of a new one: empty, or zeros, which is what a
    crash leaves of the first superblock.
    """
    return not any(data)


def decode_superblocks(data: bytes, name: str = "the disk") -> Superblock:
    """Return the newest whole copy of the file `disk`.

    ConfigError: there is none, or it has another version. The message names the remedy.
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
        if version != VERSION:
            raise ConfigError(
                f"{name} has format version {version}, and this release reads version {VERSION}: use the release"
                " that wrote it, or wipe the disk (infinistore disk wipe)"
            )
        superblock = Superblock.unpack(page)
        if superblock.segment_bytes and not superblock.segment_bytes % ALIGNMENT_BYTES:
            found.append(superblock)
    if found:
        return max(found, key=lambda one: one.revision)
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
    """When this was written, all batches up to this sequence had ended: each was
    durable, or had failed."""
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


def decode_table(
    data: memoryview, *, uuid: bytes, seed: int, segment: int, offset: int, segment_bytes: int
) -> tuple[Table, Listing] | int | None:
    """Read the table at the beginning of `data`, which was read at `offset`.

    Returns how many bytes to read if `data` may be the beginning of a longer table.
    """
    if len(data) < TABLE_BYTES or data[:8] != Table.MAGIC:
        return None
    table = Table.unpack(data)
    length = table_bytes(table.rows, table.key_bytes)
    room = segment_bytes - offset
    if (table.uuid, table.segment, table.offset) != (uuid, segment, offset):
        return None
    if not aligned(length) <= table.batch_bytes <= room or table.batch_bytes % ALIGNMENT_BYTES:
        return None
    if len(data) < length:
        return length
    if not is_whole(data[:length], Table.MAGIC, seed):
        return None
    listing = Listing.decoded(data[TABLE_BYTES:length], table.rows, table.key_bytes)
    return None if listing is None or not listing.is_within(segment_bytes) else (table, listing)


def peek_table(data: memoryview, *, uuid: bytes, segment: int) -> int:
    """Return the incarnation that a segment's first page claims; 0: none. The claim is
    not verified."""
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
    data: memoryview, *, uuid: bytes, seed: int, segment: int, incarnation: int, segment_bytes: int
) -> tuple[Footer, list[int], list[int], Listing] | None:
    """Read what `encode_footer` returned: the footer, the sequences, how many rows each
    batch has, and all rows."""
    if len(data) < FOOTER_BYTES or not is_whole(data, Footer.MAGIC, seed):
        return None
    footer = Footer.unpack(data)
    start = FOOTER_BYTES + footer.batches * 12
    if (footer.uuid, footer.segment, footer.incarnation) != (uuid, segment, incarnation) or start > len(data):
        return None
    listing = Listing.decoded(data[start:], footer.rows, footer.key_bytes)
    sequences = np.frombuffer(data, "<u8", footer.batches, FOOTER_BYTES).tolist()
    rows = np.frombuffer(data, "<u4", footer.batches, FOOTER_BYTES + footer.batches * 8).tolist()
    if listing is None or sum(rows) != footer.rows or not listing.is_within(segment_bytes):
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
    """1 if there is a footer, and all batches are durable; 0 from the first batch to
    then."""
    footer_bytes: int
    """The length of the footer, which ends, with its padding, where this page
    begins."""
    sequence: int
    """If sealed: of the last batch."""


def encode_end(end: End, seed: int) -> bytes:
    """Return the last page of a segment."""
    body = end.pack()
    return checked(End.MAGIC, body + bytes(END_BYTES - LEAD.size - len(body)), seed)


def decode_end(data: memoryview, *, uuid: bytes, seed: int, segment: int, segment_bytes: int) -> End | None:
    """Read the last page of a segment."""
    if len(data) != END_BYTES or not is_whole(data, End.MAGIC, seed):
        return None
    end = End.unpack(data)
    right = (end.uuid, end.segment) == (uuid, segment) and end.footer_bytes <= segment_bytes - END_BYTES
    return end if right else None
