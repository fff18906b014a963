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


def section(heading: str) -> str:
    """What stands under a heading, up to the next heading."""
    assert DOCUMENT.count(f"\n{heading}\n") == 1, heading
    return re.split(r"\n##+ ", DOCUMENT.partition(f"\n{heading}\n")[2], maxsplit=1)[0]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text, without their heads; cells without back quotes."""
    found = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    return [
        [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in one.splitlines()[2:]]
        for one in found
    ]


def layout(cls: type[Header]) -> list[list[str]]:
    """Offset, length and name of each field behind the lead."""
    codes = re.findall(r"(\d*)([a-zA-Z])", cls.LAYOUT.format.lstrip("<"))
    lengths = [
        n for count, code in codes for n in ([int(count)] if code == "s" else [struct.calcsize(code)] * int(count or 1))
    ]
    starts = LEAD.size + np.cumsum([0, *lengths])
    names = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]
    return [[str(start), str(n), name] for start, n, name in zip(starts.tolist(), lengths, names, strict=False)]


def columns(pairs: list[tuple[str, str]]) -> list[list[str]]:
    return [[str(np.dtype(kind).itemsize), name] for name, kind in pairs]


def test_every_structure_begins_as_described() -> None:
    [lead] = tables(section("## Every structure"))
    assert [row[:3] for row in lead] == [["0", "8", "magic"], ["8", "8", "checksum"], ["16", "4", "version"]]
    assert f"begins with {LEAD.size} bytes" in " ".join(section("## Every structure").split())
    assert lead[2][3] == f"{VERSION}; in a superblock {COMPRESSED_VERSION}, if there may be compressed blocks"
    prose = " ".join(DOCUMENT.split())
    assert f"version {VERSION}." in prose and f"a *page* has {ALIGNMENT_BYTES} bytes" in prose


@pytest.mark.parametrize(("heading", "cls"), STRUCTURES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_the_fields_of_a_structure_are_described(heading: str, cls: type[Header]) -> None:
    assert [row[:3] for row in tables(section(heading))[0]] == layout(cls)
    assert f"Magic `{cls.MAGIC.decode()}`" in " ".join(section(heading).split())


def test_the_columns_of_records_are_described() -> None:
    [rows] = tables(section("## Records"))
    assert [row[:2] for row in rows] == columns(list(COLUMNS))
    assert sum(int(row[0]) for row in rows) == ROW_BYTES
    assert f"{OWN_CHECKSUM}: the checksum is the tier's own" in rows[7][2]
    assert f"The upper {16 - SAVED_SHIFT} bits: how many pages compression saves" in rows[7][2]
    assert f"save more than {MOST_SAVED_PAGES}" in section("### Compressed blocks")


def test_the_columns_of_snapshots_are_described() -> None:
    of_segment = tables(section("## Snapshot"))[1]
    assert [row[:2] for row in of_segment] == columns([(name, kind) for name, kind in snapshots.SEGMENT_COLUMNS])
    states = f"{snapshots.OPEN} open or not sealed yet, {snapshots.SEALED} sealed, {snapshots.ABANDONED} abandoned"
    assert states in of_segment[1][2]
    of_record = tables(section("### Section"))[1]
    assert [row[:2] for row in of_record] == [*columns(list(snapshots.ROW_COLUMNS)), ["1", "flags"]]
    assert sum(int(row[0]) for row in of_record) == snapshots.SNAPSHOT_ROW_BYTES
    assert f"{SHARDS} sections follow" in " ".join(section("## Snapshot").split())


def test_what_is_written_is_laid_out_as_described() -> None:
    for name, cls in zip(("superblock", "table", "footer", "end"), STRUCTURES.values(), strict=False):
        magic, _, version = LEAD.unpack_from(WRITTEN[name])
        assert (magic, version) == (cls.MAGIC, VERSION)
    assert LEAD.unpack_from(WRITTEN["compressed-superblock"])[2] == COMPRESSED_VERSION
