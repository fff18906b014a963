"""The output of the demonstration: messages while it runs, and what it found, as a
table and for `--json`.

Messages are printed as things happen. Below them, a terminal shows progress bars, layer
by layer, which disappear at the end. Without a terminal there are only the messages and
the table, so that a log stays readable.

Rates are in GB/s of payload (10**9 bytes a second), over the time spent in calls to the
store. The compute is simulated: the time "saved" is the time that the model would have
taken at the speed that was set, less the time that loading took, and is worth as much
as that speed is true.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from infinistore.demo.layout import KVLayout
from infinistore.demo.messages import Event, Finished, LayerDone, Matched, Ready, Work
from infinistore.demo.settings import CONTEXT_TOKENS
from infinistore.demo.text import Prompt
from infinistore.sizes import describe_size
from infinistore.statistics import Stats

if TYPE_CHECKING:
    from types import TracebackType

    from infinistore.demo.processes import OwnServer, ServerProcess


def gigabytes_per_s(payload_bytes: int, seconds: float) -> float | None:
    """Return the rate, or None where nothing was moved."""
    return payload_bytes / seconds / 1e9 if payload_bytes and seconds > 0 else None


@frozen
class PromptResult:
    """What became of one prompt. Every byte that was loaded was compared and was right,
    or there would be no result.
    """

    prompt: Prompt
    prefill: Finished
    decode: Finished


@frozen
class RestartResult:
    """What was found after the server was restarted on its disk."""

    prompt: Prompt
    durable_blocks: int
    """Blocks of all prompts that were on disk before."""
    filled_bytes: int
    """Blocks of other prompts that were stored afterwards."""
    capacity_bytes: int
    """The pool."""
    recovery_s: float
    """Until the index of the disk was back."""
    decode: Finished

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data; keys end in their units."""
        return {
            "prompt": self.prompt.name,
            "durable_blocks": self.durable_blocks,
            "filled_bytes": self.filled_bytes,
            "pool_bytes": self.capacity_bytes,
            "recovery_s": self.recovery_s,
            "hit_tokens": self.decode.hit_tokens,
            "disk_blocks": self.decode.disk_blocks,
            "loaded_bytes": self.decode.loaded_bytes,
            "load_s": self.decode.load_s,
            "load_gb_per_s": gigabytes_per_s(self.decode.loaded_bytes, self.decode.load_s),
        }


@frozen
class LossResult:
    """What was found after a node was killed."""

    node: str
    blocks: int
    """Of the prompt, before."""
    missing_blocks: int
    """All of them were the node's."""
    dropped_after_s: float
    """Until the node was no longer in the view."""
    decode: Finished
    """While the node was lost."""
    prefill: Finished
    """When the others had taken its part over."""
    decode_again: Finished

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "node": self.node,
            "blocks": self.blocks,
            "missing_blocks": self.missing_blocks,
            "hit_tokens": self.decode.hit_tokens,
            "dropped_after_s": self.dropped_after_s,
            "computed_tokens": self.prefill.computed_tokens,
            "unstored_blocks": self.prefill.unstored_blocks,
            "hit_tokens_again": self.decode_again.hit_tokens,
        }


@frozen
class JoinResult:
    """What was found after a node had joined."""

    node: str
    blocks: int
    """Of both prompts."""
    moved_blocks: int
    """How many of them the node has now, copied when decode read them."""
    reads: list[Finished]
    """Of the prompt, while the node warmed up."""
    decode: Finished
    """Afterwards."""

    @property
    def least_hit_tokens(self) -> int | None:
        """The least that a read found while the node warmed up; None without reads."""
        return min((one.hit_tokens for one in self.reads), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "node": self.node,
            "blocks": self.blocks,
            "moved_blocks": self.moved_blocks,
            "reads": len(self.reads),
            "least_hit_tokens": self.least_hit_tokens,
            "hit_tokens": self.decode.hit_tokens,
        }


@frozen
class NodesResult:
    """What was found in a cluster of so many nodes."""

    nodes: int
    membership: str
    """"etcd" or "file"."""
    loss: LossResult
    join: JoinResult

    @property
    def loads(self) -> list[Finished]:
        """All work that loaded something."""
        return [self.loss.decode, self.loss.prefill, self.loss.decode_again, *self.join.reads, self.join.decode]

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "nodes": self.nodes,
            "membership": self.membership,
            "loss": self.loss.as_json(),
            "join": self.join.as_json(),
        }


@frozen
class DemoResult:
    """What a whole run found."""

    url: str
    transport: str
    source: str
    """The name of the text."""
    layout: KVLayout
    prefill_tokens_per_s: float
    prompts: list[PromptResult]
    restart: RestartResult | None = None
    """With a disk only."""
    cluster: NodesResult | None = None
    """With several nodes only."""

    @property
    def checked_bytes(self) -> int:
        """Bytes that were loaded, by both workers, and compared one by one."""
        again_bytes = 0 if self.restart is None else self.restart.decode.loaded_bytes
        again_bytes += 0 if self.cluster is None else sum(one.loaded_bytes for one in self.cluster.loads)
        return again_bytes + sum(one.loaded_bytes for result in self.prompts for one in (result.prefill, result.decode))

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data; keys end in their units. `ok` is always true
        here.
        """
        return {
            "ok": True,
            "url": self.url,
            "transport": self.transport,
            "input": self.source,
            "layout": {
                "model": self.layout.model,
                "layers": self.layout.layers,
                "kv_heads": self.layout.kv_heads,
                "head_dim": self.layout.head_dim,
                "element_bytes": self.layout.element_bytes,
                "chunk_tokens": self.layout.chunk_tokens,
                "block_bytes": self.layout.block_bytes,
            },
            "simulated_prefill_tokens_per_s": self.prefill_tokens_per_s,
            "checked_bytes": self.checked_bytes,
            "wrong_bytes": 0,
            "prompts": [self._prompt_as_json(result) for result in self.prompts],
            "restart": None if self.restart is None else self.restart.as_json(),
            "cluster": None if self.cluster is None else self.cluster.as_json(),
        }

    def _prompt_as_json(self, result: PromptResult) -> dict[str, Any]:
        prefill, decode, speed = result.prefill, result.decode, self.prefill_tokens_per_s
        return {
            "name": result.prompt.name,
            "about": result.prompt.about,
            "tokens": prefill.tokens,
            "prefill": {
                **_loads_as_json(prefill, speed),
                "computed_tokens": prefill.computed_tokens,
                "simulated_compute_s": prefill.compute_s,
                "written_bytes": prefill.written_bytes,
                "write_s": prefill.write_s,
                "write_gb_per_s": gigabytes_per_s(prefill.written_bytes, prefill.write_s),
                "compute_and_write_s": prefill.compute_and_write_s,
                "storing_added_s": prefill.storing_added_s,
            },
            "decode": _loads_as_json(decode, speed),
        }


def _loads_as_json(work: Finished, prefill_tokens_per_s: float) -> dict[str, Any]:
    return {
        "hit_tokens": work.hit_tokens,
        "loaded_bytes": work.loaded_bytes,
        "load_s": work.load_s,
        "load_gb_per_s": gigabytes_per_s(work.loaded_bytes, work.load_s),
        "saved_s": work.saved_s(prefill_tokens_per_s),
    }


_COLOURS = {"prefill": "yellow", "decode": "green"}  # all else is cyan
_BARS: tuple[tuple[str, Work, str], ...] = (
    ("prefill", "loaded", "loads"),
    ("prefill", "computed", "computes"),
    ("prefill", "written", "stores"),
    ("decode", "loaded", "loads"),
    ("decode", "checked", "checks"),
)


@frozen
class Plan:
    """The setup: the text, its number of tokens, the layout, the model's speed, the
    pool.
    """

    source: str
    text_tokens: int
    used_tokens: int
    layout: KVLayout
    prefill_tokens_per_s: float
    capacity_bytes: int


class Display:
    """Prints to `console`; a quiet console makes it silent. A context manager, for one
    use.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.bars = Progress(  # what Live shows below the sentences
            TextColumn("{task.fields[who]}"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28, complete_style="bold blue", finished_style="blue"),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._layers = 0
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}
        self._is_muted = False

    def __enter__(self) -> Self:
        self._console.print(
            "[bold]The KV cache of a text goes from a prefill process through a server to a decode process.[/]",
            highlight=False,
        )
        self.bars.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: "TracebackType | None",
    ) -> None:
        self.bars.stop()

    def server_started(self, server: "OwnServer") -> None:
        """Print that the server listens."""
        disk = "" if server.disk is None else f", with a disk of {describe_size(server.disk.size_bytes)}"
        self._say("server", f"process {server.pid} listens at {server.url}{disk}")

    def membership(self, etcd: tuple[int, str, int] | None) -> None:
        """Print where the nodes of a cluster are listed: an etcd, by its process id,
        host and port, or a file.
        """
        if etcd is None:
            remedy = "on Debian: apt-get install etcd-server"
            self._say("cluster", f"etcd is not installed ({remedy}): a file lists the nodes instead")
        else:
            pid, host, port = etcd
            self._say("etcd", f"process {pid} listens at {host}:{port}; the nodes register there")

    def node_started(self, name: str, server: "ServerProcess") -> None:
        """Print that a node listens."""
        self._say(name, f"process {server.pid} listens at {server.url}")

    def spread(self, owners: Mapping[str, Collection[str]]) -> None:
        """Print which node has how many blocks."""
        self.act("The cluster", "each group of chunks has one owner, by the hash tag of its keys")
        for name, keys in owners.items():
            self._say(name, f"has {len(keys):,} blocks")

    def lost(self, prompt: str, node: str, blocks: int, missing: int) -> None:
        """Print what a lost node takes with it."""
        still = f"{blocks - missing:,} of {blocks:,} blocks of prompt {prompt} are still hit"
        self._say("cluster", f"{still}; the {missing:,} that are missing were all on {node}, and no call failed")

    def dropped(self, node: str, seconds: float, *, by_lease: bool) -> None:
        """Print that a node has left the view."""
        how = "its lease ran out" if by_lease else "the file no longer lists it"
        self._say("cluster", f"{node} is out of the view after {seconds:.1f} s ({how}): the others own its part now")

    def warmed(self, prompt: str, reads: Sequence[Finished]) -> None:
        """Print what was read while a node warmed up."""
        if not reads:
            self._say("cluster", "the node was warm before decode could read anything")
            return
        least, tokens = min(one.hit_tokens for one in reads), reads[0].tokens
        times = "once" if len(reads) == 1 else f"{len(reads)} times"
        hit = f"each time at least {least:,} of {tokens:,} tokens were hit"
        self._say("decode", f"read prompt {prompt} {times} while the node warmed up; {hit}")

    def moved(self, node: str, moved: int, blocks: int) -> None:
        """Print what moved to a node."""
        share = f"{moved:,} of {blocks:,} blocks ({100 * moved / blocks:.0f} %)"
        self._say(node, f"has {share} now: decode's reads copied them, and nothing was computed again")

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Show no events of workers within the `with` statement."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def plan(self, plan: Plan) -> None:
        """Print the setup, and show the bars."""
        layout, chunks = plan.layout, plan.layout.whole_chunks(plan.used_tokens)
        rest = plan.used_tokens - chunks * layout.chunk_tokens
        if plan.used_tokens < plan.text_tokens:
            reason = (
                "more than the model can read at once"
                if plan.used_tokens == CONTEXT_TOKENS
                else f"more than two such prompts leave room for in a pool of {describe_size(plan.capacity_bytes)}"
            )
            self._console.print(
                f"The text has {plan.text_tokens:,} tokens, {reason}: the first {plan.used_tokens:,} are used.",
                style="bold",
                highlight=False,
            )
        facts = Table.grid(padding=(0, 2))
        facts.add_row(
            "text", f"{escape(plan.source)}: {chunks} chunks of {layout.chunk_tokens} tokens, {rest} tokens left over"
        )
        facts.add_row(
            "model",
            f"{layout.model}: {layout.layers} layers x {layout.kv_heads} KV heads x {layout.head_dim} bfloat16, "
            "K and V",
        )
        facts.add_row(
            "cache",
            f"{describe_size(layout.block_bytes)} for a layer of a chunk (one block), "
            f"{chunks * layout.layers} blocks, {describe_size(chunks * layout.chunk_bytes)} in all",
        )
        facts.add_row("compute", f"simulated, at {plan.prefill_tokens_per_s:,.0f} tokens/s: no model runs here")
        self._console.print(facts)
        self._layers = layout.layers
        self._show_bars()

    def prompt_started(self, prompt: "Prompt") -> None:
        """Print the heading of a prompt."""
        self.act(f"Prompt {prompt.name}", f"{prompt.about}, {len(prompt.tokens):,} tokens")
        self.clear()

    def clear(self) -> None:
        """Begin the bars of the workers again."""
        self._moved.clear()
        for (who, work), task in self._tasks.items():
            if who != "server":
                self.bars.update(task, completed=0, detail="waits", visible=_is_always_visible(who, work))

    def act(self, title: str, about: str) -> None:
        """Print a heading."""
        self._console.print(f"\n[bold]{title}[/]: {about}", highlight=False)

    def flushed(self, blocks: int, payload_bytes: int, seconds: float) -> None:
        """Print that blocks are durable."""
        self._say("server", f"{blocks:,} blocks, {describe_size(payload_bytes)}, are on disk after {seconds:.2f} s")

    def left(self, prompt: str, blocks: int, in_memory: int, found: int) -> None:
        """Print where the blocks of a prompt are."""
        where = f"{in_memory:,} are in memory, {found:,} in memory or on disk"
        self._say("server", f"of {blocks:,} blocks of prompt {prompt}, {where}")

    def recovered(self, in_memory: int, on_disk: int) -> None:
        """Print what the new server has."""
        self._say("server", f"has {in_memory:,} keys in memory, and {on_disk:,} on disk")

    def event(self, who: str, event: Event) -> None:
        """Show an event of a worker."""
        if self._is_muted:
            return
        match event:
            case Ready():
                self._say(who, f"process {event.pid} is connected, over {event.transport}")
            case Matched():
                self._say(who, _describe_match(event))
                if event.hit_tokens:
                    self.bars.update(self._tasks[who, "loaded"], visible=True)
            case LayerDone():
                self._advance(who, event)
            case Finished():
                for sentence in _describe_work(who, event, self._layers):
                    self._say(who, sentence)

    def usage(self, statistics: Stats) -> None:
        """Show the usage of the server's pool, and of its disk if it has one."""
        store = statistics.store
        detail = f"{describe_size(store.used_bytes)} in {store.keys:,} blocks"
        self.bars.update(
            self._tasks["server", "pool"], completed=store.used_bytes, total=store.capacity_bytes, detail=detail
        )
        if statistics.disk is not None:
            [disk] = statistics.disk.disks
            detail = f"{describe_size(disk.used_bytes)} of {describe_size(disk.capacity_bytes)}"
            self.bars.update(
                self._tasks["server", "disk"],
                completed=disk.used_bytes,
                total=disk.capacity_bytes,
                detail=detail,
                visible=True,
            )

    def table(self, result: DemoResult) -> None:
        """Print the table of all figures, with explanations."""
        self._console.print()
        self._console.print(_table(result))
        if result.restart is not None:
            self._console.print(_table_of_restart(result.restart, result.prefill_tokens_per_s))
        if result.cluster is not None:
            self._console.print(_table_of_cluster(result.cluster))
        loaded_s = sum(one.decode.load_s for one in result.prompts)
        instead_s = sum(one.decode.computing_instead_s(result.prefill_tokens_per_s) for one in result.prompts)
        self._console.print(
            f"All {result.checked_bytes:,} bytes that were loaded are the bytes that prefill had to write. "
            f"Time saved is against compute that is [bold]simulated[/]: at {result.prefill_tokens_per_s:,.0f} tokens/s "
            f"(--prefill-tokens-per-s), computing what decode loaded takes {instead_s:.2f} s. Loading it took "
            f"{loaded_s:.2f} s.",
            highlight=False,
        )

    def _say(self, who: str, sentence: str) -> None:
        self._console.print(_name(who), sentence, highlight=False, markup=False)

    def _show_bars(self) -> None:
        self._tasks["server", "pool"] = self.bars.add_task("holds", total=1, who=_name("server"), detail="")
        self._tasks["server", "disk"] = self.bars.add_task(
            "on disk", total=1, who=_name("server"), detail="", visible=False
        )
        for who, work, verb in _BARS:
            self._tasks[who, work] = self.bars.add_task(
                verb, total=self._layers, who=_name(who), detail="waits", visible=_is_always_visible(who, work)
            )

    def _advance(self, who: str, event: LayerDone) -> None:
        task = self._tasks.get((who, event.work))
        if task is None:  # prefill checks what it loads as well, which needs no bar
            return
        payload_bytes, seconds = self._moved.get((who, event.work), (0, 0.0))
        self._moved[who, event.work] = payload_bytes, seconds = (
            payload_bytes + event.payload_bytes,
            seconds + event.busy_s,
        )
        # What was reported is done; computing goes on with the next layer at once.
        layer = min(event.layer + 2, self._layers) if event.work == "computed" else event.layer + 1
        detail = f"layer {layer:2} of {self._layers}"
        if event.work in ("loaded", "written") and (rate := gigabytes_per_s(payload_bytes, seconds)):
            detail += f", {rate:.1f} GB/s"
        self.bars.update(task, completed=event.layer + 1, detail=detail)


def _is_always_visible(who: str, work: str) -> bool:
    """Whether a bar is shown from the start; prefill may have nothing to load."""
    return (who, work) != ("prefill", "loaded")


def _name(who: str) -> Text:
    return Text(f"{who:<8}", style=f"bold {_COLOURS.get(who, 'cyan')}")


def _describe_match(event: Matched) -> str:
    if not event.hit_tokens:
        return "asks for the longest prefix in the store: nothing yet"
    found = f"asks for the longest prefix in the store: {event.hit_tokens:,} of {event.tokens:,} tokens"
    if not event.disk_blocks:
        return found
    return f"{found}, {'all' if event.disk_blocks == event.blocks else 'some'} from disk"


def _describe_work(who: str, event: Finished, layers: int) -> list[str]:
    sentences = []
    if rate := gigabytes_per_s(event.loaded_bytes, event.load_s):
        where = " from disk" if event.disk_blocks else ""
        loaded = f"loaded {describe_size(event.loaded_bytes)}{where} in {event.load_s:.2f} s ({rate:.1f} GB/s)"
        sentences.append(f"{loaded}; every byte is right")
    if event.unstored_blocks:
        sentences.append(f"{event.unstored_blocks:,} blocks had no node to take them; they are computed next time")
    if rate := gigabytes_per_s(event.written_bytes, event.write_s):
        sentences.append(
            f"computed {event.computed_tokens:,} tokens through {layers} layers in {event.compute_s:.2f} s (simulated)"
        )
        stored = f"stored {describe_size(event.written_bytes)} meanwhile ({rate:.1f} GB/s)"
        sentences.append(f"{stored}, which took {event.storing_added_s:.2f} s more")
    elif who == "prefill":
        sentences.append(f"computed the last {event.computed_tokens:,} tokens, which fill no chunk and are not stored")
    return sentences


def _table(result: DemoResult) -> Table:
    """One column per prompt, at most 80 characters wide."""
    table = Table(title="What was found", title_style="bold", title_justify="left")
    table.add_column("")
    for one in result.prompts:
        table.add_column(f"prompt {one.prompt.name}", justify="right", min_width=14)
    speed = result.prefill_tokens_per_s

    def row(title: str, *cells: str, end_section: bool = False) -> None:
        table.add_row(title, *cells, end_section=end_section)

    prompts = result.prompts
    row("tokens", *(f"{one.prefill.tokens:,}" for one in prompts), end_section=True)
    row("[yellow]prefill[/]: hit tokens", *(_hit(one.prefill) for one in prompts))
    row("  read from the store", *(_moved(one.prefill.loaded_bytes, one.prefill.load_s) for one in prompts))
    row(
        "  computed (simulated)",
        *(f"{one.prefill.computed_tokens:,} in {one.prefill.compute_s:.2f} s" for one in prompts),
    )
    row("  written to the store", *(_moved(one.prefill.written_bytes, one.prefill.write_s) for one in prompts))
    row("  longer because of writing", *(_longer(one) for one in prompts))
    row("  time saved", *(_saved(one.prefill, speed) for one in prompts), end_section=True)
    row("[green]decode[/]: hit tokens", *(_hit(one.decode) for one in prompts))
    row("  read from the store", *(_moved(one.decode.loaded_bytes, one.decode.load_s) for one in prompts))
    row("  bytes that differ", *("0" for _ in prompts))
    row("  time saved", *(_saved(one.decode, speed) for one in prompts))
    return table


def _table_of_restart(restart: RestartResult, prefill_tokens_per_s: float) -> Table:
    table = Table(title="After the restart", title_style="bold", title_justify="left")
    table.add_column("")
    table.add_column(f"prompt {restart.prompt.name}", justify="right", min_width=14)
    work = restart.decode
    others = f"{describe_size(restart.filled_bytes)}, pool of {describe_size(restart.capacity_bytes)}"
    table.add_row("others stored before", others)
    table.add_row("index of the disk back", f"after {restart.recovery_s:.2f} s")
    table.add_row("[green]decode[/]: hit tokens", _hit(work))
    table.add_row("  blocks from disk", f"{work.disk_blocks:,}")
    table.add_row("  read from the store", _moved(work.loaded_bytes, work.load_s))
    table.add_row("  bytes that differ", "0")
    table.add_row("  time saved", _saved(work, prefill_tokens_per_s))
    return table


def _table_of_cluster(cluster: NodesResult) -> Table:
    nodes = f"{cluster.nodes} nodes in {'etcd' if cluster.membership == 'etcd' else 'a file'}"
    table = Table(title=f"In a cluster of {nodes}", title_style="bold", title_justify="left")
    table.add_column("")
    table.add_column("prompt A", justify="right", min_width=14)
    loss, join = cluster.loss, cluster.join
    table.add_row(
        f"{loss.node} was killed: blocks still hit", f"{loss.blocks - loss.missing_blocks:,} of {loss.blocks:,}"
    )
    table.add_row("[green]decode[/]: hit tokens", _hit(loss.decode))
    table.add_row("  out of the view", f"after {loss.dropped_after_s:.1f} s")
    table.add_row("[yellow]prefill[/]: computed (simulated)", f"{loss.prefill.computed_tokens:,} tokens")
    table.add_row("[green]decode[/]: hit tokens", _hit(loss.decode_again), end_section=True)
    table.add_row(f"{join.node} joined: blocks moved to it", f"{join.moved_blocks:,} of {join.blocks:,}")
    if join.reads:
        least = min(join.reads, key=lambda one: one.hit_tokens)
        table.add_row("[green]decode[/]: hit tokens, at least", _hit(least))
    table.add_row("[green]decode[/]: hit tokens at the end", _hit(join.decode))
    table.add_row("  bytes that differ", "0")
    return table


def _hit(work: Finished) -> str:
    return f"{work.hit_tokens:,} ({100 * work.hit_tokens // work.tokens} %)"


def _moved(payload_bytes: int, seconds: float) -> str:
    rate = gigabytes_per_s(payload_bytes, seconds)
    return "nothing" if rate is None else f"{describe_size(payload_bytes)} at {rate:.2f} GB/s"


def _longer(result: PromptResult) -> str:
    return f"{result.prefill.storing_added_s:.3f} s" if result.prefill.written_bytes else "nothing"


def _saved(work: Finished, prefill_tokens_per_s: float) -> str:
    return f"{work.saved_s(prefill_tokens_per_s):.2f} s" if work.hit_tokens else "nothing"
