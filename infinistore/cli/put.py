"""`infinistore put`: stores a file or standard input."""

import sys
from contextlib import nullcontext
from typing import Any, BinaryIO

import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.files import DEFAULT_BLOCK_BYTES, put_file
from infinistore.cli.options import KEY, SIZE, Target, client_options, json_option
from infinistore.cli.output import print_json, print_line, visible
from infinistore.sizes import describe_size, format_size

__all__ = ["put"]


@click.command("put", short_help="Store a file or standard input under a key.")
@click.argument("key", type=KEY)
@click.argument("file", default="-")
@click.option(
    "--block-size", type=SIZE, metavar="SIZE", default=DEFAULT_BLOCK_BYTES,
    help=f"Files larger than this are split into blocks of this size. Default: {format_size(DEFAULT_BLOCK_BYTES)}.",
)  # fmt: skip
@click.option(
    "--ttl", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Let the key end after so many seconds, as if it were deleted.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="If the key exists, keep it and exit with 1.")
@json_option
@client_options
def put(
    *, key: str, file: str, block_size: int, ttl: float | None, keep: bool, as_json: bool, target: Target
) -> None:
    """Store FILE under KEY; without FILE, or with -, store standard input.

    A file larger than --block-size becomes the keys KEY#0, KEY#1, ... and a manifest
    under KEY. `get` reassembles it.
    """
    if file == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed; name a file")
    opened: Any = nullcontext(sys.stdin.buffer) if file == "-" else open(file, "rb")  # noqa: SIM115 - entered below
    source: BinaryIO
    with opened as source, target.open() as store:
        stored = put_file(store, key, source, block_size, replace=not keep, ttl_s=ttl)
    if as_json:
        print_json({"key": key, "stored": stored.stored, "size_bytes": stored.size_bytes, "blocks": stored.blocks})
    if not stored.stored:
        raise NegativeAnswer(f"{key!r} is there already and was kept")
    if not as_json:
        blocks = f" in {stored.blocks} blocks" if stored.blocks else ""
        print_line(f"stored {visible(key)}: {describe_size(stored.size_bytes)}{blocks}")
