"""The output of the demonstration: messages while it runs, and a table of both prompts.

Below the messages, a terminal shows progress bars, layer by layer, which disappear at
the end. Rates are in GB/s of payload (10**9 bytes a second), over the time spent in
calls to the store. The time "saved" is the time that the model would have taken at the
speed that was set, less the time that loading took.
"""

from collections.abc import Iterable
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from infinistore.demo.prompts import CONTEXT_TOKENS, DemoSettings, Prompt
from infinistore.demo.workers import Found
from infinistore.sizes import describe_size
from infinistore.statistics import Stats

_COLOURS: Final = {"prefill": "yellow", "decode": "green"}  # all else is cyan
_ROWS: Final = (  # the title, whose figures, which of them must not be 0, and the cell
    ("tokens", "prefill", "tokens", "{tokens:,}"),
    ("[yellow]prefill[/]: hit tokens", "prefill", "tokens", "{hit_tokens:,} ({hit_percent} %)"),
    ("  read from the store", "prefill", "loaded_bytes", "{loaded} at {load_gb_per_s:.2f} GB/s"),
    ("  computed (simulated)", "prefill", "tokens", "{computed_tokens:,} in {simulated_compute_s:.2f} s"),
    ("  written to the store", "prefill", "written_bytes", "{written} at {write_gb_per_s:.2f} GB/s"),
    ("  longer because of writing", "prefill", "written_bytes", "{storing_added_s:.3f} s"),
    ("  time saved", "prefill", "hit_tokens", "{saved_s:.2f} s"),
    ("[green]decode[/]: hit tokens", "decode", "tokens", "{hit_tokens:,} ({hit_percent} %)"),
    ("  read from the store", "decode", "loaded_bytes", "{loaded} at {load_gb_per_s:.2f} GB/s"),
    ("  bytes that differ", "decode", "tokens", "0"),
    ("  time saved", "decode", "hit_tokens", "{saved_s:.2f} s"),
)


class Display:
    """Prints to `console`; a quiet console makes it silent. The bars are a context
    manager.
    """

    def __init__(self, console: Console) -> None:
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

    def print(self, text: str) -> None:
        """Print text with rich's markup."""
        self._console.print(text, highlight=False)

    def say(self, who: str, sentence: str) -> None:
        """Print a sentence about somebody."""
        self._console.print(_name(who), sentence, highlight=False, markup=False)

    def act(self, title: str, about: str) -> None:
        """Print a heading, and begin the bars of the workers again."""
        self.print(f"\n[bold]{title}[/]: {about}")
        for who, verb in [each for each in self._tasks if each[0] in _COLOURS]:
            self.bars.remove_task(self._tasks.pop((who, verb)))

    def prompt_started(self, prompt: Prompt, about: str = "") -> None:
        """Print the heading of a prompt."""
        self.act(f"Prompt {prompt.name}", f"{about or prompt.about}, {len(prompt.tokens):,} tokens")

    def plan(self, settings: DemoSettings, source: str, text_tokens: int, tokens: int, capacity_bytes: int) -> None:
        """Print the setup: of the text `source`, so many tokens are used with a pool of
        this size.
        """
        layout, chunks = settings.layout, settings.layout.whole_chunks(tokens)
        self._layers = layout.layers
        if tokens < text_tokens:
            no_room = f"more than two such prompts leave room for in a pool of {describe_size(capacity_bytes)}"
            reason = "more than the model can read at once" if tokens == CONTEXT_TOKENS else no_room
            self.print(f"[bold]The text has {text_tokens:,} tokens, {reason}: the first {tokens:,} are used.[/]")
        rest = f"{tokens - chunks * layout.chunk_tokens} tokens left over"
        self.say("text", f"{source}: {chunks} chunks of {layout.chunk_tokens} tokens, {rest}")
        heads = f"{layout.kv_heads} KV heads x {layout.head_dim} bfloat16, K and V"
        self.say("model", f"{layout.model}: {layout.layers} layers x {heads}")
        whole = f"{chunks * layout.layers} blocks, {describe_size(chunks * layout.chunk_bytes)} in all"
        self.say("cache", f"{describe_size(layout.block_bytes)} for a layer of a chunk (one block), {whole}")
        self.say("compute", f"simulated, at {settings.prefill_tokens_per_s:,.0f} tokens/s: no model runs here")

    def event(self, who: str, event: Found) -> None:
        """Show an event of a worker."""
        match event["event"]:
            case "ready":
                self.say(who, f"process {event['pid']} is connected, over {event['transport']}")
            case "matched":
                self.say(who, f"asks for the longest prefix in the store: {_match(event)}")
            case "layer":
                done, rate = event["layer"] + 1, event.get("gb_per_s")
                detail = f"layer {done:2} of {self._layers}" + (f", {rate:.1f} GB/s" if rate else "")
                self._show(who, event["work"], done, self._layers, detail)
            case "finished":
                for sentence in _work(event, self._layers):
                    self.say(who, sentence)

    def usage(self, statistics: Stats) -> None:
        """Show the usage of the server's pool, and of its disk if it has one."""
        store = statistics.store
        detail = f"{describe_size(store.used_bytes)} in {store.keys:,} blocks"
        self._show("server", "holds", store.used_bytes, store.capacity_bytes, detail)
        if statistics.disk is not None:
            [disk] = statistics.disk.disks
            detail = f"{describe_size(disk.used_bytes)} of {describe_size(disk.capacity_bytes)}"
            self._show("server", "on disk", disk.used_bytes, disk.capacity_bytes, detail)

    def _show(self, who: str, verb: str, done: int, total: int, detail: str) -> None:
        """Move a bar, which appears with its first use."""
        if (who, verb) not in self._tasks:
            self._tasks[who, verb] = self.bars.add_task(verb, who=_name(who), detail=detail)
        self.bars.update(self._tasks[who, verb], completed=done, total=total, detail=detail)

    def conclude(self, found: Found) -> None:
        """Print a table of the figures of both prompts, with explanations."""
        prompts, speed = found["prompts"], found["simulated_prefill_tokens_per_s"]
        table = Table("", title="What was found", title_style="bold", title_justify="left")
        for one in prompts:  # at most 80 characters wide
            table.add_column(f"prompt {one['name']}", justify="right", min_width=14)
        for title, who, needs, form in _ROWS:
            if title.startswith("["):
                table.add_section()
            table.add_row(title, *(_cell(one[who] | {"tokens": one["tokens"]}, needs, form) for one in prompts))
        self._console.print("", table)
        loads = [one["decode"] for one in prompts] + ([found["restart"]] if found["restart"] else [])
        loaded_s, instead_s = sum(one["load_s"] for one in loads), sum(one["hit_tokens"] for one in loads) / speed
        self.print(
            f"All {found['checked_bytes']:,} bytes that were loaded are the bytes that prefill had to write. "
            f"Time saved is against compute that is [bold]simulated[/]: at {speed:,.0f} tokens/s "
            f"(--prefill-tokens-per-s), computing what decode loaded takes {instead_s:.2f} s. Loading it took "
            f"{loaded_s:.2f} s."
        )


def _name(who: str) -> Text:
    return Text(f"{who:<8}", style=f"bold {_COLOURS.get(who, 'cyan')}")


def _match(event: Found) -> str:
    if not event["hit_tokens"]:
        return "nothing yet"
    from_disk = "all" if event["disk_blocks"] == event["blocks"] else "some"
    found = f"{event['hit_tokens']:,} of {event['tokens']:,} tokens"
    return f"{found}, {from_disk} from disk" if event["disk_blocks"] else found


def _work(event: Found, layers: int) -> Iterable[str]:
    if rate := event["load_gb_per_s"]:
        where = " from disk" if event["disk_blocks"] else ""
        loaded = f"loaded {describe_size(event['loaded_bytes'])}{where} in {event['load_s']:.2f} s"
        yield f"{loaded} ({rate:.1f} GB/s); every byte is right"
    if "computed_tokens" not in event:
        return
    computed = f"{event['computed_tokens']:,} tokens"
    if rate := event["write_gb_per_s"]:
        yield f"computed {computed} through {layers} layers in {event['simulated_compute_s']:.2f} s (simulated)"
        stored = f"stored {describe_size(event['written_bytes'])} meanwhile ({rate:.1f} GB/s)"
        yield f"{stored}, which took {event['storing_added_s']:.2f} s more"
    else:
        yield f"computed the last {computed}, which fill no chunk and are not stored"


def _cell(work: Found, needs: str, form: str) -> str:
    hit_percent = 100 * work["hit_tokens"] // work["tokens"]
    sizes = {"loaded": describe_size(work["loaded_bytes"]), "written": describe_size(work.get("written_bytes", 0))}
    return form.format(**work, **sizes, hit_percent=hit_percent) if work[needs] else "nothing"
