"""The two workers, each a process: prefill computes a prompt's KV cache and writes it
layer by layer; decode loads a prompt's longest stored prefix, and checks every byte.

Run as `python -m infinistore.demo.workers prefill` or `decode`. A worker reads a
`Setup` and then `Job`s from standard input, one JSON object a line, because others can
read the arguments of a process, and addresses may contain secrets. It writes events to
standard output: `Ready` once; for each job `Matched`, a `LayerDone` for each layer and
kind of work, and `Finished`; `Failed` at any time, as the last one. It ends with its
input, or with exit status 1 after `Failed`. It ignores Ctrl-C, which a terminal sends
to all its processes: the demonstration ends its workers in an orderly way.

Both load the stored prefix, layer by layer, and check every byte: decode needs all of
it, and prefill because the computed tokens attend to the found ones. Two tasks share
prefill's work. The first creates the bytes of a layer in a thread, and waits until the
simulated model would have finished it; the second writes it to the store. At most one
layer waits between them, so a slow store delays the model.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import trio
from attrs import evolve, frozen
from cattrs.preconf.json import make_converter
from cattrs.strategies import configure_tagged_union

import infinistore
from infinistore.demo.prompts import (
    DemoError,
    KVLayout,
    block_content,
    block_key,
    block_keys,
    chunk_names,
    first_difference,
)

if TYPE_CHECKING:
    from infinistore.client import AsyncStore, PrefixMatch

_HOLD_S = 60.0  # an upper bound; the hold is released as soon as the prefix is loaded
_MAX_LINE_BYTES = 16 << 20


def gigabytes_per_s(payload_bytes: int, seconds: float) -> float | None:
    """Return the rate, or None where nothing was moved."""
    return payload_bytes / seconds / 1e9 if payload_bytes and seconds > 0 else None


# Messages

Work: TypeAlias = Literal["computed", "written", "loaded", "checked"]
"""The kind of work. Prefill computes and writes; both load and check."""


@frozen
class Setup:
    """The store, the layout, and the speed of the simulated model."""

    url: str
    layout: KVLayout
    prefill_tokens_per_s: float


@frozen
class Job:
    """One prompt: its name and its token ids."""

    prompt: str
    tokens: list[int]
    may_miss: bool = False
    """Whether blocks may be missing, because a node was lost or joins."""


@frozen
class Ready:
    """The worker has opened the store."""

    pid: int
    transport: str


@frozen
class Matched:
    """The worker has looked up the longest stored prefix of the prompt."""

    tokens: int
    hit_tokens: int
    """Leading tokens in the store, a multiple of the chunk length."""
    blocks: int
    """Blocks of these tokens."""
    disk_blocks: int
    """How many of them are on disk only."""


@frozen
class LayerDone:
    """One layer of all chunks of the job was computed, written, loaded or checked."""

    work: Work
    layer: int
    payload_bytes: int
    busy_s: float
    """Time of this work for this layer, without waiting for other work."""


@frozen
class Finished:
    """The job is done, and every loaded byte was correct. `load_s` and `write_s` are
    the time spent in calls to the store."""

    tokens: int
    hit_tokens: int
    loaded_bytes: int
    load_s: float
    disk_blocks: int
    """How many of the loaded blocks were on disk only."""
    computed_tokens: int = 0
    """Tokens whose cache was not stored; 0 for decode, which does not compute."""
    compute_s: float = 0.0
    """Time of the simulated model for them, without delays."""
    written_bytes: int = 0
    write_s: float = 0.0
    compute_and_write_s: float = 0.0
    """From the first layer's start to the last block's commit."""
    unstored_blocks: int = 0
    """How many blocks had no node to take them."""

    @property
    def storing_added_s(self) -> float:
        """How much longer prefill took because it stored what it computed. Writes that
        hide behind compute are free."""
        return max(0.0, self.compute_and_write_s - self.compute_s)

    def load_as_json(self) -> dict[str, Any]:
        """Return the figures of loading as plain data; keys end in their units."""
        return {
            "hit_tokens": self.hit_tokens,
            "loaded_bytes": self.loaded_bytes,
            "load_s": self.load_s,
            "load_gb_per_s": gigabytes_per_s(self.loaded_bytes, self.load_s),
        }


@frozen
class Failed:
    """The worker gives up; `message` is one line for the reader."""

    message: str


Event: TypeAlias = Ready | Matched | LayerDone | Finished | Failed
Message: TypeAlias = Setup | Job | Event

_CONVERTER = make_converter()
configure_tagged_union(Message, _CONVERTER, tag_name="kind")


def encode(message: Message) -> bytes:
    """Return a message as a line, with its end."""
    return _CONVERTER.dumps(message, Message).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return what `encode` encoded. Anything else raises `ValueError` or one of cattrs'
    errors."""
    return _CONVERTER.loads(line, Message)  # type: ignore[arg-type]  # a union is not a class to mypy


class LineReader:
    """Splits the bytes of `stream` into lines. The caller closes the stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._read = b""

    async def next_line(self) -> bytes | None:
        """Return the next line without its end, or None at the end of the stream.

        A line of more than 16 MiB raises `ValueError`. Cancellation loses no bytes.
        """
        while b"\n" not in self._read:
            data = await self._stream.receive_some()
            if not data:
                rest, self._read = self._read, b""
                return rest or None
            self._read += data
            if len(self._read) > _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        line, _, self._read = self._read.partition(b"\n")
        return line


def expected_error(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """Return the first expected error in `group`, to be reported in one line; None if
    the group contains another error, which is a bug.
    """
    expected, unexpected = group.split((DemoError, infinistore.InfiniStoreException))
    return None if expected is None or unexpected is not None else _first(expected)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _send(event: Event) -> None:
    sys.stdout.write(encode(event).decode())
    sys.stdout.flush()


# Work

Layer: TypeAlias = list[tuple[str, bytes]]
"""One layer of all new chunks: keys and blocks for `put_many`."""


@frozen
class Worker:
    """Does jobs for the demonstration."""

    store: "AsyncStore"
    setup: Setup

    async def decode(self, job: Job) -> Finished:
        """Load and check the prompt's full chunks. All must exist, as prefill has
        stored them, unless the job says otherwise.
        """
        names = chunk_names(self.setup.layout, job.tokens)
        loaded = await self._load(job, names)
        found = loaded.hit_tokens // self.setup.layout.chunk_tokens
        if found < len(names) and not job.may_miss:
            raise DemoError(
                f"prefill stored {len(names)} chunks of prompt {job.prompt}, but only the first {found} are still "
                "there: others write to this store, or its pool or its disk has no room for them"
            )
        return loaded

    async def prefill(self, job: Job) -> Finished:
        """Load the stored prefix of the prompt, compute the rest, and store it."""
        layout = self.setup.layout
        names = chunk_names(layout, job.tokens)
        loaded = await self._load(job, names)
        new_names = names[loaded.hit_tokens // layout.chunk_tokens :]
        computed_tokens = loaded.tokens - loaded.hit_tokens
        compute_s = computed_tokens / self.setup.prefill_tokens_per_s

        started = time.perf_counter()
        write_s, unstored = 0.0, 0
        to_write, computed = trio.open_memory_channel[Layer](1)  # one layer may wait while another is being written
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._compute, new_names, to_write, compute_s / layout.layers)
            number = 0
            async for layer in computed:
                took_s, refused = await self._write(number, layer)
                write_s, unstored, number = write_s + took_s, unstored + refused, number + 1
        return evolve(
            loaded,
            computed_tokens=computed_tokens,
            compute_s=compute_s,
            written_bytes=len(new_names) * layout.chunk_bytes,
            write_s=write_s,
            compute_and_write_s=time.perf_counter() - started,
            unstored_blocks=unstored,
        )

    async def _load(self, job: Job, names: Sequence[bytes]) -> Finished:
        """Load and check the leading chunks of `names` that are completely stored.
        Memory: one layer of all found chunks.

        Raises `DemoError`, which names the block and the byte, if a byte is wrong or a
        held block is missing.
        """
        layout = self.setup.layout
        match = await self._match(block_keys(layout, names))
        try:
            found = names[: int(match) // layout.layers]
            blocks = len(found) * layout.layers
            disk_blocks = max(0, blocks - match.in_memory)
            tokens, hit_tokens = len(job.tokens), len(found) * layout.chunk_tokens
            _send(Matched(tokens, hit_tokens, blocks, disk_blocks))
            load_s, loaded_bytes = 0.0, 0
            # One buffer for all layers: its memory is touched once, and an engine loads
            # into pages it has, too.
            memory = memoryview(bytearray(len(found) * layout.block_bytes))
            for layer in range(layout.layers if found else 0):
                took_s, of_layer = await self._load_and_check_layer(job, found, layer, memory)
                load_s, loaded_bytes = load_s + took_s, loaded_bytes + of_layer
        finally:
            if match.hold:
                with trio.CancelScope(shield=True):
                    await self.store.release_hold(match.hold)
        return Finished(tokens, hit_tokens, loaded_bytes, load_s, disk_blocks)

    async def _match(self, keys: list[str]) -> "PrefixMatch":
        """Count the leading keys, and hold them until they are read."""
        try:
            return await self.store.match_prefix(keys, hold_s=_HOLD_S)
        except infinistore.LimitExceeded:
            # A server holds no more than a part of its pool. Without a hold a block may
            # be gone when we come to load it: an engine computes it then, and this
            # demonstration reports it.
            return await self.store.match_prefix(keys)

    async def _load_and_check_layer(
        self, job: Job, names: Sequence[bytes], layer: int, memory: memoryview
    ) -> tuple[float, int]:
        """Load one layer of all chunks in one call, then check it. Returns the load
        time, and how many bytes were loaded.

        The time does not include the check, which does not overlap with loading the
        next layer: that would distort the measurement.
        """
        layout = self.setup.layout
        size = layout.block_bytes
        blocks = [memory[size * number : size * (number + 1)] for number in range(len(names))]
        items = [(block_key(name, layer), block) for name, block in zip(names, blocks, strict=True)]
        started = time.perf_counter()
        lengths = await self.store.get_many_into(items)
        loaded = time.perf_counter()
        _send(LayerDone("loaded", layer, len(memory), loaded - started))
        for chunk, (name, (key, block), length) in enumerate(zip(names, items, lengths, strict=True)):
            where = f"layer {layer} of chunk {chunk} (key {key})"
            if length is None and job.may_miss:
                continue
            if length is None:
                raise DemoError(f"{where} was there a moment ago and is missing now")
            expected = block_content(layout, name, layer)
            place = first_difference(expected, block[:length])
            if place is not None:
                got = f"is {block[place]:#04x}" if place < length else "is missing"
                raise DemoError(f"{where} is wrong: byte {place} {got} and should be {expected[place]:#04x}")
            await trio.lowlevel.checkpoint()
        _send(LayerDone("checked", layer, len(memory), time.perf_counter() - loaded))
        return loaded - started, sum(length for length in lengths if length is not None)

    async def _compute(self, names: Sequence[bytes], to_write: trio.MemorySendChannel[Layer], layer_s: float) -> None:
        """Create the layers in order, at the speed of the simulated model."""
        layout = self.setup.layout

        def make_layer(layer: int) -> Layer:
            return [(block_key(name, layer), block_content(layout, name, layer)) for name in names]

        async with to_write:
            for number in range(layout.layers):
                started, deadline = time.perf_counter(), trio.current_time() + layer_s
                layer = await trio.to_thread.run_sync(make_layer, number)
                await trio.sleep_until(deadline)
                _send(LayerDone("computed", number, len(names) * layout.block_bytes, time.perf_counter() - started))
                await to_write.send(layer)

    async def _write(self, number: int, layer: Layer) -> tuple[float, int]:
        """Store one layer of all new chunks in one call. Returns the time in seconds,
        and how many blocks had no node to take them.
        """
        if not layer:  # everything was found, and what is left fills no chunk
            return 0.0, 0
        started, refused = time.perf_counter(), 0
        try:
            await self.store.put_many(layer)
        except infinistore.PartialPut as error:  # a node was lost, and its part is computed again next time
            refused = len(layer) - len(error.stored)
        took_s = time.perf_counter() - started
        _send(LayerDone("written", number, len(layer) * self.setup.layout.block_bytes, took_s))
        return took_s, refused


def main(title: str) -> None:
    """Be a worker until there are no more jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return trio.run(_serve_orders, title)
    except BaseExceptionGroup as group:
        if (error := expected_error(group)) is None:
            raise
        _send(Failed(_line(error)))
    except (DemoError, infinistore.InfiniStoreException) as error:
        _send(Failed(_line(error)))
    sys.exit(1)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _serve_orders(title: str) -> None:
    # FdStream closes what it is given, and standard input is not ours to close.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as standard_input:
        lines = LineReader(standard_input)
        setup = decode(await lines.next_line() or b"")
        if not isinstance(setup, Setup):
            raise DemoError("the first order of a worker must be its setup")
        async with infinistore.open_store(setup.url) as store:
            worker = Worker(store, setup)
            work = worker.prefill if title == "prefill" else worker.decode
            _send(Ready(os.getpid(), (await store.stats()).transport))
            while (line := await lines.next_line()) is not None:
                job = decode(line)
                if not isinstance(job, Job):
                    raise DemoError("a worker that has been set up takes jobs only")
                _send(await work(job))


if __name__ == "__main__":
    main(sys.argv[1])
