"""`infinistore cluster drain` and `infinistore cluster add`: takes a node out of a
cluster, and lets it serve again.
"""

import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import json_option, log_level_option, read_given_token, token_file_option
from infinistore.cli.output import note, print_json, print_line
from infinistore.errors import ConfigError, DeadlineExceeded, StoreUnavailable
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.cluster.documents import Drain
    from infinistore.cluster.etcd.operators import NodeStanding
    from infinistore.cluster.locate import ClusterUrl
    from infinistore.cluster_io.etcd import AskInstance
    from infinistore.cluster_io.operators import Operator

__all__ = ["add", "asker_of", "describe_drain", "drain"]

_BAR: Final = 20
_GONE_S: Final = 15.0
"""How long a node may not be registered while it drains: longer than its lease."""


def asker_of(cluster: "ClusterUrl", given: Mapping[str, Any]) -> "AskInstance":
    """Return what asks the nodes of a cluster who they are, with the token and the
    certificates that the URL names, or `given`.

    Raises:
        ConfigError: a file that the URL names cannot be used.
    """
    from infinistore.cluster_io.probing import credentials, instance_asker

    return instance_asker(*credentials(cluster.options, given.get("token")))


def _given(token_file: Path | None) -> dict[str, Any]:
    return {} if token_file is None else {"token": read_given_token(token_file)}


def _timeout(default_s: float, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--timeout", metavar="SECONDS", type=click.FloatRange(min=0), default=default_s, show_default=True,
        panel="Options", help=help_text,
    )  # fmt: skip


@click.command("drain", short_help="Take a node out of the cluster, and keep its hottest blocks.")
@click.argument("node")
@click.argument("url", envvar="INFINISTORE_URL")
@_timeout(600.0, "How long to wait until the node has drained; 0 only asks it to.")
@click.option("--force", is_flag=True, panel="Options", help="Also if no other node takes blocks.")
@token_file_option
@log_level_option
@json_option
def drain(node: str, url: str, *, token_file: Path | None, timeout: float, force: bool, as_json: bool) -> None:
    """Take NODE out of the cluster at URL, and wait until it is out.

    From now on, clients write elsewhere, and read from NODE what only NODE has. NODE
    passes its hottest blocks on to the nodes that own them now, as much as its
    --node-drain-size, and leaves. Its server runs on: stop it, or bring it back by
    `infinistore cluster add NODE`. It stays out when it is started again.

    \b
    infinistore cluster status URL                    NODE is an id of these
    infinistore cluster drain 10.0.0.7:22345 URL
    infinistore cluster add 10.0.0.7:22345 URL        when it is there again

    Ctrl-C ends the waiting, not the draining; so does --timeout, with exit code 4. The
    same command waits again. A node that a file lists gets the state there, if the file
    can be written; then nothing is waited for.
    """
    from infinistore.cluster.locate import EtcdPlace
    from infinistore.cluster_io.operators import Operator

    cluster = _parse(url, node)
    if isinstance(cluster.place, EtcdPlace):
        operator = Operator(cluster.place, asker_of(cluster, _given(token_file)))
        found = _drain_registered(cluster, operator, node, timeout, force=force, quiet=as_json)
        if as_json:
            print_json({"url": str(cluster), "node": node, **attrs.asdict(found)})
        elif found.done:
            print_line(f"{node} has drained and is out of the cluster: {describe_drain(found)}")
        else:
            print_line(f"{node} drains")
    else:
        _set_in_file(cluster, node, draining=True, force=force, as_json=as_json)


@click.command("add", short_help="Let a node serve again that has drained.")
@click.argument("node")
@click.argument("url", envvar="INFINISTORE_URL")
@_timeout(15.0, "How long to wait until the node serves; 0 only lets it.")
@token_file_option
@log_level_option
@json_option
def add(node: str, url: str, *, token_file: Path | None, timeout: float, as_json: bool) -> None:
    """Let NODE serve again in the cluster at URL, after `infinistore cluster drain`.

    It joins as a newcomer does: its weight grows, and until then clients find with the
    others what it lacks. One that is still draining stops that. The exit code is 1 if
    no server serves as NODE when --timeout is over; it may do so at any time.

    A new node needs no command: start a server with --cluster URL.
    """
    from infinistore.cluster.locate import EtcdPlace
    from infinistore.cluster_io.operators import Operator

    cluster = _parse(url, node)
    if not isinstance(cluster.place, EtcdPlace):
        _set_in_file(cluster, node, draining=False, force=False, as_json=as_json)
        return
    changed, standing = _add_registered(Operator(cluster.place, asker_of(cluster, _given(token_file))), node, timeout)
    state = None if standing is None or standing.state is None else standing.state.value
    weight = 0 if standing is None else standing.weight
    serves = state in ("joining", "serving")
    if as_json:
        print_json({"url": str(cluster), "node": node, "changed": changed, "state": state, "weight": weight})
    elif serves:
        print_line(f"{node} {'serves again' if changed else 'was not asked to drain: it serves'}, with weight {weight}")
    elif not timeout:
        print_line(f"{node} may serve")
    if timeout and not serves:
        why = "its server is stopping" if state else "no server is registered as this node; start it"
        raise NegativeAnswer(f"{node} may serve, but does not: {why}")


def describe_drain(drain: "Drain") -> str:
    """Tell how far a drain is."""
    moved = f"{drain.moved_groups} of {drain.groups} groups moved ({describe_size(drain.moved_bytes)})"
    there = f", {drain.skipped_groups} were there" if drain.skipped_groups else ""
    failed = f", {drain.failed_groups} could not be moved" if drain.failed_groups else ""
    if drain.done or not drain.size_bytes:
        return moved + there + failed
    done = f"; {describe_size(drain.done_bytes)} of {describe_size(drain.size_bytes)} done"
    left = "" if drain.left_s is None else f", about {_duration(drain.left_s)} left"
    return moved + there + failed + done + left


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


def _parse(url: str, node: str) -> "ClusterUrl":
    from infinistore.cluster.locate import StaticPlace, is_cluster_url, parse_cluster_url

    if is_cluster_url(node) and not is_cluster_url(url):
        raise ConfigError(f"first the node, then the URL: `infinistore cluster drain {url} {node}`")
    cluster = parse_cluster_url(url)
    if isinstance(cluster.place, StaticPlace):
        raise ConfigError(f"the nodes of {cluster} stand in the URL: change it wherever it is given")
    return cluster


def _drain_registered(
    cluster: "ClusterUrl", operator: "Operator", node: str, timeout_s: float, *, force: bool, quiet: bool
) -> "Drain":
    """Ask a node to drain, and wait until it has; return how far it is."""
    from infinistore.cluster.documents import Drain

    found = Drain()

    async def ask_and_wait() -> None:
        nonlocal found
        if not await operator.begin_drain(node, force=force) and timeout_s:
            note(f"{node} was asked to drain before; this waits for it")
        if timeout_s:
            with _progress(node, quiet=quiet) as show:
                found = await _until_out(operator, node, timeout_s, show)

    _run(ask_and_wait, f"{node} goes on; `infinistore cluster add {node} {cluster}` ends that")
    return found


async def _until_out(
    operator: "Operator", node: str, timeout_s: float, show: Callable[["Drain | None"], None]
) -> "Drain":
    """Wait until a node has drained; return what it has moved.

    Raises:
        DeadlineExceeded: it has not within the timeout.
        StoreUnavailable: it is gone.
        NegativeAnswer: it was added again.
    """
    import trio

    ends_at = trio.current_time() + timeout_s
    last: NodeStanding | None = None

    def look(standing: "NodeStanding") -> bool:
        nonlocal last
        last = standing
        if standing.drain is None or standing.drain.done:
            return True
        there = standing.state is not None
        scope.deadline = ends_at if there else min(ends_at, trio.current_time() + _GONE_S)
        show(standing.drain if there else None)
        return False

    with trio.CancelScope(deadline=ends_at) as scope:
        await operator.follow(node, look)
    if last is None:
        raise DeadlineExceeded(f"etcd has not said within {timeout_s:g} s how far {node} is, which goes on")
    if last.drain is None:
        raise NegativeAnswer(f"{node} was added again before it had drained")
    if last.drain.done:
        return last.drain
    if last.state is None:
        raise StoreUnavailable(
            f"{node} is no longer registered and has not said that it is done: its server ended, or lost etcd; it "
            "drains on if it comes back"
        )
    raise DeadlineExceeded(f"{node} has not drained within {timeout_s:g} s, and goes on: {describe_drain(last.drain)}")


def _add_registered(operator: "Operator", node: str, timeout_s: float) -> "tuple[bool, NodeStanding | None]":
    """Let a node serve, and wait until it does; return whether it was to drain, and
    what etcd says of it.
    """
    import trio

    from infinistore.cluster.membership import NodeState

    changed = False
    last: NodeStanding | None = None

    def look(standing: "NodeStanding") -> bool:
        nonlocal last
        last = standing
        return standing.state in (NodeState.JOINING, NodeState.SERVING)

    async def let_and_wait() -> None:
        nonlocal changed
        changed = await operator.end_drain(node)
        with trio.move_on_after(timeout_s):
            await operator.follow(node, look)

    _run(let_and_wait, f"{node} may serve")
    return changed, last


def _set_in_file(cluster: "ClusterUrl", node: str, *, draining: bool, force: bool, as_json: bool) -> None:
    import trio

    from infinistore.cluster.membership import NodeState
    from infinistore.cluster_io.operators import set_state_in_file

    state = NodeState.DRAINING if draining else NodeState.SERVING
    place: Any = cluster.place

    async def write() -> bool:
        return await set_state_in_file(place, node, state, force=force)

    changed = trio.run(write)
    if as_json:
        print_json({"url": str(cluster), "node": node, "changed": changed, "state": state.value})
    else:
        print_line(f"{node} {'is' if changed else 'was already'} {state.value} in {place.path}")


def _run(work: Callable[[], Awaitable[None]], after_interrupt: str) -> None:
    """Run it; after Ctrl-C, say what goes on."""
    import trio

    try:
        trio.run(work)
    except KeyboardInterrupt:
        note(after_interrupt)
        raise


@contextmanager
def _progress(node: str, *, quiet: bool) -> Iterator[Callable[["Drain | None"], None]]:
    """Show on standard error how far a drain is, None being that of a node that is not
    registered: a bar on a terminal, else a line for each tenth unless it is to be
    `quiet`.
    """
    on_terminal = sys.stderr.isatty()
    shown: tuple[bool, int] | None = None

    def show(drain: "Drain | None") -> None:
        nonlocal shown
        told = f"{node} is not registered now" if drain is None else f"{node} drains: {describe_drain(drain)}"
        if on_terminal:
            bar = "" if drain is None else f"[{'#' * int(_BAR * drain.ratio):<{_BAR}}] {drain.ratio:4.0%} "
            line = f"infinistore: {bar}{told}"[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            return
        step = drain is None, 0 if drain is None else int(10 * drain.ratio)
        if not quiet and step != shown and (drain is None or drain.groups):
            shown = step
            note(told)

    try:
        yield show
    finally:
        if on_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
