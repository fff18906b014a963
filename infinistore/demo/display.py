"""What the reader of the demonstration sees: who does what while it runs, and a table at the end.

Sentences are printed as things happen, and stay. Below them, in a terminal, bars show the work under way, layer by
layer; they go away at the end. Without a terminal there are only the sentences and the table, so that a log stays
readable.
"""

from typing import TYPE_CHECKING, Self

from attrs import frozen
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from infinistore.demo.layout import KVLayout
from infinistore.demo.messages import Event, Finished, LayerDone, Matched, Ready, Work
from infinistore.demo.result import DemoResult, PromptResult, gigabytes_per_s
from infinistore.demo.settings import CONTEXT_TOKENS
from infinistore.sizes import describe_size

if TYPE_CHECKING:
    from types import TracebackType

    from infinistore.demo.text import Prompt

__all__ = ["Display", "Plan"]

_COLOURS = {"server": "cyan", "prefill": "yellow", "decode": "green"}
_BARS: tuple[tuple[str, Work, str], ...] = (
    ("prefill", "loaded", "loads"),
    ("prefill", "computed", "computes"),
    ("prefill", "written", "stores"),
    ("decode", "loaded", "loads"),
    ("decode", "checked", "checks"),
)


@frozen
class Plan:
    """What is about to happen: the text, how many of its tokens are used, the layout, the model's speed, the pool."""

    source: str
    text_tokens: int
    used_tokens: int
    layout: KVLayout
    prefill_tokens_per_s: float
    capacity_bytes: int


class Display:
    """Tells the story on `console`; a quiet console makes a silent display. To be used with `with`, once."""

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

    def server_started(self, pid: int, url: str) -> None:
        """Say that a server of our own listens."""
        self._say("server", f"process {pid} listens at {url}")

    def plan(self, plan: Plan) -> None:
        """Say what is about to happen, and show the bars."""
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
        """Head the part of the story that is about one prompt."""
        self._console.print(
            f"\n[bold]Prompt {prompt.name}[/]: {prompt.about}, {len(prompt.tokens):,} tokens", highlight=False
        )
        self._moved.clear()
        for (who, work), task in self._tasks.items():
            if who != "server":
                self.bars.update(task, completed=0, detail="waits", visible=_is_always_visible(who, work))

    def event(self, who: str, event: Event) -> None:
        """Show what a worker reports."""
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

    def pool(self, used_bytes: int, capacity_bytes: int, blocks: int) -> None:
        """Show how full the server's pool is."""
        detail = f"{describe_size(used_bytes)} in {blocks:,} blocks"
        self.bars.update(self._tasks["server", "pool"], completed=used_bytes, total=capacity_bytes, detail=detail)

    def table(self, result: DemoResult) -> None:
        """Print the table of all figures, and what to make of them."""
        self._console.print()
        self._console.print(_table(result))
        loaded_s = sum(one.decode.load_s for one in result.prompts)
        instead_s = sum(one.computing_instead_s(one.decode, result.prefill_tokens_per_s) for one in result.prompts)
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
    """Whether a bar is there before there is anything to show. Prefill has nothing to load when all is new."""
    return (who, work) != ("prefill", "loaded")


def _name(who: str) -> Text:
    return Text(f"{who:<8}", style=f"bold {_COLOURS[who]}")


def _describe_match(event: Matched) -> str:
    if not event.hit_tokens:
        return "asks for the longest prefix in the store: nothing yet"
    return f"asks for the longest prefix in the store: {event.hit_tokens:,} of {event.tokens:,} tokens"


def _describe_work(who: str, event: Finished, layers: int) -> list[str]:
    sentences = []
    if rate := gigabytes_per_s(event.loaded_bytes, event.load_s):
        loaded = f"loaded {describe_size(event.loaded_bytes)} in {event.load_s:.2f} s ({rate:.1f} GB/s)"
        sentences.append(f"{loaded}; every byte is right")
    if rate := gigabytes_per_s(event.written_bytes, event.write_s):
        sentences.append(
            f"computed {event.computed_tokens:,} tokens through {layers} layers in {event.compute_s:.2f} s (simulated)"
        )
        added_s = max(0.0, event.compute_and_write_s - event.compute_s)
        sentences.append(
            f"stored {describe_size(event.written_bytes)} meanwhile ({rate:.1f} GB/s), which took {added_s:.2f} s more"
        )
    elif who == "prefill":
        sentences.append(f"computed the last {event.computed_tokens:,} tokens, which fill no chunk and are not stored")
    return sentences


def _table(result: DemoResult) -> Table:
    """One column for each prompt: at most 80 characters wide."""
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
    row("  time saved", *(_saved(one.prefill, one.saved_s(one.prefill, speed)) for one in prompts), end_section=True)
    row("[green]decode[/]: hit tokens", *(_hit(one.decode) for one in prompts))
    row("  read from the store", *(_moved(one.decode.loaded_bytes, one.decode.load_s) for one in prompts))
    row("  bytes that differ", *("0" for _ in prompts))
    row("  time saved", *(_saved(one.decode, one.saved_s(one.decode, speed)) for one in prompts))
    return table


def _hit(work: Finished) -> str:
    return f"{work.hit_tokens:,} ({100 * work.hit_tokens // work.tokens} %)"


def _moved(payload_bytes: int, seconds: float) -> str:
    rate = gigabytes_per_s(payload_bytes, seconds)
    return "nothing" if rate is None else f"{describe_size(payload_bytes)} at {rate:.2f} GB/s"


def _longer(result: PromptResult) -> str:
    return f"{result.storing_added_s:.3f} s" if result.prefill.written_bytes else "nothing"


def _saved(work: Finished, seconds: float) -> str:
    return f"{seconds:.2f} s" if work.hit_tokens else "nothing"
