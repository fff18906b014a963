"""The story that the demonstration tells, from the text to the table.

For each of two prompts, which begin alike, prefill finds what the store has, computes
the rest and stores it layer by layer; then decode finds it, loads it, and checks every
byte. With a disk, other prompts fill the pool, the server is restarted, and decode
loads the first prompt again. In a cluster, a node is killed: what it had is missing,
nothing else, and no call fails. Prefill computes that again, and another node joins.

This process plays the part of a router: it hands out the prompts and never touches a
byte of the cache.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import trio
from attrs import asdict, define, field

import infinistore
from infinistore.demo.display import Display
from infinistore.demo.processes import Process, Servers, own_servers
from infinistore.demo.prompts import (
    DemoError,
    DemoSettings,
    Prompt,
    block_keys,
    chunk_names,
    other_prompts,
    tokens_that_fit,
    two_prompts,
)
from infinistore.demo.workers import WAIT_S, Found, node_states
from infinistore.sizes import describe_size
from infinistore.statistics import Stats

if TYPE_CHECKING:
    from infinistore.client import AsyncStore

_WARM_UP_S: Final = 5.0


async def run_demo(settings: DemoSettings, source: str, tokens: list[int], display: Display) -> Found:
    """Run the whole story of a text, named `source`, and return what was found.
    Cancelled, it ends all its processes before it returns.

    Raises, also in a group: `DemoError`, such as for a byte that differs or a process
    that ended; and what `open_store` raises for a server at `url`.
    """
    layout, speed = settings.layout, settings.prefill_tokens_per_s
    display.print("[bold]The KV cache of a text goes from a prefill process through a server to a decode process.[/]")
    async with (
        own_servers(settings, display.say) as servers,
        infinistore.open_store(servers.url) as store,
        trio.open_nursery() as nursery,
    ):
        story = _Story(settings, display, servers, store)
        if settings.nodes:
            await story.wait_for(lambda found: list(node_states(found).values()) == ["serving"] * settings.nodes)
        statistics = await store.stats()
        # Of a cluster, what one node has room for fits even if it is alone.
        story.capacity_bytes = statistics.store.capacity_bytes // max(1, settings.nodes)
        used_tokens = tokens_that_fit(layout, len(tokens), story.capacity_bytes)
        display.plan(settings, source, len(tokens), used_tokens, story.capacity_bytes)

        async def start_worker(title: str) -> None:
            command = [sys.executable, "-P", "-m", "infinistore.demo.workers", title]
            story.workers[title] = worker = await Process(title, servers.folder).start(nursery, *command)
            await worker.ask({"url": servers.url, "layout": asdict(layout), "tokens_per_s": speed}, display.event)

        async with trio.open_nursery() as starting:  # at the same time: most of it is the import of modules
            starting.start_soon(start_worker, "prefill")
            starting.start_soon(start_worker, "decode")
        prompts = two_prompts(tokens[:used_tokens])
        served = [await story.serve(prompt) for prompt in prompts]
        restart = await story.restart(prompts) if settings.disk else None
        cluster = await story.change_nodes(prompts) if settings.nodes else None
        nursery.cancel_scope.cancel()  # ends the workers
    return {
        "ok": True,  # else there is an error
        "url": servers.url,
        "transport": statistics.transport,
        "input": source,
        "layout": {**asdict(layout), "block_bytes": layout.block_bytes},
        "simulated_prefill_tokens_per_s": speed,
        "checked_bytes": story.checked_bytes,
        "wrong_bytes": 0,
        "prompts": served,
        "restart": restart,
        "cluster": cluster,
    }


@define
class _Story:
    """The acts, and those who play them. `store` is the router's own connection."""

    settings: DemoSettings
    display: Display
    servers: Servers
    store: "AsyncStore"
    capacity_bytes: int = 0
    workers: dict[str, Process] = field(factory=dict)
    changed: dict[str, bool] = field(factory=dict)
    """Which nodes have joined, and which are out: each process follows that itself."""
    checked_bytes: int = 0
    """Bytes that were loaded, by both workers, and compared one by one."""

    async def run(self, who: str, prompt: Prompt, *, may_miss: bool = False, is_shown: bool = True) -> Found:
        """Have a worker do its part for a prompt; blocks may be missing if a node was
        lost, or joins.
        """
        order = {"prompt": prompt.name, "tokens": prompt.tokens, "may_miss": may_miss, "nodes": self.changed}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            done = await self.workers[who].ask(order, self.display.event if is_shown else lambda who, event: None)
            nursery.cancel_scope.cancel()
        self.checked_bytes += done["loaded_bytes"]
        return {name: value for name, value in done.items() if name != "event"}

    async def _watch(self) -> None:
        """Show the usage, until the server is lost, which others find out and
        report.
        """
        with suppress(infinistore.InfiniStoreException):
            while True:
                self.display.usage(await self.store.stats())
                await trio.sleep(0.1)

    async def serve(self, prompt: Prompt) -> Found:
        """Let both workers do their part for one prompt, one after the other."""
        self.display.prompt_started(prompt)
        about = {"name": prompt.name, "about": prompt.about, "tokens": len(prompt.tokens)}
        return about | {"prefill": await self.run("prefill", prompt), "decode": await self.run("decode", prompt)}

    def _keys(self, *prompts: Prompt) -> list[str]:
        """Return the keys of all blocks of these prompts, each once."""
        layout = self.settings.layout
        names = dict.fromkeys(name for one in prompts for name in chunk_names(layout, one.tokens))
        return block_keys(layout, list(names))

    async def restart(self, prompts: Sequence[Prompt]) -> Found:
        """Restart the server on its disk after `prompts` were stored.

        Raises `DemoError` if a block is missing afterwards, or a byte is wrong.
        """
        first, display, keys = prompts[0], self.display, self._keys(*prompts)
        display.act("Disk", "prefill and decode never wait for it; we do, once")
        started = trio.current_time()
        durable = await self.store.flush(keys)
        if durable < len(keys):
            raise DemoError(
                f"the disk took {durable:,} of {len(keys):,} blocks: it failed, or it is too slow. Give another "
                "folder (TMPDIR), and see whether `infinistore doctor --disk` finds something"
            )
        took_s, size = trio.current_time() - started, describe_size(durable * self.settings.layout.block_bytes)
        display.say("server", f"{durable:,} blocks, {size}, are on disk after {took_s:.2f} s")
        filled_bytes = 0
        for other in other_prompts(self.settings.layout, first.tokens, self.capacity_bytes):
            display.prompt_started(other)
            filled_bytes += (await self.run("prefill", other))["written_bytes"]
        there = await self.store.exists_many(keys := self._keys(first))
        where = f"{there.in_memory:,} are in memory, {sum(there):,} in memory or on disk"
        display.say("server", f"of {len(keys):,} blocks of prompt {first.name}, {where}")
        display.act("Restart", "the server ends, and another one starts on the same disk")
        await self.servers.restart()
        started = trio.current_time()
        found = await self.wait_for(lambda found: not found.disk or found.disk.disks[0].state != "recovering")
        recovery_s, on_disk = trio.current_time() - started, found.disk.disks[0].keys if found.disk else 0
        has = f"has {found.store.keys:,} keys in memory, and {on_disk:,} on disk"
        display.say("server", f"{has}, whose index was back after {recovery_s:.2f} s")
        display.prompt_started(first, "again, after the restart")
        decoded = await self.run("decode", first)
        return {
            "prompt": first.name,
            "durable_blocks": durable,
            "filled_bytes": filled_bytes,
            "pool_bytes": self.capacity_bytes,
            "recovery_s": recovery_s,
            **decoded,
        }

    async def change_nodes(self, prompts: Sequence[Prompt]) -> Found:
        """Lose a node and let another one join, after `prompts` were stored.

        Raises `DemoError` if a node that was not killed misses a block, or a byte is
        wrong.
        """
        self.display.act("The cluster", "each group of chunks has one owner, by the hash tag of its keys")
        keys = self._keys(*prompts)
        owned = {name: await self._keys_on(name, keys) for name in self.servers.running}
        for name, theirs in owned.items():
            self.display.say(name, f"has {len(theirs):,} blocks")
        loss, join = await self._lose(prompts[0], owned), await self._join(prompts[0], keys)
        membership = "etcd" if self.servers.etcd else "file"
        return {"nodes": len(owned), "membership": membership, "loss": loss, "join": join}

    async def _lose(self, prompt: Prompt, owned: dict[str, set[str]]) -> Found:
        say, servers, keys = self.display.say, self.servers, self._keys(prompt)
        middle = keys[len(keys) // 2]
        victim = next((name for name, theirs in owned.items() if middle in theirs), next(iter(owned)))
        self.display.act("A node is lost", f"{victim}, which has the middle of prompt {prompt.name}, is killed")
        await servers.running.pop(victim).end(kill=True)
        killed_at = trio.current_time()
        decoded = await self.run("decode", prompt, may_miss=True)
        missing = set(keys) - await _present(self.store, keys)
        if wrong := missing ^ (set(keys) & owned[victim]):
            raise DemoError(
                f"{len(wrong):,} blocks are missing that {victim} did not have, or there although it had them"
            )
        still = f"{len(keys) - len(missing):,} of {len(keys):,} blocks of prompt {prompt.name} are still hit"
        say("cluster", f"{still}; the {len(missing):,} that are missing were all on {victim}, and no call failed")
        servers.set_state(victim, "gone")
        await self.wait_for(lambda found: victim not in node_states(found))
        out_s = trio.current_time() - killed_at
        self.changed[victim] = False
        how = "its lease ran out" if servers.etcd else "the file no longer lists it"
        say("cluster", f"{victim} is out of the view after {out_s:.1f} s ({how}): the others own its part now")
        again = await self.run("prefill", prompt)
        whole = await self.run("decode", prompt)
        return {
            "node": victim,
            "blocks": len(keys),
            "missing_blocks": len(missing),
            "hit_tokens": decoded["hit_tokens"],
            "dropped_after_s": out_s,
            "computed_tokens": again["computed_tokens"],
            "hit_tokens_again": whole["hit_tokens"],
        }

    async def _join(self, prompt: Prompt, keys: Sequence[str]) -> Found:
        """Let a node join, while decode reads `prompt`; the store has `keys`."""
        display, servers = self.display, self.servers
        share = f"its share of the keys grows for {_WARM_UP_S:.0f} s" if servers.etcd else "it gets its share"
        display.act("A node joins", f"{share}, while decode reads")
        name = await servers.start_node(warm_up_s=_WARM_UP_S)
        await self.wait_for(lambda found: name in node_states(found))
        self.changed[name] = True
        hits: list[int] = []
        while not hits or "joining" in node_states(await self.store.stats()).values():
            hits.append((await self.run("decode", prompt, may_miss=True, is_shown=False))["hit_tokens"])
            if len(hits) == 2 and not servers.etcd:
                servers.set_state(name, "serving")
                await self.wait_for(lambda found: "joining" not in node_states(found).values())
        least = f"at least {min(hits):,} of {len(prompt.tokens):,} tokens were hit"
        display.say("decode", f"reads prompt {prompt.name} while the node warms up, {len(hits)} times: {least}")
        moved = len(await self._keys_on(name, keys))
        part = f"has {moved:,} of {len(keys):,} blocks ({100 * moved / len(keys):.0f} %) now"
        display.say(name, f"{part}: decode's reads copied them, and nothing was computed again")
        whole = await self.run("decode", prompt, may_miss=True)
        return {
            "node": name,
            "blocks": len(keys),
            "moved_blocks": moved,
            "reads": len(hits),
            "least_hit_tokens": min(hits),
            "hit_tokens": whole["hit_tokens"],
        }

    async def _keys_on(self, node: str, keys: Sequence[str]) -> set[str]:
        """Ask a node by itself which of the keys it has."""
        async with infinistore.open_store(self.servers.running[node].url) as store:
            return await _present(store, keys)

    async def wait_for(self, is_right: Callable[[Stats], bool]) -> Stats:
        """Wait until the statistics of the store are as wanted, and return them; raise
        `DemoError` if they are not in time.
        """
        with trio.move_on_after(WAIT_S):
            while True:
                if is_right(found := await self.store.stats()):
                    return found
                await trio.sleep(0.02)
        raise DemoError(f"the store is not as it should be after {WAIT_S:.0f} s; is this machine very busy?")


async def _present(store: "AsyncStore", keys: Sequence[str]) -> set[str]:
    there = await store.exists_many(keys)
    return {key for key, is_there in zip(keys, there, strict=True) if is_there}
