"""`infinistore doctor`: checks this machine, and the transports to a server."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import Target, json_option
from infinistore.cli.output import console, print_json, print_line, print_rendered, print_table, progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infinistore.cli.measure import MeasuredPath
    from infinistore.doctor import Finding, Host

_STYLES: Final = {"good": "green", "warning": "yellow", "bad": "bold red"}
_RDMA: Final = "RDMA"
_TO: Final = "A server"


@click.command("doctor", short_help="Check this machine, and suggest remedies.")
@click.option(
    "--to", metavar="HOST:PORT", panel=_TO,
    help="Also measure bandwidth and latency to this server over each transport. May be a URL.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0.01, 60), metavar="S", default=0.5, show_default=True, panel=_TO,
    help="Time per figure; there are four per transport.",
)  # fmt: skip
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", envvar="INFINISTORE_TOKEN_FILE", panel=_TO,
    help="File whose first line is the server's token.",
)  # fmt: skip
@click.option(
    "--deadline", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", default=5.0, show_default=True,
    panel=_TO, help="Longest time for one call.",
)  # fmt: skip
@click.option(
    "--disk", "disks", multiple=True, type=click.Path(path_type=Path), metavar="PATH",
    help="Also check a folder for the SSD tier. May be given several times.",
)  # fmt: skip
@click.option("--dev-name", metavar="DEVICE", envvar="INFINISTORE_DEV_NAME", panel=_RDMA, help="As for a server.")
@click.option(
    "--ib-port", type=click.IntRange(1, 255), metavar="N", default=1, show_default=True,
    envvar="INFINISTORE_IB_PORT", panel=_RDMA, help="As for a server.",
)  # fmt: skip
@click.option(
    "--link-type", type=click.Choice(["IB", "Ethernet"], case_sensitive=False), envvar="INFINISTORE_LINK_TYPE",
    panel=_RDMA, help="As for a server.",
)  # fmt: skip
@click.option(
    "--hint-gid-index", type=click.IntRange(-1, 255), metavar="INDEX", default=-1, show_default=True,
    envvar="INFINISTORE_HINT_GID_INDEX", panel=_RDMA, help="As for a server.",
)  # fmt: skip
@click.option(
    "--rdma-loopback", is_flag=True, panel=_RDMA,
    help="Also move bytes with the chosen port, from this machine to itself.",
)  # fmt: skip
@json_option
def command(
    *,
    to: str | None,
    seconds: float,
    token_file: Path | None,
    deadline: float,
    disks: tuple[Path, ...],
    rdma_loopback: bool,
    as_json: bool,
    **rdma: Any,
) -> None:
    """Check RDMA, memory, limits, kernel and packages of this machine.

    Each line that is not good has a remedy. The exit code is 1 if a line is bad. With
    --disk, a small file is written and removed. With --to, a few blocks are written,
    read and deleted; only lookups are measured if that could evict others. With
    --rdma-loopback, 16 MiB of memory are registered with the device and moved. Nothing
    else is changed.
    """
    from infinistore.addresses import DEFAULT_SERVICE_PORT, default_socket_path
    from infinistore.doctor import Level, Wanted, examine, this_host, this_software, worst

    target = None
    if to is not None:
        target = Target(to if "://" in to else f"infinistore://{to}", token_file, deadline, wait_s=0)
        target.check()
    host = this_host(default_socket_path(DEFAULT_SERVICE_PORT).parent)
    wanted = Wanted(**rdma)
    findings = [*examine(host, this_software(), wanted), *_examine_disks(host, disks)]
    loopback = None
    if rdma_loopback:
        import trio

        from infinistore.doctor.loopback import examine_loopback, tools_of

        of_loopback, loopback = trio.run(
            partial(examine_loopback, tools_of(host, wanted), seconds=seconds, limit_s=deadline)
        )
        findings += of_loopback
    if not as_json:
        _print_findings(findings)
    paths: list[MeasuredPath] = []
    if target is not None:
        paths = _measure(target, seconds)
        findings += [path.finding for path in paths]
        if not as_json:
            _print_paths(paths)
    if as_json:
        ok = worst(findings) is not Level.BAD
        measured = [attrs.asdict(path, filter=attrs.filters.exclude("finding")) for path in paths]
        document = {"ok": ok, "findings": [_as_json(finding) for finding in findings], "to": to, "paths": measured}
        print_json(document | {"loopback": None if loopback is None else attrs.asdict(loopback)})
    if worst(findings) is Level.BAD:
        raise NegativeAnswer


def _examine_disks(host: "Host", disks: tuple[Path, ...]) -> "Iterator[Finding]":
    if not disks:
        return
    from infinistore.doctor import examine_disk
    from infinistore.doctor.findings import bad

    if sys.platform != "linux":
        yield bad("disk", "kernel", f"{sys.platform}: disks need Linux", "leave --disk out")
        return
    try:
        from infinistore.disk_io.direct_io import direct_io_works
    except ImportError:
        yield bad("disk", "numpy", "is not installed here, and disks need it", "pip install numpy")
        return
    for path in disks:
        yield from examine_disk(host, path.absolute(), direct_io_works)


def _measure(target: Target, seconds: float) -> "list[MeasuredPath]":
    from infinistore.cli.measure import measure_paths, steps_of_paths

    with progress_bar(steps_of_paths(target)) as report:
        return measure_paths(target, seconds, report)


def _print_findings(findings: "Sequence[Finding]") -> None:
    """Print a table on a terminal, elsewhere one line per finding, for grep."""
    if not console().is_terminal:
        for finding in findings:
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            print_line(f"{finding.level.value:<8} {finding.topic:<8} {finding.subject}: {finding.text}{remedy}")
            for line in finding.details:
                print_line(f"{'':<17} {line}")
        return
    from rich.table import Table
    from rich.text import Text

    for topic in dict.fromkeys(finding.topic for finding in findings):
        table = Table(
            title=topic, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False
        )
        table.add_column(min_width=max(map(len, _STYLES)))
        table.add_column(min_width=max(len(finding.subject) for finding in findings))
        for finding in findings:
            if finding.topic == topic:
                level = finding.level.value
                text = Text(finding.text)
                if finding.remedy:
                    text.append(f"\n\N{RIGHTWARDS ARROW} {finding.remedy}", style=_STYLES[level])
                for line in finding.details:
                    text.append(f"\n{line}", style="dim")
                table.add_row(Text(level, style=_STYLES[level]), finding.subject, text)
        print_rendered(table)
        print_line("")


def _print_paths(paths: "Sequence[MeasuredPath]") -> None:
    rows = [
        (
            path.path,
            "-" if path.put_bytes_per_s is None else f"{path.put_bytes_per_s / 1e9:.2f}",
            "-" if path.get_bytes_per_s is None else f"{path.get_bytes_per_s / 1e9:.2f}",
            *("-" if us is None else f"{us:.0f}" for us in (path.lookup_p50_us, path.lookup_p99_us, path.get_p50_us)),
            f"{path.transport} ({path.reason})" if path.reason else path.transport,
        )
        for path in paths
        if path.transport
    ]
    numbers = ("put GB/s", "get GB/s", "lookup p50 us", "p99 us", "4 KiB get p50 us")
    if rows:
        print_table(("path", *numbers, "by"), rows, numbers=numbers)
    # That a path works is what its line of figures says.
    _print_findings([path.finding for path in paths if path.finding.level.value != "good" or not path.transport])


def _as_json(finding: "Finding") -> dict[str, Any]:
    return attrs.asdict(finding) | {"level": finding.level.value}
