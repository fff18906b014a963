"""`infinistore cluster`: looks at the nodes of a cluster, takes one out or brings it
back, and purges all of them.
"""

import logging
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlencode

import attrs
import rich_click as click

from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import json_option, log_level_option, read_given_token, token_file_option
from infinistore.cli.output import counted, demand_yes, note, print_json, print_line, print_table
from infinistore.errors import ConfigError, DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.client import AsyncStore
    from infinistore.cluster.documents import Drain
    from infinistore.cluster.etcd.operators import NodeStanding
    from infinistore.cluster.locate import ClusterUrl
    from infinistore.cluster.membership import Node, View
    from infinistore.cluster_io.etcd import AskInstance
    from infinistore.cluster_io.operators import Operator
    from infinistore.statistics import Stats


_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_STORE_SCHEMES: Final = ("infinistore", "infinistores", "tcp", "unix", "shm", "rdma")
_SHOWN_OF_INSTANCE: Final = 8
_BAR: Final = 20
_GONE_S: Final = 15.0
"""How long a node may not be registered while it drains: longer than its lease."""


@click.group("cluster", short_help="Look at the nodes of a cluster, take one out, purge all.")
def command() -> None:
    """Look at the nodes of a cluster, take one out or bring it back, or purge all of
    them.

    \b
    URL says where to hear who they are:
        infinistore+static://a:22345,b:22345         these, for ever
        infinistore+file:///etc/infinistore/nodes.json
        infinistore+etcd://h1:2379,h2:2379/CLUSTER   those registered there

    The commands for a store take such a URL with --url: `infinistore stat` adds the
    statistics of the nodes up, and `infinistore ls` lists the keys of all of them.
    """


def _asker_of(cluster: "ClusterUrl", token: str | None) -> "AskInstance":
    """Return what asks the nodes of a cluster who they are, with the certificates and
    the token that the URL names, or with this token.

    Raises:
        ConfigError: a file that the URL names cannot be used.
    """
    from infinistore.cluster_io.probing import credentials, instance_asker

    return instance_asker(*credentials(cluster.options, token))


def _timeout(default_s: float, help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--timeout", metavar="SECONDS", type=click.FloatRange(min=0), default=default_s, show_default=True,
        panel="Options", help=help_text,
    )  # fmt: skip


@command.command("drain", short_help="Take a node out of the cluster, and keep its hottest blocks.")
@click.argument("node")
@click.argument("url", envvar="INFINISTORE_URL")
@_timeout(600.0, "How long to wait until the node has drained; 0 only asks it to.")
@click.option("--force", is_flag=True, panel="Options", help="Also if no other node takes blocks.")
@token_file_option
@log_level_option
@json_option
def drain(node: str, url: str, *, token_file: Path | None, timeout: float, force: bool, as_json: bool) -> None:
    """Take NODE out of the cluster at URL, and wait until it is out.

    Clients write elsewhere, and read from NODE what only NODE has. NODE passes its
    hottest blocks on, as much as its --node-drain-size, and leaves. It stays out, also
    when its server is started again, until `infinistore cluster add NODE`.

    \b
    infinistore cluster status URL                    NODE is an id of these
    infinistore cluster drain 10.0.0.7:22345 URL
    infinistore cluster add 10.0.0.7:22345 URL        when it is there again

    Ctrl-C and --timeout (exit code 4) end the waiting, not the draining; the same
    command waits again. For a cluster in a file, the state is written there, and
    nothing is waited for.
    """
    from infinistore.cluster.locate import EtcdPlace
    from infinistore.cluster_io.operators import Operator

    cluster = _parse_with_node(url, node)
    if isinstance(cluster.place, EtcdPlace):
        operator = Operator(cluster.place, _asker_of(cluster, read_given_token(token_file)))
        found = _drain_registered(cluster, operator, node, timeout, force=force, quiet=as_json)
        if as_json:
            print_json({"url": str(cluster), "node": node, **attrs.asdict(found)})
        elif found.done:
            print_line(f"{node} has drained and is out of the cluster: {_describe_drain(found)}")
        else:
            print_line(f"{node} drains")
    else:
        _set_in_file(cluster, node, draining=True, force=force, as_json=as_json)


@command.command("add", short_help="Let a node serve again that has drained.")
@click.argument("node")
@click.argument("url", envvar="INFINISTORE_URL")
@_timeout(15.0, "How long to wait until the node serves; 0 only lets it.")
@token_file_option
@log_level_option
@json_option
def add(node: str, url: str, *, token_file: Path | None, timeout: float, as_json: bool) -> None:
    """Let NODE serve again in the cluster at URL, after `infinistore cluster drain`.

    It joins as a newcomer does, or stops draining. The exit code is 1 if no server
    serves as NODE when --timeout is over; it may do so later.

    A new node needs no command: start a server with --cluster URL.
    """
    from infinistore.cluster.locate import EtcdPlace
    from infinistore.cluster_io.operators import Operator

    cluster = _parse_with_node(url, node)
    if not isinstance(cluster.place, EtcdPlace):
        _set_in_file(cluster, node, draining=False, force=False, as_json=as_json)
        return
    changed, standing = _add_registered(
        Operator(cluster.place, _asker_of(cluster, read_given_token(token_file))), node, timeout
    )
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


def _describe_drain(drain: "Drain") -> str:
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


def _parse_with_node(url: str, node: str) -> "ClusterUrl":
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

    async def ask_and_wait() -> Drain:
        is_new = await operator.begin_drain(node, force=force)
        if not timeout_s:
            return Drain()
        if not is_new:
            note(f"{node} was asked to drain before; this waits for it")
        with _progress(node, quiet=quiet) as show:
            return await _until_out(operator, node, timeout_s, show)

    return _run(ask_and_wait, f"{node} goes on; `infinistore cluster add {node} {cluster}` ends that")


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
    raise DeadlineExceeded(f"{node} has not drained within {timeout_s:g} s, and goes on: {_describe_drain(last.drain)}")


def _add_registered(operator: "Operator", node: str, timeout_s: float) -> "tuple[bool, NodeStanding | None]":
    """Let a node serve, and wait for it; return whether it was to drain."""
    import trio

    from infinistore.cluster.membership import NodeState

    last: NodeStanding | None = None

    def look(standing: "NodeStanding") -> bool:
        nonlocal last
        last = standing
        return standing.state in (NodeState.JOINING, NodeState.SERVING)

    async def let_and_wait() -> bool:
        changed = await operator.end_drain(node)
        with trio.move_on_after(timeout_s):
            await operator.follow(node, look)
        return changed

    return _run(let_and_wait, f"{node} may serve"), last


def _set_in_file(cluster: "ClusterUrl", node: str, *, draining: bool, force: bool, as_json: bool) -> None:
    import trio

    from infinistore.cluster.membership import NodeState
    from infinistore.cluster_io.operators import set_state_in_file

    state = NodeState.DRAINING if draining else NodeState.SERVING
    place: Any = cluster.place
    changed = trio.run(partial(set_state_in_file, place, node, state, force=force))
    if as_json:
        print_json({"url": str(cluster), "node": node, "changed": changed, "state": state.value})
    else:
        print_line(f"{node} {'is' if changed else 'was already'} {state.value} in {place.path}")


def _run(work: Callable[[], Awaitable[_T]], after_interrupt: str) -> _T:
    """Run it, and return its result; after Ctrl-C, say what goes on."""
    import trio

    try:
        return trio.run(work)
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
        told = f"{node} is not registered now" if drain is None else f"{node} drains: {_describe_drain(drain)}"
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


def _arguments(deadline_s: float) -> Callable[[_Function], _Function]:
    def add(function: _Function) -> _Function:
        deadline = click.option(
            "--deadline", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), default=deadline_s,
            show_default=True, panel="Connection", help="How long to wait for etcd, and for the nodes.",
        )  # fmt: skip
        url = click.argument("url", envvar="INFINISTORE_URL")
        return url(deadline(token_file_option(log_level_option(json_option(function)))))

    return add


@command.command("status", short_help="Show the nodes, and whether they answer.")
@_arguments(deadline_s=5.0)
def status(url: str, token_file: Path | None, deadline: float, as_json: bool) -> None:
    """Show the nodes of a cluster, and ask each of them.

    The state, the weight and the age of the view are what the membership says; memory,
    blocks and the instance are what the node itself answers. The exit code is 1 if a
    node does not answer, or if there is none.
    """
    cluster = _parse(url, "stat")
    given = _given(token_file, deadline)
    view, age_s = _look(cluster, given)
    asked = _ask_all(cluster, view.nodes, given, lambda store: store.stats())
    drains = _told_drains(asked) | _drains(cluster, view, _asker_of(cluster, given.get("token")))
    if as_json:
        print_json(
            {
                "url": str(cluster),
                "epoch": view.epoch,
                "copies": view.copies,
                "purged_revision": view.purged_revision,
                "view_age_s": age_s,
                "nodes": [_document(one) for one in asked],
                "drains": {node_id: attrs.asdict(drain) for node_id, drain in drains.items()},
            }
        )
    else:
        print_line(f"{cluster}: {counted(len(asked), 'node')}, {counted(view.copies, 'copy', 'copies')} of each block")
        print_line("the view cannot change" if _is_static(cluster) else f"the view was confirmed {age_s:.1f} s ago")
        if asked:
            _print_nodes(asked)
        for node_id, drain in drains.items():
            told = "has drained, and stays out until it is added" if drain.done else "drains"
            print_line(f"{node_id} {told}: {_describe_drain(drain)}")
    if not asked:
        raise NegativeAnswer(f"no node is in {cluster}; start a server with --cluster")
    silent = [f"{one.node.id} does not answer: {one.problem}" for one in asked if one.problem]
    if silent:
        raise NegativeAnswer("; ".join(silent))


@command.command("purge", short_help="Delete every key of all nodes.")
@click.option("--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@_arguments(deadline_s=15.0)
def purge(url: str, token_file: Path | None, deadline: float, as_json: bool, yes: bool) -> None:
    """Delete every key of a cluster.

    With etcd, the purge is written there, and each node carries it out; one that is
    away does so before it is registered again. Otherwise each node is told, and one
    that cannot be reached keeps its keys: the exit code is 3, and the error names it.
    """
    cluster = _parse(url, "purge")
    given = _given(token_file, deadline)
    question = f"Delete every key of all nodes of {cluster}?"
    demand_yes(question, yes=yes, warning="this deletes every key of all nodes")
    from infinistore.cluster.locate import EtcdPlace

    if isinstance(cluster.place, EtcdPlace):
        done, failed = _purge_registered(cluster.place, deadline, _asker_of(cluster, given.get("token")))
    else:
        view, _ = _look(cluster, given)
        asked = _ask_all(cluster, view.nodes, given, lambda store: store.purge())
        done = [one.node.id for one in asked if not one.problem]
        failed = {one.node.id: one.problem for one in asked if one.problem}
    if as_json:
        print_json({"url": str(cluster), "purged": done, "not_purged": failed})
    else:
        print_line(f"purged {counted(len(done), 'node')}" + (f": {', '.join(done)}" if done else ""))
    if failed:
        raise StoreUnavailable("; ".join(f"{node_id} is not purged: {problem}" for node_id, problem in failed.items()))


def _parse(url: str, store_command: str) -> "ClusterUrl":
    from infinistore.cluster.locate import parse_cluster_url

    if url.partition("://")[0] in _STORE_SCHEMES:
        raise ConfigError(f"{url!r} is a single store, no cluster; use `infinistore {store_command} --url {url}`")
    return parse_cluster_url(url)


def _given(token_file: Path | None, deadline_s: float) -> dict[str, Any]:
    token = read_given_token(token_file)
    return {"deadline_s": deadline_s} | ({} if token is None else {"token": token})


def _look(cluster: "ClusterUrl", given: dict[str, Any]) -> "tuple[View, float]":
    """Return the view of a cluster, and its age in seconds."""
    from infinistore.cluster_io.probing import credentials
    from infinistore.cluster_io.thread import open_membership

    # What a membership logs, the error says, too.
    logging.getLogger("infinistore.cluster").addHandler(logging.NullHandler())
    membership = open_membership(cluster, *credentials(cluster.options, given.get("token")))
    try:
        membership.wait_known(given["deadline_s"])
        return membership.view, membership.age_s
    finally:
        membership.close()


def _told_drains(asked: "Sequence[_Asked[Stats]]") -> "dict[str, Drain]":
    """Return how far nodes that drain are, as they say themselves."""
    from infinistore.cluster.documents import Drain

    return {
        one.node.id: Drain(
            done=told.state == "drained",
            groups=told.groups,
            moved_groups=told.moved_groups,
            skipped_groups=told.skipped_groups,
            failed_groups=told.failed_groups,
            moved_bytes=told.moved_bytes_total,
            size_bytes=told.size_bytes,
            done_bytes=told.done_bytes,
            elapsed_s=told.elapsed_s,
        )
        for one in asked
        if one.answer is not None and (told := one.answer.drain) is not None
    }


def _drains(cluster: "ClusterUrl", view: "View", ask_instance: "AskInstance") -> "dict[str, Drain]":
    """Return the drains that somebody asked for in etcd, by the ids of their nodes."""
    from infinistore.cluster.locate import EtcdPlace

    if not view.drains or not isinstance(cluster.place, EtcdPlace):
        return {}
    import trio

    from infinistore.cluster_io.operators import Operator

    return dict(trio.run(Operator(cluster.place, ask_instance).drains))


def _is_static(cluster: "ClusterUrl") -> bool:
    from infinistore.cluster.locate import StaticPlace

    return isinstance(cluster.place, StaticPlace)


def _purge_registered(place: Any, timeout_s: float, ask_instance: "AskInstance") -> tuple[list[str], dict[str, str]]:
    import trio

    from infinistore.cluster_io.operators import Operator

    purged = trio.run(Operator(place, ask_instance).purge, timeout_s)
    problem = f"it did not say so within {timeout_s:g} s; it purges as soon as it hears from etcd"
    return list(purged.done), dict.fromkeys(purged.waiting, problem)


@attrs.frozen
class _Asked(Generic[_T]):
    """A node, and what it answered; None if it did not, for this problem."""

    node: "Node"
    answer: _T | None
    problem: str


def _ask_all(
    cluster: "ClusterUrl", nodes: "Sequence[Node]", given: dict[str, Any], ask: "Callable[[AsyncStore], Awaitable[_T]]"
) -> list[_Asked[_T]]:
    """Ask all nodes at once, each by a store of its own."""
    import trio

    from infinistore.client import open_store

    options = f"?{urlencode(cluster.options)}" if cluster.options else ""
    asked: dict[str, _Asked[_T]] = {}

    async def ask_one(node: "Node") -> None:
        try:
            async with open_store(node.address + options, **given) as store:
                asked[node.id] = _Asked(node, await ask(store), "")
        except ConfigError:
            raise  # of an option, or of a file that it names: it concerns all nodes
        except InfiniStoreException as error:
            asked[node.id] = _Asked(node, None, str(error))

    async def ask_them() -> None:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                nursery.start_soon(ask_one, node)

    trio.run(ask_them)
    return [asked[node.id] for node in nodes]


def _instance(one: "_Asked[Stats]") -> str:
    """The server that answers, else the one that the membership knows."""
    server = one.answer.server if one.answer is not None else None
    return server.instance if server is not None else one.node.instance


def _document(one: "_Asked[Stats]") -> dict[str, Any]:
    store = None if one.answer is None else one.answer.store
    return attrs.asdict(one.node) | {
        "state": one.node.state.value,
        "instance": _instance(one),
        "answers": one.answer is not None,
        "problem": one.problem,
        "capacity_bytes": one.node.capacity_bytes if store is None else store.capacity_bytes,
        "used_bytes": None if store is None else store.used_bytes,
        "blocks": None if store is None else store.keys,
    }


def _print_nodes(asked: "Sequence[_Asked[Stats]]") -> None:
    print_table(
        ("node", "address", "state", "weight", "used", "capacity", "blocks", "instance", "answers"),
        [
            (
                *(one.node.id, one.node.address, one.node.state.value, str(one.node.weight)),
                *_memory_and_blocks(one),
                _instance(one)[:_SHOWN_OF_INSTANCE] or "-",
                "no" if one.problem else "yes",
            )
            for one in asked
        ],
        numbers=("weight", "used", "capacity", "blocks"),
    )


def _memory_and_blocks(one: "_Asked[Stats]") -> tuple[str, str, str]:
    if one.answer is None:
        return "-", describe_size(one.node.capacity_bytes) if one.node.capacity_bytes else "-", "-"
    store = one.answer.store
    return describe_size(store.used_bytes), describe_size(store.capacity_bytes), str(store.keys)
