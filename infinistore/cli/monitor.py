"""`infinistore monitor`: a live screen of a server's activity."""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import rich_click as click

from infinistore.cli.options import Target, client_options, json_option, read_given_token
from infinistore.cli.output import console, note, print_json, print_line, takes_unicode

if TYPE_CHECKING:
    from rich.text import Text

    from infinistore.monitor.app import Source
    from infinistore.monitor.lines import Glyphs

_DEADLINE_S: Final = 5.0  # less than for other commands, so that the screen stays live
_LINES_OF_A_PIPE: Final = 60


@click.command("monitor", short_help="Show the activity of a server, a cluster or a router live.")
@click.argument("address", metavar="[URL]", required=False)
@click.option("--cluster", metavar="URL", help="A cluster, with a row for each node. URL may name one just as well.")
@click.option(
    "--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True,
    help="Time between two samples.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Take two samples, print one screen, and exit.")
@click.option("--ascii", "only_ascii", is_flag=True, help="Draw with plain characters.")
@click.option(
    "--manage-url", metavar="URL",
    help="Management API, such as http://127.0.0.1:18080, to show the tenants, too. It needs the token of an operator "
    "with the role monitor.",
)  # fmt: skip
@click.option(
    "--ca", metavar="FILE", type=click.Path(path_type=Path),
    help="Authorities to trust instead of the system's, for https:// URLs.",
)  # fmt: skip
@json_option
@client_options
def command(
    *,
    address: str | None,
    cluster: str | None,
    interval: float,
    once: bool,
    only_ascii: bool,
    as_json: bool,
    target: Target,
    manage_url: str | None,
    ca: Path | None,
) -> None:
    """Show pool usage, throughput, latencies and clients of a server live.

    URL is the same as --url. That of a cluster shows a row for each node; Enter opens
    the screen of the selected one. That of a router (http://127.0.0.1:8000) shows a row
    for each engine, its queue, and first tokens as predicted and as they came. Press q
    to quit and ? for the other keys. --json prints one object per sample, or a single
    one with --once. Without a terminal, --once is the default.
    """
    from infinistore.cluster.locate import is_cluster_url

    if cluster is not None and address is not None:
        raise click.UsageError(f"--cluster {cluster} and {address} are two things to watch; give one")
    source = _source(target, cluster or address)
    of_cluster = cluster is not None or is_cluster_url(source.url)
    if source.url.lower().startswith(("http://", "https://")):
        source = attrs.evolve(source, engines=_engines_of(ca, source))
    if manage_url is not None:
        if of_cluster or source.engines is not None:
            of = "cluster" if of_cluster else "router"
            raise click.UsageError(f"--manage-url is of one server; give the URL of that, not of a {of}")
        source = attrs.evolve(source, tenants=_tenants_of(manage_url, ca, source))
    watched = _Watched(source, interval, of_cluster=of_cluster)
    glyphs = _glyphs(only_ascii=only_ascii)
    if as_json and not once:
        watched.report()
    elif as_json:
        print_json(watched.document())
    elif once or not _is_live_terminal():
        _print_screen(watched, glyphs)
        if not once:
            note("standard output is no terminal that can be drawn on; this was one screen, as with --once")
    else:
        input_fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        code = watched.show(sys.stdout.fileno(), input_fd, glyphs)
        if code:
            raise SystemExit(code)


class _Watched:
    """What is watched: a store, a cluster, or a router."""

    def __init__(self, source: "Source", interval_s: float, *, of_cluster: bool) -> None:
        import trio

        self._run = trio.run
        self._app: Any
        self._view: Any
        if of_cluster:
            from infinistore.cluster.locate import parse_cluster_url
            from infinistore.monitor import cluster, cluster_view

            self._app, self._view = cluster, cluster_view
            self._given: tuple[Any, ...] = (source, parse_cluster_url(source.url), interval_s)
        else:
            from infinistore.monitor import app, router, view

            self._app, self._view = app, view if source.engines is None else router
            self._given = (source, interval_s)
        self._interval_s = interval_s
        self._of_cluster = of_cluster

    def show(self, output_fd: int, input_fd: int | None, glyphs: "Glyphs") -> int:
        run = partial(self._app.watch, output_fd=output_fd, input_fd=input_fd, glyphs=glyphs)
        code: int = self._run(run, *self._given)
        return code

    def report(self) -> None:
        self._run(self._app.report, *self._given, lambda snapshot: _print_now(self._view.document(snapshot)))

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = self._view.document(self._run(self._app.take_two, *self._given))
        return document

    def lines(self, width: int, height: int, glyphs: "Glyphs") -> "list[Text]":
        snapshot = self._run(self._app.take_two, *self._given)
        size = (width,) if self._of_cluster else (width, height)
        lines: list[Text] = self._app.still(snapshot, self._interval_s, *size, glyphs)
        return lines


def _print_screen(watched: _Watched, glyphs: "Glyphs") -> None:
    screen = console()
    size = (120, _LINES_OF_A_PIPE)
    if screen.is_terminal:
        width, height = screen.size
        size = (width, max(height - 1, 24))
    for line in watched.lines(*size, glyphs):
        with screen.capture() as captured:
            screen.print(line, end="")
        print_line(captured.get().rstrip())


def _print_now(made: dict[str, Any]) -> None:
    print_json(made)
    sys.stdout.flush()


def _source(target: Target, address: str | None) -> "Source":
    from urllib.parse import parse_qs, urlsplit

    from infinistore.monitor.app import Source

    url = address or target.url
    try:
        in_url = "deadline_s" in parse_qs(urlsplit(url).query)
    except ValueError:  # which the client will say in its own words
        in_url = False
    return Source(
        url=url,
        token=read_given_token(target.token_file),
        deadline_s=target.deadline_s if target.deadline_s is not None else None if in_url else _DEADLINE_S,
        wait_s=target.wait_s,
        name=f"monitor {socket.gethostname()}:{os.getpid()}",
    )


def _tenants_of(url: str, ca: Path | None, source: "Source") -> Callable[[], Any]:
    from infinistore.cli.managing import ask_server

    within_s = source.deadline_s or _DEADLINE_S
    return partial(ask_server, url, "/tenants", token=source.token, ca=ca, within_s=within_s)


def _engines_of(ca: Path | None, source: "Source") -> Callable[[], Any]:
    from infinistore.addresses import ROUTER_STATUS_PATH
    from infinistore.cli.managing import ROUTER, ask_server

    within_s = source.deadline_s or _DEADLINE_S
    ask = partial(ask_server, source.url, ROUTER_STATUS_PATH, service=ROUTER)
    return partial(ask, token=source.token, ca=ca, within_s=within_s)


def _is_live_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _glyphs(*, only_ascii: bool) -> "Glyphs":
    from infinistore.monitor.lines import ASCII, UNICODE

    plain = only_ascii or os.environ.get("TERM") == "linux"  # whose font has no bars
    return ASCII if plain or not takes_unicode() else UNICODE
