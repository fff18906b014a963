"""Has the nodes of a cluster drain, serve again or purge: those that register in etcd,
and, to drain, those in a file.
"""

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import trio

from infinistore.cluster.documents import Drain, WrongDocument, read_file
from infinistore.cluster.etcd.gateway import EtcdMisbehaved, EtcdRefused
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.operators import (
    NodeStanding,
    Purged,
    begin_drain,
    end_drain,
    follow_node,
    purge_cluster,
    read_drains,
)
from infinistore.cluster.etcd.session import EtcdUnavailable, Flow
from infinistore.cluster.locate import EtcdPlace, FilePlace
from infinistore.cluster.membership import NodeState
from infinistore.cluster_io.etcd import AskInstance, EtcdConnections, FlowRunner
from infinistore.cluster_io.memberships import make_session
from infinistore.errors import ConfigError, StoreUnavailable

_T = TypeVar("_T")


class Operator:
    """Changes a cluster in etcd from outside. All its methods raise ConfigError for
    what cannot be, and StoreUnavailable if etcd does not answer or refuses.
    `ask_instance` asks a node who it is.
    """

    def __init__(self, place: EtcdPlace, ask_instance: AskInstance) -> None:
        """Raises ConfigError if a file that `place` names cannot be used."""
        self._runner = FlowRunner(EtcdConnections(place), ask_instance=ask_instance)
        self._layout = Layout(place.cluster)
        self._session = make_session(place, Random())

    async def begin_drain(self, node_id: str, *, force: bool) -> bool:
        """Ask a node to drain. Returns whether nobody had asked for it before."""
        return await self._run(begin_drain(self._session, self._layout, node_id, force=force))

    async def end_drain(self, node_id: str) -> bool:
        """Let a node serve again. Returns whether it was asked to drain before."""
        return await self._run(end_drain(self._session, self._layout, node_id))

    async def drains(self) -> Mapping[str, Drain]:
        """Return the drains that were asked for, by the ids of their nodes."""
        return await self._run(read_drains(self._session, self._layout))

    async def follow(self, node_id: str, until: Callable[[NodeStanding], bool]) -> None:
        """Follow what etcd says of a node until `until` is true, or wait for etcd."""
        await self._run(follow_node(self._session, self._layout, node_id, until=until))

    async def purge(self, timeout_s: float) -> Purged:
        """Have the nodes purge by way of etcd, and wait for them up to `timeout_s`."""
        flow = purge_cluster(self._session, self._layout, secrets.token_hex(16), trio.current_time, timeout_s)
        return await self._run(flow, "the cluster may not be purged; etcd")

    async def _run(self, flow: Flow[_T], problem: str = "etcd") -> _T:
        try:
            return await self._runner.run(flow)
        except (EtcdUnavailable, EtcdMisbehaved, EtcdRefused) as error:
            raise StoreUnavailable(f"{problem}: {error}") from None


async def set_state_in_file(place: FilePlace, node_id: str, state: NodeState, *, force: bool) -> bool:
    """Write the state of a node to the file that lists it, which is replaced as a
    whole. Returns whether that changed it.

    Raises:
        ConfigError: the file cannot be read or written, or does not list the node; or
            nobody else would take blocks, without `force`.
    """
    return await trio.to_thread.run_sync(_set_state, place.path, node_id, state, force)


def _set_state(path: Path, node_id: str, state: NodeState, force: bool) -> bool:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        nodes = {node.id: node for node in read_file(text, 0).nodes}
    except WrongDocument as error:
        raise ConfigError(f"{path} {error}") from None
    if node_id not in nodes:
        raise ConfigError(f"{path} has no node {node_id!r}; it has {', '.join(list(nodes)[:20]) or 'none'}")
    if (nodes[node_id].state is NodeState.DRAINING) is (state is NodeState.DRAINING):
        return False
    others = [node for node in nodes.values() if node.id != node_id and node.state is not NodeState.DRAINING]
    if state is NodeState.DRAINING and not any(node.weight for node in others) and not force:
        raise ConfigError(
            f"{node_id} is the last node of {path} that takes blocks: without it every put fails, and what it has is "
            "lost; add --force if you mean it"
        )
    document: dict[str, Any] = json.loads(text)
    for node in document["nodes"]:
        if node["id"] == node_id:
            node["state"] = state.value
    try:
        _replace(path.resolve(), json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be written: {error.strerror}; write "state": "{state.value}" for {node_id} where the file '
            "comes from"
        ) from None
    return True


def _replace(path: Path, text: str) -> None:
    """Replace a file as a whole, with the same permissions."""
    mode = path.stat().st_mode & 0o777
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
