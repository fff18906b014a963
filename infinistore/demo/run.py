"""The story that the demonstration tells, from the text to the table.

1. A server starts, unless the address of one is given.
2. The text becomes tokens, and the tokens two prompts: A is the text, B the text with
   one sentence put in.
3. A prefill and a decode process start and connect to the server.
4. For A, then for B: prefill finds what the store already has, computes the rest and
   stores it layer by layer; then decode finds it, loads it, and checks every byte.
5. With a disk (`RestartAct`): the server is asked to make both prompts durable
   (`flush`), and prefill stores other prompts, as many as the pool holds, which evict
   the first ones. The server ends, and another one starts at the same address, on the
   same disk. Decode asks for prompt A, loads it, and checks every byte, as it did
   before. Its store finds the new server by itself.
6. With several nodes (`ClusterActs`): the node that has the middle of prompt A is
   killed. What it had is missing, nothing else, and no call fails: decode loads the
   prefix up to the first hole. When the membership has dropped the node, prefill
   computes what is missing, and the other nodes take it. Then a node joins. While it
   warms up, decode reads what it now owns from the nodes that had it before, and copies
   it: nothing is computed again.

The nodes register in an etcd of the demonstration's own, or, where etcd is not
installed, a file lists them. What etcd stores, or the file, lies in a temporary folder
that is removed at the end.

This process plays the part of a router: it hands out the prompts and never touches a
byte of the cache.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio
from attrs import frozen

import infinistore
from infinistore.demo.display import (
    DemoResult,
    Display,
    JoinResult,
    LossResult,
    NodesResult,
    Plan,
    PromptResult,
    RestartResult,
)
from infinistore.demo.layout import KVLayout, block_keys, chunk_names
from infinistore.demo.messages import DemoError, Event, Finished, Job, Setup, expected_error
from infinistore.demo.processes import (
    EtcdProcess,
    OwnServer,
    ServerProcess,
    WorkerProcess,
    own_server,
    start_etcd,
    start_server,
    start_worker,
)
from infinistore.demo.settings import CONTEXT_TOKENS, DemoSettings
from infinistore.demo.text import (
    INSERTED_SENTENCE,
    VOCABULARY_SIZE,
    Prompt,
    insertion_place,
    sample_text_file,
    token_ids,
    two_prompts,
)
from infinistore.errors import InfiniStoreException
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.client import AsyncStore
    from infinistore.statistics import NodeStatistics


_WATCH_INTERVAL_S = 0.1


@asynccontextmanager
async def watched(store: "AsyncStore", display: Display) -> AsyncIterator[None]:
    """Show the usage within the `async with` statement, or until the server is lost,
    which others find out and report.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, store, display)
        yield
        nursery.cancel_scope.cancel()


async def _watch(store: "AsyncStore", display: Display) -> None:
    with suppress(InfiniStoreException):
        while True:
            display.usage(await store.stats())
            await trio.sleep(_WATCH_INTERVAL_S)


_RECOVERY_CHECK_S = 0.02


@frozen
class RestartAct:
    """Those who play, and who shows it. `store` is the router's own connection."""

    server: OwnServer
    store: "AsyncStore"
    layout: KVLayout
    prefill: WorkerProcess
    decode: WorkerProcess
    display: Display

    async def play(self, prompts: Sequence[Prompt], capacity_bytes: int) -> RestartResult:
        """Play it after `prompts` were stored in a pool of this size.

        Raises `DemoError` if a block is missing afterwards, or a byte is wrong.
        """
        first = prompts[0]
        async with watched(self.store, self.display):
            durable_blocks = await self._flush(prompts)
            filled_bytes = await self._fill(first.tokens, capacity_bytes)
            await self._show_what_is_left(first)
        self.display.act("Restart", "the server ends, and another one starts on the same disk")
        await self.server.restart()
        self.display.server_started(self.server)
        recovery_s = await self._recover()
        async with watched(self.store, self.display):
            self.display.prompt_started(Prompt(first.name, "again, after the restart", first.tokens))
            decoded = await self.decode.run(Job(first.name, first.tokens))
        return RestartResult(first, durable_blocks, filled_bytes, capacity_bytes, recovery_s, decoded)

    async def _flush(self, prompts: Sequence[Prompt]) -> int:
        """Wait until all blocks of the prompts are on disk; return how many there
        are.
        """
        self.display.act("Disk", "prefill and decode never wait for it; we do, once")
        keys = _keys(self.layout, prompts)
        started = time.perf_counter()
        durable = await self.store.flush(keys)
        if durable < len(keys):
            raise DemoError(
                f"the disk took {durable:,} of {len(keys):,} blocks: it failed, or it is too slow. Give another folder "
                "(TMPDIR), and see whether `infinistore doctor --disk` finds something"
            )
        self.display.flushed(durable, durable * self.layout.block_bytes, time.perf_counter() - started)
        return durable

    async def _fill(self, tokens: Sequence[int], capacity_bytes: int) -> int:
        """Store other prompts, as many as the pool holds; return their bytes."""
        filled_bytes = 0
        for number, other in enumerate(other_prompts(self.layout, tokens, capacity_bytes), 1):
            self.display.prompt_started(Prompt(f"C{number}", "others, to fill the pool", other))
            filled_bytes += (await self.prefill.run(Job(f"C{number}", other))).written_bytes
        return filled_bytes

    async def _show_what_is_left(self, prompt: Prompt) -> None:
        keys = _keys(self.layout, [prompt])
        found = await self.store.exists_many(keys)
        self.display.left(prompt.name, len(keys), found.in_memory, sum(found))

    async def _recover(self) -> float:
        """Wait until the new server has read the index of its disk; return how long
        that took. It serves meanwhile, but finds less.
        """
        started = time.perf_counter()
        while True:
            statistics = await self.store.stats()
            assert statistics.disk is not None
            if statistics.disk.disks[0].state != "recovering":
                break
            await trio.sleep(_RECOVERY_CHECK_S)
        seconds = time.perf_counter() - started
        self.display.recovered(statistics.store.keys, statistics.disk.disks[0].keys)
        return seconds


def _keys(layout: KVLayout, prompts: Sequence[Prompt]) -> list[str]:
    """Return the keys of all blocks of these prompts, each once."""
    names = (chunk_names(layout, prompt.tokens) for prompt in prompts)
    return list(dict.fromkeys(key for some in names for key in block_keys(layout, some)))


def other_prompts(layout: KVLayout, tokens: Sequence[int], capacity_bytes: int) -> Iterator[list[int]]:
    """Yield prompts that fill a pool of `capacity_bytes` together: `tokens` again and
    again, each time behind another token that no text has, so that they share no block.
    """
    chunks = -(-capacity_bytes // layout.chunk_footprint_bytes)
    most = max(1, CONTEXT_TOKENS // layout.chunk_tokens)
    first = VOCABULARY_SIZE
    while chunks > 0:
        yield [first, *islice(cycle(tokens), min(chunks, most) * layout.chunk_tokens - 1)]
        chunks -= most
        first += 1


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


_CHECK_S: Final = 0.05
_VIEW_S: Final = 60.0
WARM_UP_S: Final = 5.0


@frozen
class ClusterActs:
    """Those who play, and who shows it. `store` is the router's own connection."""

    cluster: OwnCluster
    store: "AsyncStore"
    layout: KVLayout
    prefill: WorkerProcess
    decode: WorkerProcess
    display: Display

    async def play(self, prompts: Sequence[Prompt]) -> NodesResult:
        """Play it after `prompts` were stored.

        Raises `DemoError` if a node that was not killed misses a block, or a byte is
        wrong.
        """
        first = prompts[0]
        keys = _keys(self.layout, [first])
        all_keys = _keys(self.layout, prompts)
        nodes = len(self.cluster.nodes)
        owners = await self._owners(all_keys)
        self.display.spread(owners)
        async with watched(self.store, self.display):
            loss = await self._lose(first, keys, owners)
            join = await self._join(first, all_keys)
        return NodesResult(nodes, "etcd" if self.cluster.has_etcd else "file", loss, join)

    async def _lose(self, prompt: Prompt, keys: list[str], owners: dict[str, set[str]]) -> LossResult:
        middle = keys[len(keys) // 2]
        victim = next((name for name, theirs in owners.items() if middle in theirs), next(iter(owners)))
        self.display.act("A node is lost", f"{victim}, which has the middle of prompt {prompt.name}, is killed")
        await self.cluster.kill(victim)
        killed_at = trio.current_time()
        self.display.clear()
        decoded = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))
        found = await self.store.exists_many(keys)
        missing = {key for key, is_there in zip(keys, found, strict=True) if not is_there}
        if missing != set(keys) & owners[victim]:
            wrong = len(missing ^ (set(keys) & owners[victim]))
            raise DemoError(f"{wrong:,} blocks are missing that {victim} did not have, or there although it had them")
        self.display.lost(prompt.name, victim, len(keys), len(missing))
        if not self.cluster.has_etcd:
            self.cluster.forget(victim)
        await wait_for_view(self.store, lambda nodes: all(node.id != victim for node in nodes))
        out_s = trio.current_time() - killed_at
        self.display.dropped(victim, out_s, by_lease=self.cluster.has_etcd)
        again = await self.prefill.run(Job(prompt.name, prompt.tokens))
        whole = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=again.unstored_blocks > 0))
        return LossResult(victim, len(keys), len(missing), out_s, decoded, again, whole)

    async def _join(self, prompt: Prompt, keys: list[str]) -> JoinResult:
        share = f"its share of the keys grows for {WARM_UP_S:.0f} s" if self.cluster.has_etcd else "it gets its share"
        self.display.act("A node joins", f"{share}, while decode reads")
        newcomer = await self.cluster.start_node(warm_up_s=WARM_UP_S)
        await wait_for_view(self.store, lambda nodes: any(node.id == newcomer for node in nodes))
        reads: list[Finished] = []
        if not self.cluster.has_etcd:
            reads.append(await self._read_quietly(prompt))
            reads.append(await self._read_quietly(prompt))
        while await _state_of(self.store, newcomer) == "joining" and self.cluster.has_etcd:
            reads.append(await self._read_quietly(prompt))
        if not self.cluster.has_etcd:
            self.cluster.set_warm(newcomer)
            await wait_for_view(self.store, lambda nodes: all(node.state == "serving" for node in nodes))
        self.display.warmed(prompt.name, reads)
        owners = await self._owners(keys)
        moved = len(owners[newcomer])
        self.display.moved(newcomer, moved, len(keys))
        self.display.clear()
        decoded = await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))
        return JoinResult(newcomer, len(keys), moved, reads, decoded)

    async def _read_quietly(self, prompt: Prompt) -> Finished:
        with self.display.muted():
            return await self.decode.run(Job(prompt.name, prompt.tokens, may_miss=True))

    async def _owners(self, keys: Sequence[str]) -> dict[str, set[str]]:
        """Ask each node by itself which of the keys it has."""
        found: dict[str, set[str]] = {}
        for name, server in self.cluster.nodes.items():
            async with infinistore.open_store(server.url) as store:
                there = await store.exists_many(list(keys))
            found[name] = {key for key, is_there in zip(keys, there, strict=True) if is_there}
        return found


async def wait_for_view(store: "AsyncStore", is_right: "Callable[[Sequence[NodeStatistics]], bool]") -> None:
    """Wait until the nodes of the view are as wanted.

    Raises `DemoError` if they are not in time.
    """
    with trio.move_on_after(_VIEW_S):
        while True:
            if is_right(await _nodes(store)):
                return
            await trio.sleep(_CHECK_S)
    raise DemoError(f"the cluster did not become what it should be within {_VIEW_S:.0f} s; is this machine very busy?")


async def _nodes(store: "AsyncStore") -> "Sequence[NodeStatistics]":
    cluster = (await store.stats()).cluster
    return [] if cluster is None else cluster.nodes


async def _state_of(store: "AsyncStore", name: str) -> str:
    return next((node.state for node in await _nodes(store) if node.id == name), "")


_MAX_TEXT_BYTES = 1 << 20  # more than CONTEXT_TOKENS, for any text that people write
_USABLE_PART_OF_POOL = 0.75  # below what a server evicts at, so that nothing is lost between prefill and decode


def prepare_text(settings: DemoSettings) -> tuple[str, str]:
    """Return the name and the text of the file to use.

    Raises `DemoError` if it cannot be read, or is too short, or if the pool of a server
    that is to be started is too small for it.
    """
    source, text = _read_text(settings.input_file)
    if settings.url is None:
        tokens_that_fit(settings.layout, len(token_ids(text)), settings.pool_bytes)
    return source, text


async def run_demo(settings: DemoSettings, display: Display, prepared: tuple[str, str] | None = None) -> DemoResult:
    """Run the whole story and return what was found. Cancelled, it ends all its
    processes before it returns. `prepared` is what `prepare_text` gave.

    Raises `DemoError`, one line for the reader, if anything went wrong: a byte that
    differs, a process that ended, a server that did not start, a text that cannot be
    read or is too short. A server at `url` that cannot be used raises what `open_store`
    raises.
    """
    source, text = prepared or prepare_text(settings)
    try:
        if settings.url is not None:
            return await _tell(settings, settings.url, source, text, display)
        if settings.nodes:
            async with own_cluster(settings.nodes, settings.pool_bytes, display) as cluster:
                return await _tell(settings, cluster.url, source, text, display, cluster=cluster)
        async with own_server(settings.pool_bytes, disk=settings.disk) as server:
            display.server_started(server)
            return await _tell(settings, server.url, source, text, display, server=server)
    except BaseExceptionGroup as group:
        raise expected_error(group) or group from None


async def _tell(
    settings: DemoSettings,
    url: str,
    source: str,
    text: str,
    display: Display,
    *,
    server: OwnServer | None = None,
    cluster: OwnCluster | None = None,
) -> DemoResult:
    """Tell the story with the server or the cluster at `url`, which is our own or
    somebody else's.
    """
    layout, speed, tokens = settings.layout, settings.prefill_tokens_per_s, token_ids(text)
    async with infinistore.open_store(url) as store, trio.open_nursery() as nursery:
        if cluster is not None:
            await wait_for_view(store, lambda nodes: [node.state for node in nodes] == ["serving"] * settings.nodes)
        statistics = await store.stats()
        # Of a cluster, what one node has room for fits even if it is alone.
        capacity_bytes = statistics.store.capacity_bytes // max(1, settings.nodes)
        used_tokens = tokens_that_fit(layout, len(tokens), capacity_bytes)
        display.plan(Plan(source, len(tokens), used_tokens, layout, speed, capacity_bytes))
        prefill, decode = await _start_workers(nursery, Setup(url, layout, speed), display.event)
        prompts = two_prompts(tokens[:used_tokens])
        async with watched(store, display):
            results = [await _serve(prompt, prefill, decode, display) for prompt in prompts]
        restarted = None
        if server is not None and server.disk is not None:
            act = RestartAct(server, store, layout, prefill, decode, display)
            restarted = await act.play(prompts, capacity_bytes)
        of_nodes = None
        if cluster is not None:
            of_nodes = await ClusterActs(cluster, store, layout, prefill, decode, display).play(prompts)
        await prefill.finish()
        await decode.finish()
    return DemoResult(url, statistics.transport, source, layout, speed, results, restarted, of_nodes)


async def _serve(prompt: Prompt, prefill: WorkerProcess, decode: WorkerProcess, display: Display) -> PromptResult:
    """Let both workers do their part for one prompt, one after the other."""
    display.prompt_started(prompt)
    job = Job(prompt.name, prompt.tokens)
    prefilled = await prefill.run(job)
    return PromptResult(prompt, prefilled, await decode.run(job))


async def _start_workers(
    nursery: trio.Nursery, setup: Setup, on_event: Callable[[str, Event], None]
) -> tuple[WorkerProcess, WorkerProcess]:
    """Start both workers at the same time: most of it is the import of Python
    modules.
    """
    started: dict[str, WorkerProcess] = {}

    async def start(title: str) -> None:
        started[title] = await start_worker(nursery, title, setup, on_event)

    async with trio.open_nursery() as starting:
        for title in ("prefill", "decode"):
            starting.start_soon(start, title)
    return started["prefill"], started["decode"]


def tokens_that_fit(layout: KVLayout, tokens: int, capacity_bytes: int) -> int:
    """Return how many of `tokens` can be used, so that both prompts fit into a pool of
    `capacity_bytes` at once.

    Raises `DemoError` if that is less than one chunk.
    """
    if layout.whole_chunks(tokens) < 1:
        raise DemoError(
            f"the text has {tokens:,} tokens, and a chunk takes {layout.chunk_tokens:,}: "
            "take a longer text (--input) or shorter chunks (--chunk-tokens)"
        )
    room_chunks = int(capacity_bytes * _USABLE_PART_OF_POOL) // layout.chunk_footprint_bytes
    chunks = layout.whole_chunks(min(tokens, CONTEXT_TOKENS))
    if chunks + _chunks_of_b_alone(layout, min(tokens, CONTEXT_TOKENS)) <= room_chunks:
        return min(tokens, CONTEXT_TOKENS)
    while chunks and chunks + _chunks_of_b_alone(layout, chunks * layout.chunk_tokens) > room_chunks:
        chunks -= 1
    if not chunks:
        raise DemoError(
            f"the pool of {describe_size(capacity_bytes)} is too small: one chunk of the cache has "
            f"{describe_size(layout.chunk_bytes)}. Give the server more memory (--pool-size), or use "
            "shorter chunks (--chunk-tokens)"
        )
    return chunks * layout.chunk_tokens


def _chunks_of_b_alone(layout: KVLayout, tokens: int) -> int:
    """Return how many chunks prompt B has that prompt A, of `tokens` tokens,
    has not.
    """
    tokens_of_b = tokens + len(token_ids(INSERTED_SENTENCE))
    return layout.whole_chunks(tokens_of_b) - layout.whole_chunks(insertion_place(tokens))


def _read_text(file: Path | None) -> tuple[str, str]:
    """Return the name and the text of `file`, or of the text that the package ships; of
    a long one the first MiB.
    """
    source = sample_text_file() if file is None else file
    try:
        with source.open("rb") as stream:
            data = stream.read(_MAX_TEXT_BYTES)
    except OSError as error:
        raise DemoError(f"cannot read {file}: {error.strerror or error}") from None
    return source.name, data.decode(errors="replace")
