"""`infinistore get`: reads a value or a file."""

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import rich_click as click

from infinistore.cli.files import Manifest, open_file
from infinistore.cli.options import KEY, Target, client_options
from infinistore.cli.output import is_plain_text

__all__ = ["get"]


@click.command("get", short_help="Read a key to standard output or a file.")
@click.argument("key", type=KEY)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path),
    help="Write to FILE, replacing it after everything was read and verified. Default: standard output.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Write to a terminal even if it is not plain text.")
@client_options
def get(key: str, output: Path | None, force: bool, target: Target) -> None:
    """Read KEY from the store to standard output or a file. A missing key exits
    with 1.
    """
    with target.open() as store:
        manifest, pieces = open_file(store, key)
        if output is not None:
            _write_file(output, pieces)
        else:
            _write_output(manifest, pieces, force=force)


def _write_output(manifest: Manifest | None, pieces: Iterable[bytes | bytearray], *, force: bool) -> None:
    output = sys.stdout.buffer
    to_terminal = sys.stdout.isatty() and not force
    for piece in pieces:
        if to_terminal and (manifest is not None or not is_plain_text(piece)):
            raise click.UsageError(
                "this is not plain text and would upset the terminal; write it to a file with -o FILE, or add --force"
            )
        rest = memoryview(piece)
        while rest:  # unbuffered (PYTHONUNBUFFERED), a write may take only a part
            rest = rest[output.write(rest) :]
    output.flush()


def _write_file(path: Path, pieces: Iterable[bytes | bytearray]) -> None:
    """Write next to `path` and rename, so that readers never see a partial file."""
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        with path.open("wb") as device:
            device.writelines(pieces)
        return
    try:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
        os.chmod(beside, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
