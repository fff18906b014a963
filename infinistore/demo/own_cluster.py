"""The cluster that the demonstration starts: nodes that register in an etcd of its own,
or, where etcd is not installed, nodes that a file lists.

What etcd stores, or the file, lies in a temporary folder that is removed at the end.
"""

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from infinistore.demo.display import Display
from infinistore.demo.processes import EtcdProcess, ServerProcess, start_etcd, start_server

__all__ = ["OwnCluster", "own_cluster"]


class OwnCluster:
    """Nodes that run, by their names. Make one with `own_cluster`."""

    def __init__(
        self, nursery: trio.Nursery, pool_bytes: int, folder: Path, etcd: EtcdProcess | None, display: Display
    ) -> None:
        self.nodes: dict[str, ServerProcess] = {}
        self.has_etcd = etcd is not None
        self._nursery = nursery
        self._pool_bytes = pool_bytes
        self._file = folder / "nodes.json"
        self._states: dict[str, str] = {}
        self._started = 0
        self._display = display
        address = "" if etcd is None else f"{etcd.address[0]}:{etcd.address[1]}"
        self.url = f"infinistore+file://{self._file}" if etcd is None else f"infinistore+etcd://{address}/demo"

    async def start_node(self, *, warm_up_s: float = 0.0) -> str:
        """Start another node, and return its name. Without etcd, it has joined at
        once, and is warm after `set_warm`.

        Raises `DemoError` if it does not start, and in the nursery if it ends.
        """
        self._started += 1
        name = f"node-{self._started}"
        more = ["--cluster", self.url, "--node-id", name, "--node-warm-up", str(warm_up_s)] if self.has_etcd else []
        server = await start_server(self._nursery, self._pool_bytes, title=name, more=more)
        self._nursery.start_soon(server.raise_when_ended)
        self.nodes[name] = server
        self._states[name] = "joining" if warm_up_s else "serving"
        self._write()
        self._display.node_started(name, server)
        return name

    async def kill(self, name: str) -> None:
        """Kill a node. In etcd it stays until its lease has run out."""
        await self.nodes.pop(name).kill()

    def forget(self, name: str) -> None:
        """Take a killed node out of the file, as an operator would; etcd does it."""
        del self._states[name]
        self._write()

    def set_warm(self, name: str) -> None:
        """Say in the file that a node has joined; with etcd, it says so itself."""
        self._states[name] = "serving"
        self._write()

    def _write(self) -> None:
        if self.has_etcd:
            return
        nodes = [
            {"id": name, "address": self.nodes[name].url.partition("://")[2], "state": state}
            for name, state in self._states.items()
            if name in self.nodes
        ]
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"nodes": nodes}))
        os.replace(new, self._file)


@asynccontextmanager
async def own_cluster(nodes: int, pool_bytes: int, display: Display) -> AsyncIterator[OwnCluster]:
    """Run a cluster of so many nodes, each with a pool of this size, and end it: first
    its nodes, then etcd.
    """
    program = shutil.which("etcd")
    with tempfile.TemporaryDirectory(prefix="infinistore-demo-") as folder:
        async with trio.open_nursery() as around:
            etcd = None if program is None else await start_etcd(around, program, Path(folder, "etcd"))
            display.membership(None if etcd is None else (etcd.pid, *etcd.address))
            async with trio.open_nursery() as nursery:
                cluster = OwnCluster(nursery, pool_bytes, Path(folder), etcd, display)
                for _ in range(nodes):
                    await cluster.start_node()
                yield cluster
                nursery.cancel_scope.cancel()
            around.cancel_scope.cancel()
