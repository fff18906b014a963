"""The output of the demonstration: messages while it runs, and tables of what it found.

Messages are printed as things happen. Below them, a terminal shows progress bars, layer
by layer, which disappear at the end. Without a terminal there are only the messages and
the tables, so that a log stays readable.

Rates are in GB/s of payload (10**9 bytes a second), over the time spent in calls to the
store. The compute is simulated: the time "saved" is the time that the model would have
taken at the speed that was set, less the time that loading took, and is worth as much
as that speed is true.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from infinistore.demo.prompts import CONTEXT_TOKENS, DemoSettings, Prompt
from infinistore.demo.workers import Event, Finished, LayerDone, Matched, Ready, gigabytes_per_s
from infinistore.sizes import describe_size
from infinistore.statistics import Stats

if TYPE_CHECKING:
    from types import TracebackType


Found: TypeAlias = dict[str, Any]
"""What was found, or a part of it, as `--json` prints it."""

_COLOURS = {"prefill": "yellow", "decode": "green"}  # all else is cyan
_BARS = (
    ("server", "pool", "holds"),
    ("server", "disk", "on disk"),
    ("prefill", "loaded", "loads"),
    ("prefill", "computed", "computes"),
    ("prefill", "written", "stores"),
    ("decode", "loaded", "loads"),
    ("decode", "checked", "checks"),
)
_HIDDEN_AT_FIRST = {("server", "disk"), ("prefill", "loaded")}


class Display:
    """Prints to `console`; a quiet console makes it silent. A context manager, for one
    use.
    """

    def __init__(self, console: Console) -> None:
        self.is_muted = False
        """Whether events of workers are not shown."""
        self.bars = Progress(  # what Live shows below the sentences
            TextColumn("{task.fields[who]}"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28, complete_style="bold blue", finished_style="blue"),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._console = console
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._layers = 0
        self._moved: dict[tuple[str, str], tuple[int, float]] = {}

    def __enter__(self) -> Self:
        headline = "The KV cache of a text goes from a prefill process through a server to a decode process."
        self._console.print(f"[bold]{headline}[/]", highlight=False)
        self.bars.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: "TracebackType | None",
    ) -> None:
        self.bars.stop()

    def say(self, who: str, sentence: str) -> None:
        """Print a sentence about somebody."""
        self._console.print(_name(who), sentence, highlight=False, markup=False)

    def act(self, title: str, about: str) -> None:
        """Print a heading."""
        self._console.print(f"\n[bold]{title}[/]: {about}", highlight=False)

    def prompt_started(self, prompt: Prompt, about: str = "") -> None:
        """Print the heading of a prompt."""
        self.act(f"Prompt {prompt.name}", f"{about or prompt.about}, {len(prompt.tokens):,} tokens")
        self.clear()

    def clear(self) -> None:
        """Begin the bars of the workers again."""
        self._moved.clear()
        for (who, work), task in self._tasks.items():
            if who != "server":
                self.bars.update(task, completed=0, detail="waits", visible=(who, work) not in _HIDDEN_AT_FIRST)

    def plan(
        self, settings: DemoSettings, source: str, text_tokens: int, used_tokens: int, capacity_bytes: int
    ) -> None:
        """Print the setup, and show the bars: of the text `source`, so many tokens are
        used with a pool of this size.
        """
        layout, chunks = settings.layout, settings.layout.whole_chunks(used_tokens)
        rest = used_tokens - chunks * layout.chunk_tokens
        if used_tokens < text_tokens:
            reason = (
                "more than the model can read at once"
                if used_tokens == CONTEXT_TOKENS
                else f"more than two such prompts leave room for in a pool of {describe_size(capacity_bytes)}"
            )
            cut = f"The text has {text_tokens:,} tokens, {reason}: the first {used_tokens:,} are used."
            self._console.print(cut, style="bold", highlight=False)
        model = f"{layout.model}: {layout.layers} layers x {layout.kv_heads} KV heads x {layout.head_dim} bfloat16"
        cache = f"{describe_size(layout.block_bytes)} for a layer of a chunk (one block)"
        facts = Table.grid(padding=(0, 2))
        for name, fact in (
            ("text", f"{escape(source)}: {chunks} chunks of {layout.chunk_tokens} tokens, {rest} tokens left over"),
            ("model", f"{model}, K and V"),
            ("cache", f"{cache}, {chunks * layout.layers} blocks, {describe_size(chunks * layout.chunk_bytes)} in all"),
            ("compute", f"simulated, at {settings.prefill_tokens_per_s:,.0f} tokens/s: no model runs here"),
        ):
            facts.add_row(name, fact)
        self._console.print(facts)
        self._layers = layout.layers
        for who, work, verb in _BARS:
            total, detail = (1, "") if who == "server" else (layout.layers, "waits")
            self._tasks[who, work] = self.bars.add_task(
                verb, total=total, who=_name(who), detail=detail, visible=(who, work) not in _HIDDEN_AT_FIRST
            )

    def event(self, who: str, event: Event) -> None:
        """Show an event of a worker."""
        if self.is_muted:
            return
        match event:
            case Ready():
                self.say(who, f"process {event.pid} is connected, over {event.transport}")
            case Matched():
                self.say(who, f"asks for the longest prefix in the store: {_describe_match(event)}")
                if event.hit_tokens:
                    self.bars.update(self._tasks[who, "loaded"], visible=True)
            case LayerDone():
                self._advance(who, event)
            case Finished():
                for sentence in _describe_work(who, event, self._layers):
                    self.say(who, sentence)

    def usage(self, statistics: Stats) -> None:
        """Show the usage of the server's pool, and of its disk if it has one."""
        store = statistics.store
        detail = f"{describe_size(store.used_bytes)} in {store.keys:,} blocks"
        self._show("pool", store.used_bytes, store.capacity_bytes, detail)
        if statistics.disk is not None:
            [disk] = statistics.disk.disks
            detail = f"{describe_size(disk.used_bytes)} of {describe_size(disk.capacity_bytes)}"
            self._show("disk", disk.used_bytes, disk.capacity_bytes, detail)

    def table(self, found: Found) -> None:
        """Print the tables of all figures, with explanations."""
        prompts, speed = found["prompts"], found["simulated_prefill_tokens_per_s"]
        self._console.print()
        self._console.print(_table_of_prompts(prompts, speed))
        if found["restart"]:
            self._console.print(_table_of_restart(found["restart"], prompts[0]["tokens"], speed))
        if found["cluster"]:
            self._console.print(_table_of_cluster(found["cluster"], prompts[0]["tokens"]))
        loaded_s = sum(one["decode"]["load_s"] for one in prompts)
        instead_s = sum(one["decode"]["hit_tokens"] for one in prompts) / speed
        self._console.print(
            f"All {found['checked_bytes']:,} bytes that were loaded are the bytes that prefill had to write. "
            f"Time saved is against compute that is [bold]simulated[/]: at {speed:,.0f} tokens/s "
            f"(--prefill-tokens-per-s), computing what decode loaded takes {instead_s:.2f} s. Loading it took "
            f"{loaded_s:.2f} s.",
            highlight=False,
        )

    def _show(self, what: str, used_bytes: int, capacity_bytes: int, detail: str) -> None:
        task = self._tasks["server", what]
        self.bars.update(task, completed=used_bytes, total=capacity_bytes, detail=detail, visible=True)

    def _advance(self, who: str, event: LayerDone) -> None:
        task = self._tasks.get((who, event.work))
        if task is None:  # prefill checks what it loads as well, which needs no bar
            return
        payload_bytes, seconds = self._moved.get((who, event.work), (0, 0.0))
        payload_bytes, seconds = payload_bytes + event.payload_bytes, seconds + event.busy_s
        self._moved[who, event.work] = payload_bytes, seconds
        # What was reported is done; computing goes on with the next layer at once.
        layer = min(event.layer + 2, self._layers) if event.work == "computed" else event.layer + 1
        detail = f"layer {layer:2} of {self._layers}"
        if event.work in ("loaded", "written") and (rate := gigabytes_per_s(payload_bytes, seconds)):
            detail += f", {rate:.1f} GB/s"
        self.bars.update(task, completed=event.layer + 1, detail=detail)


def _name(who: str) -> Text:
    return Text(f"{who:<8}", style=f"bold {_COLOURS.get(who, 'cyan')}")


def _describe_match(event: Matched) -> str:
    if not event.hit_tokens:
        return "nothing yet"
    found = f"{event.hit_tokens:,} of {event.tokens:,} tokens"
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


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """At most 80 characters wide. An empty row ends a section."""
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", min_width=14)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def _table_of_prompts(prompts: Sequence[Found], speed: float) -> Table:
    def row(title: str, cell: Callable[[Found, Found], str], who: str = "prefill") -> list[str]:
        return [title, *(cell(one, one[who]) for one in prompts)]

    rows: list[Sequence[str]] = [
        row("tokens", lambda one, work: f"{one['tokens']:,}"),
        (),
        row("[yellow]prefill[/]: hit tokens", lambda one, work: _hit(work["hit_tokens"], one["tokens"])),
        row("  read from the store", lambda one, work: _moved(work, "load")),
        row(
            "  computed (simulated)",
            lambda one, work: f"{work['computed_tokens']:,} in {work['simulated_compute_s']:.2f} s",
        ),
        row("  written to the store", lambda one, work: _moved(work, "write")),
        row(
            "  longer because of writing",
            lambda one, work: f"{work['storing_added_s']:.3f} s" if work["written_bytes"] else "nothing",
        ),
        row("  time saved", lambda one, work: _saved(work, speed)),
        (),
        row("[green]decode[/]: hit tokens", lambda one, work: _hit(work["hit_tokens"], one["tokens"]), "decode"),
        row("  read from the store", lambda one, work: _moved(work, "load"), "decode"),
        row("  bytes that differ", lambda one, work: "0"),
        row("  time saved", lambda one, work: _saved(work, speed), "decode"),
    ]
    return _table("What was found", [f"prompt {one['name']}" for one in prompts], rows)


def _table_of_restart(restart: Found, tokens: int, speed: float) -> Table:
    stored = f"{describe_size(restart['filled_bytes'])}, pool of {describe_size(restart['pool_bytes'])}"
    rows = [
        ("others stored before", stored),
        ("index of the disk back", f"after {restart['recovery_s']:.2f} s"),
        ("[green]decode[/]: hit tokens", _hit(restart["hit_tokens"], tokens)),
        ("  blocks from disk", f"{restart['disk_blocks']:,}"),
        ("  read from the store", _moved(restart, "load")),
        ("  bytes that differ", "0"),
        ("  time saved", _saved(restart, speed)),
    ]
    return _table("After the restart", [f"prompt {restart['prompt']}"], rows)


def _table_of_cluster(cluster: Found, tokens: int) -> Table:
    loss, join = cluster["loss"], cluster["join"]
    least = join["least_hit_tokens"]
    still_hit = f"{loss['blocks'] - loss['missing_blocks']:,} of {loss['blocks']:,}"
    rows: list[Sequence[str]] = [
        (f"{loss['node']} was killed: blocks still hit", still_hit),
        ("[green]decode[/]: hit tokens", _hit(loss["hit_tokens"], tokens)),
        ("  out of the view", f"after {loss['dropped_after_s']:.1f} s"),
        ("[yellow]prefill[/]: computed (simulated)", f"{loss['computed_tokens']:,} tokens"),
        ("[green]decode[/]: hit tokens", _hit(loss["hit_tokens_again"], tokens)),
        (),
        (f"{join['node']} joined: blocks moved to it", f"{join['moved_blocks']:,} of {join['blocks']:,}"),
        *([("[green]decode[/]: hit tokens, at least", _hit(least, tokens))] if join["reads"] else ()),
        ("[green]decode[/]: hit tokens at the end", _hit(join["hit_tokens"], tokens)),
        ("  bytes that differ", "0"),
    ]
    where = "etcd" if cluster["membership"] == "etcd" else "a file"
    return _table(f"In a cluster of {cluster['nodes']} nodes in {where}", ["prompt A"], rows)


def _hit(hit_tokens: int, tokens: int) -> str:
    return f"{hit_tokens:,} ({100 * hit_tokens // tokens} %)"


def _moved(work: Found, verb: Literal["load", "write"]) -> str:
    rate = work[f"{verb}_gb_per_s"]
    payload_bytes = work["loaded_bytes" if verb == "load" else "written_bytes"]
    return "nothing" if rate is None else f"{describe_size(payload_bytes)} at {rate:.2f} GB/s"


def _saved(work: Found, speed: float) -> str:
    return f"{work['hit_tokens'] / speed - work['load_s']:.2f} s" if work["hit_tokens"] else "nothing"
