"""`infinistore monitor`: a live screen of a server's activity."""

import os
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from infinistore.cli.options import Target, client_options, json_option
from infinistore.cli.output import console, note, print_json, print_line

if TYPE_CHECKING:
    from infinistore.monitor.lines import Glyphs
    from infinistore.monitor.sampling import Source

__all__ = ["command"]

_DEADLINE_S: Final = 5.0  # less than for other commands, so that the screen stays live
_LINES_OF_A_PIPE: Final = 60


@click.command("monitor", short_help="Show a server's activity live.")
@click.argument("address", metavar="[URL]", required=False)
@click.option(
    "--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
    help="Time between two samples.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Take two samples, print one screen, and exit.")
@click.option("--ascii", "only_ascii", is_flag=True, help="Draw with plain characters.")
@json_option
@client_options
def command(
    *, address: str | None, interval: float, once: bool, only_ascii: bool, as_json: bool, target: Target
) -> None:
    """Show pool usage, throughput, latencies and clients of a server live.

    URL is the same as --url. Press q to quit and ? for the other keys. --json prints
    one object per sample, or a single one with --once. Without a terminal, --once is
    the default.
    """
    import trio

    from infinistore.monitor import app
    from infinistore.monitor.document import document

    source = _source(target, address)
    if as_json and not once:
        trio.run(app.report, source, interval, lambda snapshot: _print_now(document(snapshot)))
    elif as_json:
        print_json(document(trio.run(app.take_two, source, interval)))
    elif once or not _is_live_terminal():
        _print_screen(source, interval, _glyphs(only_ascii=only_ascii))
        if not once:
            note("standard output is no terminal that can be drawn on; this was one screen, as with --once")
    else:
        _watch(source, interval, _glyphs(only_ascii=only_ascii))


def _watch(source: "Source", interval_s: float, glyphs: "Glyphs") -> None:
    from functools import partial

    import trio

    from infinistore.monitor import app

    input_fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    run = partial(app.watch, output_fd=sys.stdout.fileno(), input_fd=input_fd, glyphs=glyphs)
    code = trio.run(run, source, interval_s)
    if code:
        raise SystemExit(code)


def _print_screen(source: "Source", interval_s: float, glyphs: "Glyphs") -> None:
    import trio

    from infinistore.monitor import app

    snapshot = trio.run(app.take_two, source, interval_s)
    screen = console()
    if screen.is_terminal:
        width, height = screen.size
        lines = app.still(snapshot, interval_s, width, max(height - 1, 24), glyphs)
    else:
        lines = app.still(snapshot, interval_s, 120, _LINES_OF_A_PIPE, glyphs)
    for line in lines:
        with screen.capture() as captured:
            screen.print(line, end="")
        print_line(captured.get().rstrip())


def _print_now(made: dict[str, Any]) -> None:
    print_json(made)
    sys.stdout.flush()


def _source(target: Target, address: str | None) -> "Source":
    from urllib.parse import parse_qs, urlsplit

    from infinistore.monitor.sampling import Source
    from infinistore.token_file import read_token

    url = address or target.url
    try:
        in_url = "deadline_s" in parse_qs(urlsplit(url).query)
    except ValueError:  # which the client will say in its own words
        in_url = False
    return Source(
        url=url,
        token=read_token(target.token_file) if target.token_file is not None else None,
        deadline_s=target.deadline_s if target.deadline_s is not None else None if in_url else _DEADLINE_S,
        wait_s=target.wait_s,
        name=f"monitor {socket.gethostname()}:{os.getpid()}",
    )


def _is_live_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _glyphs(*, only_ascii: bool) -> "Glyphs":
    from infinistore.monitor.lines import ASCII, UNICODE

    plain = only_ascii or os.environ.get("TERM") == "linux"  # whose font has no bars
    return ASCII if plain or sys.stdout.encoding.lower().replace("-", "") != "utf8" else UNICODE
