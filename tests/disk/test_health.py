"""What errors mean for a disk, in words that say what to do."""

import errno
import logging

import pytest

from infinistore.disk.disks import Health


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "its file system is full (ENOSPC); free some room, and start the store again"),
        (errno.EIO, "it refused to be written (EIO); check it, replace it if need be, and start the store again"),
    ],
)
def test_a_disk_that_cannot_be_written_says_why_and_what_helps(code: int, says: str) -> None:
    health = Health()
    health.refused(code)
    assert (health.state, health.alarm) == ("read-only", f"the disk is read-only: {says}")


def test_what_is_worse_counts_and_nothing_makes_it_better() -> None:
    health = Health()
    health.write_failed(errno.ENODEV, 0.0)
    health.refused(errno.ENOSPC)
    assert health.state == "off"
    assert "ENODEV" in health.alarm


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        (errno.EROFS, "read-only", "its file system is read-only"),
        (errno.ENOENT, "read-only", "its files were removed"),
        (errno.ESTALE, "read-only", "its files were removed"),
        (errno.ENODEV, "off", "its device is gone"),
    ],
)
def test_a_write_error_that_cannot_pass_counts_at_once(code: int, state: str, why: str) -> None:
    health = Health()
    health.write_failed(code, 0.0)
    assert health.state == state
    assert why in health.alarm
    assert "start the store again" in health.alarm


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM])
def test_a_full_disk_is_not_a_broken_one(code: int) -> None:
    health = Health()
    for number in range(100):
        health.write_failed(code, float(number) / 1000)
    assert (health.state, health.alarm, health.write_errors) == ("healthy", "", 100)


def test_errors_count_if_they_come_within_a_minute() -> None:
    health = Health()
    for now in (0.0, 40.0, 80.0, 120.0):
        health.write_failed(errno.EIO, now)
    assert str(health.state) == "healthy"
    health.write_failed(errno.EIO, 121.0)
    assert str(health.state) == "read-only"
    for number in range(8):
        health.read_failed(errno.EIO, 122.0 + number)
    assert str(health.state) == "off"
    assert "8 reads failed within 60 s" in health.alarm


def test_what_a_disk_becomes_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health("/mnt/nvme0")
    with caplog.at_level(logging.WARNING, "infinistore.disk"):
        health.shrank(errno.ENOSPC)
        for _ in range(9):
            health.write_failed(errno.EROFS, 0.0)
            health.read_failed(errno.ENXIO, 0.0)
        health.shrank(errno.ENOSPC)
    said = [(one.message, one.__dict__["disk"], one.__dict__["problem"].partition(";")[0]) for one in caplog.records]
    assert said == [
        ("the disk has less room than it was given", "/mnt/nvme0", "its file system is full (ENOSPC)"),
        ("the disk is read-only", "/mnt/nvme0", "its file system is read-only"),
        ("the disk is off", "/mnt/nvme0", "its device is gone (ENXIO)"),
    ]
    assert health.alarm.startswith("the disk is off: ")


@pytest.mark.parametrize(
    ("code", "why"),
    [(errno.ENOSPC, "its file system is full (ENOSPC); free some room,"), (errno.EIO, "it gave no more (EIO),")],
)
def test_a_disk_that_got_less_room_says_how_to_get_the_rest(code: int, why: str) -> None:
    health = Health()
    health.shrank(code)
    said = f"the disk has less room than it was given: {why} and start the store again to get the rest"
    assert (str(health.state), health.alarm) == ("healthy", said)
