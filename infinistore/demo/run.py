"""The story that the demonstration tells, from the text to the table.

1. A server starts, unless the address of one is given; a text becomes tokens, and the
   tokens two prompts, which begin alike.
2. For each prompt, prefill finds what the store has, computes the rest and stores it
   layer by layer; then decode finds it, loads it, and checks every byte.
3. With a disk: the server makes both prompts durable, and prefill stores others until
   these have left the pool. The server is restarted on its disk, and decode loads the
   first prompt again. Its store finds the new server by itself.
4. With several nodes: the node that has the middle of the first prompt is killed. What
   it had is missing, nothing else, and no call fails. When the membership has dropped
   the node, prefill computes what is missing, and the other nodes take it. Then a node
   joins; decode's reads copy what it now owns from the nodes that had it before.

This process plays the part of a router: it hands out the prompts and never touches a
byte of the cache.
"""

import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from attrs import define

import infinistore
from infinistore.demo.display import Display, Found
from infinistore.demo.processes import OwnCluster, OwnServer, Worker, own_cluster, own_server
from infinistore.demo.prompts import (
    DemoError,
    DemoSettings,
    Prompt,
    block_keys,
    chunk_names,
    other_prompts,
    read_text,
    tokens_that_fit,
    two_prompts,
)
from infinistore.demo.workers import Finished, Job, Setup, expected_error, gigabytes_per_s
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from infinistore.client import AsyncStore
    from infinistore.statistics import NodeStatistics

_WATCH_INTERVAL_S: Final = 0.1
_RECOVERY_CHECK_S: Final = 0.02
_VIEW_CHECK_S: Final = 0.05
_VIEW_S: Final = 60.0
_WARM_UP_S: Final = 5.0


async def run_demo(settings: DemoSettings, display: Display, prepared: tuple[str, list[int]] | None = None) -> Found:
    """Run the whole story and return what was found. Cancelled, it ends all its
    processes before it returns. `prepared` is what `read_text` gave.

    Raises `DemoError`, one line for the reader, if anything went wrong: a byte that
    differs, a process that ended, a server that did not start, a text that cannot be
    read or is too short. A server at `url` that cannot be used raises what `open_store`
    raises.
    """
    source, tokens = prepared or read_text(settings)
    try:
        if settings.url is not None:
            return await _tell(settings, settings.url, source, tokens, display)
        if settings.nodes:
            async with own_cluster(settings.nodes, settings.pool_bytes, display.say) as cluster:
                return await _tell(settings, cluster.url, source, tokens, display, cluster=cluster)
        async with own_server(settings.pool_bytes, disk=settings.disk) as server:
            _introduce(server, display)
            return await _tell(settings, server.process.url, source, tokens, display, server=server)
    except BaseExceptionGroup as group:
        raise expected_error(group) or group from None


def _introduce(server: OwnServer, display: Display) -> None:
    disk = "" if server.disk is None else f", with a disk of {describe_size(server.disk.size_bytes)}"
    display.say("server", f"process {server.process.pid} listens at {server.process.url}{disk}")


async def _tell(
    settings: DemoSettings,
    url: str,
    source: str,
    tokens: list[int],
    display: Display,
    *,
    server: OwnServer | None = None,
    cluster: OwnCluster | None = None,
) -> Found:
    """Tell the story with the server or the cluster at `url`, which is our own or
    somebody else's.
    """
    layout, speed = settings.layout, settings.prefill_tokens_per_s
    async with infinistore.open_store(url) as store, trio.open_nursery() as nursery:
        if cluster is not None:
            await _wait_for_view(store, lambda nodes: [node.state for node in nodes] == ["serving"] * settings.nodes)
        statistics = await store.stats()
        # Of a cluster, what one node has room for fits even if it is alone.
        capacity_bytes = statistics.store.capacity_bytes // max(1, settings.nodes)
        used_tokens = tokens_that_fit(layout, len(tokens), capacity_bytes)
        display.plan(settings, source, len(tokens), used_tokens, capacity_bytes)
        workers: dict[str, Worker] = {}

        async def start_worker(title: str) -> None:
            command = [sys.executable, "-P", "-m", "infinistore.demo.workers", title]
            workers[title] = worker = await Worker.start(nursery, title, command)
            await worker.ask(Setup(url, layout, speed), display.event)

        async with trio.open_nursery() as starting:  # at the same time: most of it is the import of modules
            starting.start_soon(start_worker, "prefill")
            starting.start_soon(start_worker, "decode")
        story = _Story(settings, store, workers, display)
        prompts = two_prompts(tokens[:used_tokens])
        async with story.watched():
            served = [await story.serve(prompt) for prompt in prompts]
        restart = of_nodes = None
        if server is not None and server.disk is not None:
            restart = await story.restart(server, prompts, capacity_bytes)
        if cluster is not None:
            async with story.watched():
                of_nodes = await story.change_nodes(cluster, prompts)
        for worker in workers.values():
            await worker.finish()
    shape = ("model", "layers", "kv_heads", "head_dim", "element_bytes", "chunk_tokens", "block_bytes")
    return {
        "ok": True,  # else there is an error
        "url": url,
        "transport": statistics.transport,
        "input": source,
        "layout": {name: getattr(layout, name) for name in shape},
        "simulated_prefill_tokens_per_s": speed,
        "checked_bytes": story.checked_bytes,
        "wrong_bytes": 0,
        "prompts": served,
        "restart": restart,
        "cluster": of_nodes,
    }


@define
class _Story:
    """The acts, and those who play them. `store` is the router's own connection."""

    settings: DemoSettings
    store: "AsyncStore"
    workers: dict[str, Worker]
    display: Display
    checked_bytes: int = 0
    """Bytes that were loaded, by both workers, and compared one by one."""

    async def run(self, who: str, prompt: Prompt, *, may_miss: bool = False) -> Finished:
        """Have a worker do its part for a prompt."""
        job = Job(prompt.name, prompt.tokens, may_miss)
        done = await self.workers[who].ask(job, self.display.event)
        assert isinstance(done, Finished)
        self.checked_bytes += done.loaded_bytes
        return done

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Show the usage within the `async with` statement, or until the server is
        lost, which others find out and report.
        """

        async def watch() -> None:
            with suppress(infinistore.InfiniStoreException):
                while True:
                    self.display.usage(await self.store.stats())
                    await trio.sleep(_WATCH_INTERVAL_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            yield
            nursery.cancel_scope.cancel()

    async def serve(self, prompt: Prompt) -> Found:
        """Let both workers do their part for one prompt, one after the other."""
        self.display.prompt_started(prompt)
        prefill, decode = await self.run("prefill", prompt), await self.run("decode", prompt)
        speed = self.settings.prefill_tokens_per_s
        return {
            "name": prompt.name,
            "about": prompt.about,
            "tokens": prefill.tokens,
            "prefill": {
                **prefill.load_as_json(),
                "saved_s": prefill.hit_tokens / speed - prefill.load_s,
                "computed_tokens": prefill.computed_tokens,
                "simulated_compute_s": prefill.compute_s,
                "written_bytes": prefill.written_bytes,
                "write_s": prefill.write_s,
                "write_gb_per_s": gigabytes_per_s(prefill.written_bytes, prefill.write_s),
                "compute_and_write_s": prefill.compute_and_write_s,
                "storing_added_s": prefill.storing_added_s,
            },
            "decode": {**decode.load_as_json(), "saved_s": decode.hit_tokens / speed - decode.load_s},
        }

    def _keys(self, *prompts: Prompt) -> list[str]:
        """Return the keys of all blocks of these prompts, each once."""
        layout = self.settings.layout
        return list(
            dict.fromkeys(key for one in prompts for key in block_keys(layout, chunk_names(layout, one.tokens)))
        )

    # With a disk

    async def restart(self, server: OwnServer, prompts: Sequence[Prompt], capacity_bytes: int) -> Found:
        """Restart the server after `prompts` were stored in a pool of this size.

        Raises `DemoError` if a block is missing afterwards, or a byte is wrong.
        """
        first, display = prompts[0], self.display
        async with self.watched():
            durable_blocks = await self._flush(self._keys(*prompts))
            filled_bytes = 0
            for other in other_prompts(self.settings.layout, first.tokens, capacity_bytes):
                display.prompt_started(other)
                filled_bytes += (await self.run("prefill", other)).written_bytes
            keys = self._keys(first)
            found = await self.store.exists_many(keys)
            where = f"{found.in_memory:,} are in memory, {sum(found):,} in memory or on disk"
            display.say("server", f"of {len(keys):,} blocks of prompt {first.name}, {where}")
        display.act("Restart", "the server ends, and another one starts on the same disk")
        await server.restart()
        _introduce(server, display)
        recovery_s = await self._recover()
        async with self.watched():
            display.prompt_started(first, "again, after the restart")
            decoded = await self.run("decode", first)
        return {
            "prompt": first.name,
            "durable_blocks": durable_blocks,
            "filled_bytes": filled_bytes,
            "pool_bytes": capacity_bytes,
            "recovery_s": recovery_s,
            "disk_blocks": decoded.disk_blocks,
            **decoded.load_as_json(),
        }

    async def _flush(self, keys: list[str]) -> int:
        """Wait until all blocks are on disk; return how many there are."""
        self.display.act("Disk", "prefill and decode never wait for it; we do, once")
        started = time.perf_counter()
        durable = await self.store.flush(keys)
        if durable < len(keys):
            raise DemoError(
                f"the disk took {durable:,} of {len(keys):,} blocks: it failed, or it is too slow. Give another folder "
                "(TMPDIR), and see whether `infinistore doctor --disk` finds something"
            )
        seconds, size = time.perf_counter() - started, describe_size(durable * self.settings.layout.block_bytes)
        self.display.say("server", f"{durable:,} blocks, {size}, are on disk after {seconds:.2f} s")
        return durable

    async def _recover(self) -> float:
        """Wait until the new server has read the index of its disk; return how long
        that took. It serves meanwhile, but finds less.
        """
        started = time.perf_counter()
        while True:
            statistics = await self.store.stats()
            assert statistics.disk is not None
            [disk] = statistics.disk.disks
            if disk.state != "recovering":
                self.display.say("server", f"has {statistics.store.keys:,} keys in memory, and {disk.keys:,} on disk")
                return time.perf_counter() - started
            await trio.sleep(_RECOVERY_CHECK_S)

    # With several nodes

    async def change_nodes(self, cluster: OwnCluster, prompts: Sequence[Prompt]) -> Found:
        """Lose a node and let another one join, after `prompts` were stored.

        Raises `DemoError` if a node that was not killed misses a block, or a byte is
        wrong.
        """
        nodes = len(cluster.nodes)
        owners = await _owners(cluster, self._keys(*prompts))
        self.display.act("The cluster", "each group of chunks has one owner, by the hash tag of its keys")
        for name, keys in owners.items():
            self.display.say(name, f"has {len(keys):,} blocks")
        loss = await self._lose(cluster, prompts[0], owners)
        join = await self._join(cluster, prompts)
        return {"nodes": nodes, "membership": "etcd" if cluster.has_etcd else "file", "loss": loss, "join": join}

    async def _lose(self, cluster: OwnCluster, prompt: Prompt, owners: dict[str, set[str]]) -> Found:
        display, keys = self.display, self._keys(prompt)
        middle = keys[len(keys) // 2]
        victim = next((name for name, theirs in owners.items() if middle in theirs), next(iter(owners)))
        display.act("A node is lost", f"{victim}, which has the middle of prompt {prompt.name}, is killed")
        await cluster.kill(victim)
        killed_at = trio.current_time()
        display.clear()
        decoded = await self.run("decode", prompt, may_miss=True)
        found = await self.store.exists_many(keys)
        missing = {key for key, is_there in zip(keys, found, strict=True) if not is_there}
        if wrong := missing ^ (set(keys) & owners[victim]):
            raise DemoError(
                f"{len(wrong):,} blocks are missing that {victim} did not have, or there although it had them"
            )
        still = f"{len(keys) - len(missing):,} of {len(keys):,} blocks of prompt {prompt.name} are still hit"
        were_there = f"the {len(missing):,} that are missing were all on {victim}, and no call failed"
        display.say("cluster", f"{still}; {were_there}")
        cluster.set_state(victim, "gone")
        await _wait_for_view(self.store, lambda nodes: all(node.id != victim for node in nodes))
        out_s = trio.current_time() - killed_at
        how = "its lease ran out" if cluster.has_etcd else "the file no longer lists it"
        left = f"{victim} is out of the view after {out_s:.1f} s ({how})"
        display.say("cluster", f"{left}: the others own its part now")
        again = await self.run("prefill", prompt)
        whole = await self.run("decode", prompt, may_miss=again.unstored_blocks > 0)
        return {
            "node": victim,
            "blocks": len(keys),
            "missing_blocks": len(missing),
            "hit_tokens": decoded.hit_tokens,
            "dropped_after_s": out_s,
            "computed_tokens": again.computed_tokens,
            "unstored_blocks": again.unstored_blocks,
            "hit_tokens_again": whole.hit_tokens,
        }

    async def _join(self, cluster: OwnCluster, prompts: Sequence[Prompt]) -> Found:
        display, prompt, keys = self.display, prompts[0], self._keys(*prompts)
        share = f"its share of the keys grows for {_WARM_UP_S:.0f} s" if cluster.has_etcd else "it gets its share"
        display.act("A node joins", f"{share}, while decode reads")
        newcomer = await cluster.start_node(warm_up_s=_WARM_UP_S)
        name = newcomer.title
        display.say(name, f"process {newcomer.pid} listens at {newcomer.url}")
        await _wait_for_view(self.store, lambda nodes: any(node.id == name for node in nodes))
        display.is_muted = True
        read = partial(self.run, "decode", prompt, may_miss=True)
        reads: list[Finished] = []
        if cluster.has_etcd:
            while any(node.id == name and node.state == "joining" for node in await _nodes(self.store)):
                reads.append(await read())
        else:
            reads = [await read() for _ in range(2)]
            cluster.set_state(name, "serving")
            await _wait_for_view(self.store, lambda nodes: all(node.state == "serving" for node in nodes))
        display.is_muted = False
        self._tell_of_reads(prompt, reads)
        moved = len((await _owners(cluster, keys))[name])
        part = f"has {moved:,} of {len(keys):,} blocks ({100 * moved / len(keys):.0f} %) now"
        display.say(name, f"{part}: decode's reads copied them, and nothing was computed again")
        display.clear()
        return {
            "node": name,
            "blocks": len(keys),
            "moved_blocks": moved,
            "reads": len(reads),
            "least_hit_tokens": min((one.hit_tokens for one in reads), default=None),
            "hit_tokens": (await read()).hit_tokens,
        }

    def _tell_of_reads(self, prompt: Prompt, reads: Sequence[Finished]) -> None:
        if not reads:
            self.display.say("cluster", "the node was warm before decode could read anything")
            return
        times = "once" if len(reads) == 1 else f"{len(reads)} times"
        hit = f"at least {min(one.hit_tokens for one in reads):,} of {reads[0].tokens:,} tokens were hit"
        self.display.say("decode", f"read prompt {prompt.name} {times} while the node warmed up; each time {hit}")


async def _owners(cluster: OwnCluster, keys: Sequence[str]) -> dict[str, set[str]]:
    """Ask each node by itself which of the keys it has."""
    found: dict[str, set[str]] = {}
    for name, node in cluster.nodes.items():
        async with infinistore.open_store(node.url) as store:
            there = await store.exists_many(list(keys))
        found[name] = {key for key, is_there in zip(keys, there, strict=True) if is_there}
    return found


async def _nodes(store: "AsyncStore") -> "Sequence[NodeStatistics]":
    cluster = (await store.stats()).cluster
    return [] if cluster is None else cluster.nodes


async def _wait_for_view(store: "AsyncStore", is_right: "Callable[[Sequence[NodeStatistics]], bool]") -> None:
    """Wait until the nodes of the view are as wanted; raise `DemoError` if they are not
    in time.
    """
    with trio.move_on_after(_VIEW_S):
        while True:
            if is_right(await _nodes(store)):
                return
            await trio.sleep(_VIEW_CHECK_S)
    raise DemoError(f"the cluster did not become what it should be within {_VIEW_S:.0f} s; is this machine very busy?")
