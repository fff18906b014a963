"""`infinistore cluster`: looks at the nodes of a cluster, takes one out or brings it
back, and purges all of them.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlencode

import attrs
import rich_click as click

from infinistore.cli import draining
from infinistore.cli.failures import NegativeAnswer
from infinistore.cli.options import json_option, log_level_option, read_given_token, token_file_option
from infinistore.cli.output import demand_yes, print_json, print_line, print_table
from infinistore.errors import ConfigError, InfiniStoreException, StoreUnavailable
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.client import AsyncStore
    from infinistore.cluster.documents import Drain
    from infinistore.cluster.locate import ClusterUrl
    from infinistore.cluster.membership import Node, View
    from infinistore.cluster_io.etcd import AskInstance
    from infinistore.statistics import Stats

__all__ = ["command"]

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_STORE_SCHEMES: Final = ("infinistore", "infinistores", "tcp", "unix", "shm", "rdma")
_SHOWN_OF_INSTANCE: Final = 8


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


command.add_command(draining.drain)
command.add_command(draining.add)


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
    drains = _told_drains(asked) | _drains(cluster, view, draining.asker_of(cluster, given))
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
        print_line(f"{cluster}: {_count(len(asked), 'node')}, {_count(view.copies, 'copy', 'copies')} of each block")
        print_line("the view cannot change" if _is_static(cluster) else f"the view was confirmed {age_s:.1f} s ago")
        if asked:
            _print_nodes(asked)
        for node_id, drain in drains.items():
            told = "has drained, and stays out until it is added" if drain.done else "drains"
            print_line(f"{node_id} {told}: {draining.describe_drain(drain)}")
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
        done, failed = _purge_registered(cluster.place, deadline, draining.asker_of(cluster, given))
    else:
        view, _ = _look(cluster, given)
        asked = _ask_all(cluster, view.nodes, given, lambda store: store.purge())
        done = [one.node.id for one in asked if not one.problem]
        failed = {one.node.id: one.problem for one in asked if one.problem}
    if as_json:
        print_json({"url": str(cluster), "purged": done, "not_purged": failed})
    else:
        print_line(f"purged {_count(len(done), 'node')}" + (f": {', '.join(done)}" if done else ""))
    if failed:
        raise StoreUnavailable("; ".join(f"{node_id} is not purged: {problem}" for node_id, problem in failed.items()))


def _parse(url: str, store_command: str) -> "ClusterUrl":
    from infinistore.cluster.locate import parse_cluster_url

    if url.partition("://")[0] in _STORE_SCHEMES:
        raise ConfigError(f"{url!r} is a single store, no cluster; use `infinistore {store_command} --url {url}`")
    return parse_cluster_url(url)


def _given(token_file: Path | None, deadline_s: float) -> dict[str, Any]:
    return {"deadline_s": deadline_s} | ({} if token_file is None else {"token": read_given_token(token_file)})


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
    """Return how far nodes that drain are, as they say themselves: also where a file
    has them drain.
    """
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

    from infinistore.cluster_io.operators import purge_registered

    purged = trio.run(purge_registered, place, timeout_s, ask_instance)
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


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
