"""`infinistore disk`: looks at the disks of the SSD tier, verifies and wipes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import rich_click as click

from infinistore.cli.options import json_option
from infinistore.cli.output import demand_yes, note, print_json, print_line, print_table, progress_bar, visible
from infinistore.disk_settings import check_disks_work
from infinistore.errors import ChecksumMismatch, ConfigError
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.disk.inspection import DamagedBlock, DiskContents, Inspector, Verified
    from infinistore.disk_io import DiskFolder, DiskRunner

_PATH = click.argument("path", type=click.Path(path_type=Path))
_TIMEOUT_S = 5.0
_LISTED = 20


@click.group("disk", short_help="Look at the disks of the SSD tier.")
def command() -> None:
    """Look at a disk of the SSD tier, verify it, or wipe it.

    PATH is the folder that a server was given with --disk. The server need not run;
    `verify` and `wipe` refuse a disk that is in use.
    """


@command.command("inspect", short_help="Show what is on a disk.")
@click.option("--segments", "with_segments", is_flag=True, help="Show each segment, too.")
@json_option
@_PATH
def inspect(path: Path, with_segments: bool, as_json: bool) -> None:
    """Show the superblock, the segments, and how many keys are on a disk.

    Nothing is changed, and no block is read. It works while a server uses the disk, but
    what that changes meanwhile may then look damaged.
    """
    check_disks_work()
    from infinistore.disk_io import lock_holder

    with _opened(path, locked=False) as (folder, runner):
        user = lock_holder(folder.superblock_fd)
        contents = _inspect(_inspector(folder), runner)
        allocated_bytes, free_bytes = folder.used_bytes(), folder.free_bytes()
    facts = _facts(contents) | {"in_use_by": user, "allocated_bytes": allocated_bytes, "free_bytes": free_bytes}
    if as_json:
        print_json(facts | {"segments": [attrs.asdict(segment) for segment in contents.segments]})
        return
    for name, text in _described(facts):
        print_line(f"{name:<12} {text}")
    if with_segments:
        print_table(
            ("segment", "state", "batches", "blocks", "tombstones", "payload"),
            [
                (
                    *(str(segment.number), segment.state, str(segment.batches), str(segment.blocks)),
                    *(str(segment.tombstones), describe_size(segment.blocks_bytes)),
                )
                for segment in contents.segments
            ],
            numbers=("segment", "batches", "blocks", "tombstones", "payload"),
        )


@command.command("verify", short_help="Read all blocks of a disk, and check their hashes.")
@json_option
@_PATH
def verify(path: Path, as_json: bool) -> None:
    """Read every block on a disk, and compare it with its checksum.

    Nothing is changed: a server that reads a damaged block treats it as a miss, and
    forgets it. The exit code is 6 if a block is damaged or cannot be read.
    """
    with _opened(path) as (folder, runner):
        inspector = _inspector(folder)
        contents = _inspect(inspector, runner)
        verified = _verify(inspector, runner)
    damaged = [block for one in verified for block in one.damaged]
    blocks = sum(one.blocks for one in verified)
    blocks_bytes = sum(one.blocks_bytes for one in verified)
    if as_json:
        print_json(
            {
                "ok": not damaged,
                "blocks": blocks,
                "blocks_bytes": blocks_bytes,
                "damaged_batches": contents.damaged_batches,
                "unreadable_segments": contents.unreadable_segments,
                "damaged": [attrs.asdict(block) for block in damaged],
            }
        )
    else:
        _print_damaged(damaged)
        print_line(f"verified {blocks} blocks, {describe_size(blocks_bytes)}: {len(damaged)} damaged")
    if contents.damaged_batches:
        note(f"{contents.damaged_batches} batches are not whole, as after a crash; what is whole in them was verified")
    if damaged:
        live = sum(block.live for block in damaged)
        raise ChecksumMismatch(f"{len(damaged)} of {blocks} blocks are damaged, {live} of them in use")


@command.command("wipe", short_help="Remove everything from a disk.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@json_option
@_PATH
def wipe(path: Path, yes: bool, as_json: bool) -> None:
    """Remove everything that a server has stored on a disk.

    The folder stays. Blocks are not overwritten: who can read the device may still find
    them.
    """
    check_disks_work()
    from infinistore.disk_io import open_existing_folder

    folder = open_existing_folder(path, to_wipe=True)
    try:
        used_bytes = folder.used_bytes()
        question = f"Remove {describe_size(used_bytes)} from {path}?"
        demand_yes(question, yes=yes, warning=f"this removes everything on {path}")
        folder.wipe()
    finally:
        folder.close()
    if as_json:
        print_json({"wiped": str(path), "freed_bytes": used_bytes})
    else:
        print_line(f"wiped {path}: {describe_size(used_bytes)} are free again")


@contextmanager
def _opened(path: Path, *, locked: bool = True) -> "Iterator[tuple[DiskFolder, DiskRunner]]":
    check_disks_work()
    from infinistore.disk_io import ThreadRunner, open_existing_folder

    runner = ThreadRunner(writers=1)
    try:
        folder = open_existing_folder(path, locked=locked)
        runner.add(0, folder)
        yield folder, runner
    finally:
        runner.close(timeout_s=_TIMEOUT_S)


def _inspector(folder: "DiskFolder") -> "Inspector":
    from infinistore.disk.format import decode_superblocks
    from infinistore.disk.inspection import Inspector

    superblock = folder.superblock()
    if not superblock:
        raise ConfigError(f"disk {folder.path} is empty: no server has written to it yet, or it is being wiped")
    return Inspector(decode_superblocks(superblock, f"disk {folder.path}"), folder.files())


def _inspect(inspector: "Inspector", runner: "DiskRunner") -> "DiskContents":
    from infinistore.disk_io.runner import run_steps

    with progress_bar(len(inspector.numbers)) as report:
        return run_steps(inspector.inspect(lambda: report("reading tables")), runner)


def _verify(inspector: "Inspector", runner: "DiskRunner") -> "list[Verified]":
    from infinistore.disk_io.runner import run_steps

    verified = []
    with progress_bar(len(inspector.numbers)) as report:
        for number in inspector.numbers:
            report(f"reading segment {number}")
            verified.append(run_steps(inspector.verify(number), runner))
    return verified


def _facts(contents: "DiskContents") -> dict[str, Any]:
    superblock = contents.superblock
    return {
        "uuid": superblock.uuid.hex(),
        "store": superblock.store.hex(),
        "clean": bool(superblock.clean),
        "session": superblock.session,
        "membership": superblock.membership,
        "segment_bytes": superblock.segment_bytes,
        "keys": contents.keys,
        "keys_bytes": contents.keys_bytes,
        "blocks": sum(segment.blocks for segment in contents.segments),
        "blocks_bytes": sum(segment.blocks_bytes for segment in contents.segments),
        "tombstones": sum(segment.tombstones for segment in contents.segments),
        "batches": sum(segment.batches for segment in contents.segments),
        "states": {
            state: sum(segment.state == state for segment in contents.segments)
            for state in sorted({segment.state for segment in contents.segments})
        },
        "damaged_batches": contents.damaged_batches,
        "unreadable_segments": contents.unreadable_segments,
    }


def _described(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    states = ", ".join(f"{count} {state}" for state, count in facts["states"].items())
    yield "disk", f"{facts['uuid']}, of store {facts['store']}, opened {facts['session']} times"
    yield "ended", "cleanly" if facts["clean"] else "not cleanly, or in use; a server reads footers when it starts"
    if facts["in_use_by"]:
        yield "in use", f"by process {facts['in_use_by']}"
    yield "segments", f"{sum(facts['states'].values())} of {describe_size(facts['segment_bytes'])}: {states or 'none'}"
    yield "room", f"{describe_size(facts['allocated_bytes'])} allocated, {describe_size(facts['free_bytes'])} free"
    yield "keys", f"{facts['keys']}, {describe_size(facts['keys_bytes'])}"
    others = facts["blocks"] - facts["keys"]
    dead_bytes = facts["blocks_bytes"] - facts["keys_bytes"]
    yield "dead", f"{others} blocks, {describe_size(dead_bytes)}, and {facts['tombstones']} tombstones"
    if facts["damaged_batches"]:
        yield "damaged", f"{facts['damaged_batches']} batches are not whole, as after a crash"
    if facts["unreadable_segments"]:
        yield "unreadable", f"segments {', '.join(map(str, facts['unreadable_segments']))}"


def _print_damaged(damaged: "list[DamagedBlock]") -> None:
    import os

    for block in damaged[:_LISTED]:
        why = os.strerror(block.errno) if block.errno else "wrong checksum"
        use = "in use" if block.live else "dead"
        print_line(f"{visible(block.key)}: segment {block.segment}, offset {block.offset}, {use}: {why}")
    if damaged[_LISTED:]:
        print_line(f"and {len(damaged) - _LISTED} more; --json lists all of them")
