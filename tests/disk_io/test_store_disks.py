"""The disks of a store, opened: what is wrong with one of them is said of that one."""

from pathlib import Path
from random import Random

import pytest

from infinistore.disk_io.store_disks import open_disks
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.sizes import MIB
from tests.disk_io.volumes import fill_disk

SIZE_BYTES = 64 * MIB


def refusal(*places: DiskPlace) -> str:
    with pytest.raises(ConfigError) as raised:
        open_disks(places, Random(1))
    return str(raised.value)


@pytest.mark.parametrize(
    ("offset", "bytes_there", "says"),
    [(8, bytes(8), "both copies of the superblock of disk {0} are damaged"), (0, bytes(8), "{0}")],
    ids=["damaged", "foreign"],
)
def test_a_disk_that_cannot_be_read_is_named(offset: int, bytes_there: bytes, says: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    fill_disk(bad, [{"a": b"1"}])
    with (bad / "disk").open("r+b") as file:
        for copy in range(2):
            file.seek(copy * 4096 + offset)
            file.write(bytes_there)
    assert says.format(bad) in refusal(DiskPlace(good, SIZE_BYTES), DiskPlace(bad, SIZE_BYTES))
    assert not good.exists()


def test_what_is_refused_leaves_an_empty_folder_empty_and_a_disk_as_it_was(tmp_path: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    fill_disk(full, [{"a": b"1"}])
    before = {file.name: file.read_bytes() for file in full.rglob("*") if file.is_file()}
    assert "no room" in refusal(DiskPlace(empty, SIZE_BYTES), DiskPlace(full, 1 << 50))
    assert list(empty.iterdir()) == []
    assert before == {file.name: file.read_bytes() for file in full.rglob("*") if file.is_file()}
