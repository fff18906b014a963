"""`docs/disk-format.md` says what the code does: every structure, field and column."""

import re
import struct
from pathlib import Path

import attrs
import numpy as np
import pytest

from infinistore.disk import format as snapshots
from infinistore.disk.format import (
    COLUMNS,
    COMPRESSED_VERSION,
    LEAD,
    OWN_CHECKSUM,
    ROW_BYTES,
    SAVED_SHIFT,
    VERSION,
    End,
    Footer,
    Header,
    Superblock,
    Table,
)
from infinistore.disk.jobs import ALIGNMENT_BYTES
from infinistore.disk.records import MOST_SAVED_PAGES, SHARDS
from tests.disk.test_format import WRITTEN

DOCUMENT = (Path(__file__).parents[2] / "docs" / "disk-format.md").read_text(encoding="utf-8")
STRUCTURES: dict[str, type[Header]] = {
    "## Superblock": Superblock,
    "## Table": Table,
    "## Footer": Footer,
    "## Last page": End,
    "## Snapshot": snapshots.SnapshotHeader,
    "### Section": snapshots.SnapshotSection,
}


A_FIELD = re.compile(r"^ *(\d+)  (\w+) *(.*(?:\n {6,}.*)*)$", flags=re.MULTILINE)
SAME_EVERYWHERE = {"segment", "uuid", "incarnation", "floor", "rows", "key_bytes", "reserved"}
"""The fields that one list describes for all structures."""


def section(heading: str) -> str:
    """What stands under a heading, up to the next heading."""
    assert DOCUMENT.count(f"\n{heading}\n") == 1, heading
    return re.split(r"\n##+ ", DOCUMENT.partition(f"\n{heading}\n")[2], maxsplit=1)[0]


def layouts(text: str) -> list[list[list[str]]]:
    """The layouts of a text: of each field its bytes, its name and its contents."""
    return [
        [[length, name, " ".join(contents.split())] for length, name, contents in A_FIELD.findall(one)]
        for one in re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    ]


def layout(cls: type[Header]) -> list[list[str]]:
    """Length and name of each field behind the lead."""
    assert cls.LAYOUT.format.startswith("<")  # so that there are no gaps
    codes = re.findall(r"(\d*)([a-zA-Z])", cls.LAYOUT.format)
    lengths = [
        n for count, code in codes for n in ([int(count)] if code == "s" else [struct.calcsize(code)] * int(count or 1))
    ]
    names = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]
    return [[str(n), name] for n, name in zip(lengths, names, strict=False)]


def columns(pairs: list[tuple[str, str]]) -> list[list[str]]:
    return [[str(np.dtype(kind).itemsize), name] for name, kind in pairs]


def test_every_structure_begins_as_described() -> None:
    [lead] = layouts(section("## Every structure"))
    assert [row[:2] for row in lead] == [["8", "magic"], ["8", "checksum"], ["4", "version"]]
    assert f"begins with {LEAD.size} bytes" in " ".join(section("## Every structure").split())
    assert lead[2][2] == f"{VERSION}; in a superblock {COMPRESSED_VERSION}, if there may be compressed blocks"
    for name in SAME_EVERYWHERE:
        assert f"`{name}`: " in section("## Every structure")
    prose = " ".join(DOCUMENT.split())
    assert f"version {VERSION}." in prose and f"a *page* has {ALIGNMENT_BYTES} bytes" in prose


@pytest.mark.parametrize(("heading", "cls"), STRUCTURES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_the_fields_of_a_structure_are_described(heading: str, cls: type[Header]) -> None:
    fields = layouts(section(heading))[0]
    assert [row[:2] for row in fields] == layout(cls)
    assert {row[1] for row in fields if not row[2]} <= SAME_EVERYWHERE
    assert f"Magic `{cls.MAGIC.decode()}`" in " ".join(section(heading).split())


def test_the_columns_of_records_are_described() -> None:
    [rows] = layouts(section("## Records"))
    assert [row[:2] for row in rows] == columns(list(COLUMNS))
    assert sum(int(row[0]) for row in rows) == ROW_BYTES
    assert f"{OWN_CHECKSUM}: the checksum is the tier's own" in rows[7][2]
    assert f"The upper {16 - SAVED_SHIFT} bits: how many pages compression saves" in rows[7][2]
    assert f"save more than {MOST_SAVED_PAGES}" in section("### Compressed blocks")


def test_the_columns_of_snapshots_are_described() -> None:
    of_segment = layouts(section("## Snapshot"))[1]
    assert [row[:2] for row in of_segment] == columns([(name, kind) for name, kind in snapshots.SEGMENT_COLUMNS])
    states = f"{snapshots.OPEN} open or not sealed yet, {snapshots.SEALED} sealed, {snapshots.ABANDONED} abandoned"
    assert states in of_segment[1][2]
    of_record = layouts(section("### Section"))[1]
    assert [row[:2] for row in of_record] == [*columns(list(snapshots.ROW_COLUMNS)), ["1", "flags"]]
    assert sum(int(row[0]) for row in of_record) == snapshots.SNAPSHOT_ROW_BYTES
    assert f"{SHARDS} sections follow" in " ".join(section("## Snapshot").split())


def test_a_snapshot_has_its_segments_one_after_the_other() -> None:
    assert "the segments, one after the other" in " ".join(section("## Snapshot").split())
    segments = [
        snapshots.SnapshotSegment(1, snapshots.SEALED, 7, 8192, 9),
        snapshots.SnapshotSegment(2, 0, 10, 4096, 11),
    ]
    header = snapshots.encode_snapshot_header(
        uuid=bytes(16), sequence=11, floor=0, sections=[0] * SHARDS, segments=segments, footer=b"", seed=1
    )
    described = struct.Struct("<" + "".join({"4": "I", "8": "Q"}[row[0]] for row in layouts(section("## Snapshot"))[1]))
    behind = LEAD.size + snapshots.SnapshotHeader.LAYOUT.size + 8 * SHARDS
    assert header[behind:].startswith(b"".join(described.pack(*attrs.astuple(segment)) for segment in segments))


def test_what_is_written_is_laid_out_as_described() -> None:
    for name, cls in zip(("superblock", "table", "footer", "end"), STRUCTURES.values(), strict=False):
        magic, _, version = LEAD.unpack_from(WRITTEN[name])
        assert (magic, version) == (cls.MAGIC, VERSION)
    assert LEAD.unpack_from(WRITTEN["compressed-superblock"])[2] == COMPRESSED_VERSION
