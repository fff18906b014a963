"""`infinistore ls`: lists keys, page by page."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import note, print_json, print_line, visible
from infinistore.cli.silent import silent_nodes

if TYPE_CHECKING:
    from infinistore.blocking import BlockingStore

__all__ = ["ls"]

_PAGE_KEYS: Final = 1000


@click.command("ls", short_help="List keys, all or by prefix.")
@click.argument("prefix", default="")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Stop after this many keys. Default: list all.")
@click.option("--after", metavar="KEY", default="", help="Start after this key, to continue an earlier listing.")
@json_option
@client_options
def ls(prefix: str, limit: int | None, after: str, as_json: bool, target: Target) -> None:
    """List the keys that begin with PREFIX, one per line, in code point order.

    Keys are fetched page by page: keys that are added or deleted during the listing may
    or may not appear. Of a cluster, all nodes are asked; what those may have that
    do not answer is not listed, and a note says so.
    """
    with target.open() as store:
        # One key more than asked for tells whether there are more.
        pages = _pages(store, prefix, after, None if limit is None else limit + 1)
        if as_json:
            keys = [key for page in pages for key in page]
            more = limit is not None and len(keys) > limit
            shown = keys[:limit]
            print_json({"keys": shown, "next_after": shown[-1] if more else None})
            _note_silent(store)
            return
        last, left = "", limit
        for page in pages:
            for key in page[:left]:
                print_line(visible(key) if sys.stdout.isatty() else key)
                last = key
            if left is not None and len(page) > left:
                note(f"there are more; go on with --after {last!r}")
                break
            left = None if left is None else left - len(page)
        _note_silent(store)


def _note_silent(store: "BlockingStore") -> None:
    """Tell whose keys of a cluster are not listed, because nobody answered."""
    if silent := silent_nodes(store):
        note(f"what {silent} may have is not listed: no answer; see `infinistore cluster status`")


def _pages(store: "BlockingStore", prefix: str, after: str, limit: int | None) -> Iterator[list[str]]:
    while limit is None or limit > 0:
        asked = _PAGE_KEYS if limit is None else min(limit, _PAGE_KEYS)
        page: list[str] = store.keys(prefix, limit=asked, after=after)
        yield page
        if len(page) < asked:
            return
        after = page[-1]
        limit = None if limit is None else limit - len(page)
