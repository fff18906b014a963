"""What volumes write, they read back; what is damaged or misplaced is nothing."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.disk import format as disk_format
from infinistore.disk.format import (
    SEALED,
    End,
    Footer,
    Listing,
    SnapshotSegment,
    Superblock,
    Table,
    decode_section,
    decode_snapshot_header,
    encode_section,
    encode_snapshot_header,
    joined,
)
from infinistore.disk.jobs import aligned
from infinistore.disk.records import SHARDS, Rows, fingerprints
from infinistore.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
UUID, SEED, SEGMENT_BYTES = bytes(range(16)), 0x0123456789ABCDEF, 1 << 20
KEYS = ["model/0", "model/1", "größe", "gone"]


def listing() -> Listing:
    marks = fingerprints(KEYS, SEED)
    return Listing.of(
        [key.encode() for key in KEYS],
        *marks,
        checksum=[2**64 - 1, 7, 8, 0],
        page=[1, 2, 5, 0],
        length=[4096, 9000, 1, 0],
        flags=[0, 1, 0, 0],
        tenant=[0, 1, 2**32 - 1, 0],
        expiry=[0, 2**64 - 1, 1, 0],
    )


SUPERBLOCK = Superblock(1, UUID, bytes(16), SEED, 6, 5, SEGMENT_BYTES, 5 << 32, 3, 99)
TABLE = Table(
    2,
    UUID,
    3 << 32,
    8192,
    (3 << 32) + 4,
    (3 << 32) + 2,
    1 << 32,
    8 * 4096,
    1,
    4,
    sum(len(key.encode()) for key in KEYS),
)
FOOTER = Footer(2, UUID, 3 << 32, 1 << 32, 2, 8, 2 * TABLE.key_bytes)
END = End(2, UUID, 3 << 32, 1 << 32, 1, 500, (3 << 32) + 5)
ORIGIN = disk_format.Origin(UUID, SEED, 2, SEGMENT_BYTES)
ROWS = Rows(
    np.array([5, 9], np.uint64),
    np.array([1, 2**64 - 1], np.uint64),
    np.array([0, 3], np.uint32),
    np.array([1, 2**24 - 1], np.uint32),
    np.array([4096, 1], np.uint32),
    saved=np.zeros(2, np.uint16),
    own=np.array([True, False]),
    live=np.array([False, True]),
)
COMPRESSED_ROWS = ROWS._replace(saved=np.array([4095, 0], np.uint16))
SEGMENTS = [SnapshotSegment(0, SEALED, 1 << 32, 8192, (1 << 32) + 9)]


def snapshot_header() -> bytes:
    return encode_snapshot_header(
        uuid=UUID, sequence=17, floor=3, sections=[4096] * SHARDS, segments=SEGMENTS, footer=b"footer", seed=SEED
    )


WRITTEN = {
    "superblock": disk_format.encode_superblock(SUPERBLOCK),
    "table": disk_format.encode_table(TABLE, listing(), SEED),
    "footer": disk_format.encode_footer(FOOTER, [3 << 32, (3 << 32) + 5], [4, 4], joined([listing(), listing()]), SEED),
    "end": disk_format.encode_end(END, SEED),
    "section": encode_section(3, ROWS, uuid=UUID, sequence=17, seed=SEED),
    "compressed-superblock": disk_format.encode_superblock(attrs.evolve(SUPERBLOCK, compressed=1)),
    "compressed-section": encode_section(3, COMPRESSED_ROWS, uuid=UUID, sequence=17, seed=SEED),
    "snapshot-header": snapshot_header(),
}


def read(name: str, data: bytes) -> Any:
    """Read one of the structures; None if it is not whole, or needs more bytes."""
    view = memoryview(data)
    found: Any
    match name:
        case "superblock" | "compressed-superblock":
            try:
                found = disk_format.decode_superblocks(data)
            except ConfigError:
                return None
        case "table":
            found = disk_format.decode_table(view, ORIGIN, 8192)
        case "footer":
            found = disk_format.decode_footer(view, ORIGIN, 3 << 32)
        case "end":
            found = disk_format.decode_end(view, ORIGIN)
        case "section" | "compressed-section":
            found = decode_section(view, shard=3, uuid=UUID, sequence=17, seed=SEED)
        case _:
            found = decode_snapshot_header(view, uuid=UUID, seed=SEED)
    return None if isinstance(found, int) else found


def plain(found: Any) -> Any:
    """A structure as values that compare."""
    if isinstance(found, Listing):
        return [getattr(found, field.name).tolist() for field in attrs.fields(Listing)[:-1]], found.keys()
    if isinstance(found, Rows):
        return [column.tolist() for column in found]
    if isinstance(found, tuple):
        return [plain(one) for one in found]
    return bytes(found) if isinstance(found, memoryview) else found


every_structure = pytest.mark.parametrize("name", WRITTEN)


def test_what_is_written_is_read_back() -> None:
    assert read("superblock", WRITTEN["superblock"]) == SUPERBLOCK
    assert plain(read("table", WRITTEN["table"])) == [TABLE, plain(listing())]
    assert plain(read("footer", WRITTEN["footer"])) == [
        FOOTER,
        [3 << 32, (3 << 32) + 5],
        [4, 4],
        plain(joined([listing(), listing()])),
    ]
    assert read("end", WRITTEN["end"]) == END
    assert plain(read("section", WRITTEN["section"])) == plain(ROWS)
    assert read("compressed-superblock", WRITTEN["compressed-superblock"]) == attrs.evolve(SUPERBLOCK, compressed=1)
    assert plain(read("section", WRITTEN["compressed-section"])) == plain(COMPRESSED_ROWS)
    header, sections, segments, footer = read("snapshot-header", WRITTEN["snapshot-header"])
    assert (header.sequence, header.floor, sections, segments, bytes(footer)) == (
        17,
        3,
        [4096] * SHARDS,
        SEGMENTS,
        b"footer",
    )
    assert listing().keys() == KEYS


@every_structure
def test_golden_files_are_what_is_written_and_read(name: str) -> None:
    golden = (GOLDEN / f"{name}-v{disk_format.VERSION}.bin").read_bytes()
    assert golden == WRITTEN[name]
    assert read(name, golden) is not None


@every_structure
@given(data=st.data())
def test_a_flipped_byte_is_found_or_does_no_harm(name: str, data: st.DataObject) -> None:
    written = bytearray(WRITTEN[name])
    written[data.draw(st.integers(0, len(written) - 1))] ^= data.draw(st.integers(1, 255))
    found = read(name, bytes(written))
    assert found is None or plain(found) == plain(read(name, WRITTEN[name]))  # it was in the padding


@every_structure
@given(data=st.data())
def test_a_truncated_structure_is_no_structure(name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(WRITTEN[name]) - 1))
    found = read(name, WRITTEN[name][:length])
    assert found is None or (
        not WRITTEN[name][length:].strip(b"\0") and plain(found) == plain(read(name, WRITTEN[name]))
    )


@given(data=st.binary(max_size=5000))
@every_structure
def test_any_bytes_are_read_without_harm(name: str, data: bytes) -> None:
    magic = WRITTEN[name][:8]
    assert read(name, data) is None
    assert read(name, magic + data) is None


@pytest.mark.parametrize(
    "wrong",
    [{"uuid": bytes(16)}, {"seed": 1}, {"segment": 3}, {"segment_bytes": 4 * 4096}],
    ids=lambda one: next(iter(one)),
)
def test_a_structure_of_another_disk_or_segment_is_none(wrong: dict[str, Any]) -> None:
    origin = attrs.evolve(ORIGIN, **wrong)
    assert disk_format.decode_table(memoryview(WRITTEN["table"]), origin, 8192) is None
    if "segment_bytes" not in wrong:
        assert disk_format.decode_footer(memoryview(WRITTEN["footer"]), origin, 3 << 32) is None
        assert disk_format.decode_end(memoryview(WRITTEN["end"]), origin) is None


def test_a_table_at_another_offset_and_a_footer_of_another_life_are_none() -> None:
    assert disk_format.decode_table(memoryview(WRITTEN["table"]), ORIGIN, 0) is None
    assert disk_format.decode_footer(memoryview(WRITTEN["footer"]), ORIGIN, 1) is None


def test_the_beginning_of_a_table_says_how_much_to_read() -> None:
    beginning = memoryview(WRITTEN["table"])[: disk_format.TABLE_BYTES]
    assert disk_format.decode_table(beginning, ORIGIN, 8192) == len(WRITTEN["table"])


def test_of_two_superblocks_the_newer_whole_one_counts() -> None:
    newer = attrs.evolve(SUPERBLOCK, revision=7, clean=0)
    both = disk_format.encode_superblock(SUPERBLOCK) + disk_format.encode_superblock(newer)
    assert disk_format.decode_superblocks(both) == newer
    torn = both[:-2048] + bytes(range(256)) * 8
    assert disk_format.decode_superblocks(torn) == SUPERBLOCK


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has no superblock"),
        (bytes(8192), "has no superblock"),
        (b"GIF89a" * 2000, "has no superblock"),
        (WRITTEN["superblock"][:-1] + b"x", "are damaged"),
    ],
)
def test_a_disk_that_is_none_is_refused_with_a_remedy(data: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        disk_format.decode_superblocks(data.ljust(8192, b"\0"))


def test_another_version_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_format, "VERSION", 3)
    later = disk_format.encode_superblock(SUPERBLOCK)
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=r"has format version 3, and this release reads versions 1 and 2.*infinistore disk wipe"
    ):
        disk_format.decode_superblocks(later + bytes(4096))


def test_sections_are_whole_pages() -> None:
    assert len(WRITTEN["section"]) == aligned(len(WRITTEN["section"]))
    assert len(WRITTEN["snapshot-header"]) == aligned(len(WRITTEN["snapshot-header"]))
