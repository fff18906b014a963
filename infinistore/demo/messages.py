"""What the demonstration and its two workers tell each other: one JSON object a line.

The demonstration writes a `Setup` and then one `Job` after another to a worker's standard input. The worker writes
events to its standard output as the work goes on: `Ready` once, then for each job `Matched`, a `LayerDone` for each
layer and each kind of work, and a `Finished`. `Failed` may come at any time and is the last thing that a worker says.
End of input means that there is no more work.

Addresses and tokens travel here and not as arguments of the processes, which every user of the machine can read.
"""

import sys
from collections import deque
from typing import Literal, TypeAlias

import trio
from attrs import frozen
from cattrs.preconf.json import JsonConverter, make_converter
from cattrs.strategies import configure_tagged_union

from infinistore.demo.layout import KVLayout

__all__ = [
    "Event",
    "Failed",
    "Finished",
    "Job",
    "LayerDone",
    "LineReader",
    "Matched",
    "Order",
    "Ready",
    "Setup",
    "Work",
    "decode_event",
    "decode_order",
    "encode_order",
    "send_event",
]

_MAX_LINE_BYTES = 16 << 20

Work: TypeAlias = Literal["computed", "written", "loaded", "checked"]
"""What was done to a layer. Prefill computes and writes; both load and check."""


@frozen
class Setup:
    """What a worker must know before its first job."""

    url: str
    layout: KVLayout
    prefill_tokens_per_s: float
    """The speed of the simulated model."""


@frozen
class Job:
    """One prompt to work on: its name and its token ids."""

    prompt: str
    tokens: list[int]


@frozen
class Ready:
    """The worker has opened the store."""

    pid: int
    transport: str
    """What `stats()` calls the path that the bytes take, such as `tcp`."""


@frozen
class Matched:
    """The worker has asked the store for the longest prefix of the prompt."""

    prompt: str
    tokens: int
    hit_tokens: int
    """How many leading tokens have all their blocks in the store: a multiple of the chunk length."""


@frozen
class LayerDone:
    """One layer of all the chunks that this job moves has been computed, written, loaded or checked."""

    prompt: str
    work: Work
    layer: int
    payload_bytes: int
    busy_s: float
    """How long this work took for this layer, waiting for other work not counted."""


@frozen
class Finished:
    """The job is done, and every byte that was loaded was right. Times are in seconds, by a monotonic clock."""

    prompt: str
    tokens: int
    hit_tokens: int
    loaded_bytes: int
    load_s: float
    """Time spent in calls to the store that load."""
    computed_tokens: int
    """Tokens whose cache was not in the store; 0 for decode, which leaves them to its engine."""
    compute_s: float
    """What the simulated model takes for them at its stated speed, if nothing holds it up."""
    written_bytes: int
    write_s: float
    """Time spent in calls to the store that write."""
    compute_and_write_s: float
    """From the first layer's start to the last block's commit. Without overlap: `compute_s` and `write_s` together."""


@frozen
class Failed:
    """The worker gives up; `message` is one line for the reader."""

    message: str


Order: TypeAlias = Setup | Job
Event: TypeAlias = Ready | Matched | LayerDone | Finished | Failed


def _make_converter() -> JsonConverter:
    converter = make_converter()
    for union in (Order, Event):
        configure_tagged_union(union, converter, tag_name="kind")
    return converter


_CONVERTER = _make_converter()


def encode_order(order: Order) -> bytes:
    """Return the line, with its end, that carries `order` to a worker."""
    return _CONVERTER.dumps(order, Order).encode() + b"\n"


def decode_order(line: bytes | str) -> Order:
    """Return what `encode_order` encoded. Anything else raises `ValueError` or one of cattrs' errors."""
    return _CONVERTER.loads(line, Order)  # type: ignore[arg-type]  # a union is not a class to mypy


def send_event(event: Event) -> None:
    """Write `event` to this process's standard output, at once."""
    sys.stdout.write(_CONVERTER.dumps(event, Event) + "\n")
    sys.stdout.flush()


def decode_event(line: bytes | str) -> Event:
    """Return what `send_event` wrote. Anything else raises `ValueError` or one of cattrs' errors."""
    return _CONVERTER.loads(line, Event)  # type: ignore[arg-type]  # a union is not a class to mypy


class LineReader:
    """Cuts what comes from `stream` into lines. The stream stays the caller's to close."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._rest = b""

    async def next_line(self) -> bytes | None:
        """Return the next line without its end, or None at the end of the stream.

        A line of more than 16 MiB raises `ValueError`. Cancelled, it loses nothing: what has arrived stays here.
        """
        while not self._lines:
            data = await self._stream.receive_some()
            if not data:
                rest, self._rest = self._rest, b""
                return rest or None
            *complete, self._rest = (self._rest + data).split(b"\n")
            self._lines.extend(complete)
            if len(self._rest) > _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        return self._lines.popleft()
