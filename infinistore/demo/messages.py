"""Messages between the demonstration and its workers: one JSON object per line; and
expected failures, which a worker reports with the last of them.

The demonstration writes a `Setup`, followed by `Job`s, to a worker's standard input.
The worker writes events to its standard output: `Ready` once, then for each job
`Matched`, a `LayerDone` per layer and kind of work, and `Finished`. `Failed` may occur
at any time and is the last event. The end of input means the end of work.

Addresses and tokens are part of messages instead of arguments, which every user of the
machine can read.
"""

import sys
from collections import deque
from typing import Literal, TypeAlias

import trio
from attrs import frozen
from cattrs.preconf.json import JsonConverter, make_converter
from cattrs.strategies import configure_tagged_union

from infinistore.demo.layout import KVLayout
from infinistore.errors import InfiniStoreException


class DemoError(Exception):
    """The demonstration cannot continue, or a byte was wrong. The message is
    one line.
    """


def expected_error(group: BaseExceptionGroup[BaseException]) -> DemoError | InfiniStoreException | None:
    """Return the first expected error in `group`, to be reported in one line.

    None if the group contains another error, which is a bug.
    """
    expected, unexpected = group.split((DemoError, InfiniStoreException))
    if expected is None or unexpected is not None:
        return None
    error = _first(expected)
    assert isinstance(error, DemoError | InfiniStoreException)
    return error


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


_MAX_LINE_BYTES = 16 << 20

Work: TypeAlias = Literal["computed", "written", "loaded", "checked"]
"""The kind of work. Prefill computes and writes; both load and check."""


@frozen
class Setup:
    """The configuration of a worker."""

    url: str
    layout: KVLayout
    prefill_tokens_per_s: float
    """The speed of the simulated model."""


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
    """The transport from `stats()`, such as `tcp`."""


@frozen
class Matched:
    """The worker has looked up the longest stored prefix of the prompt."""

    prompt: str
    tokens: int
    hit_tokens: int
    """Number of leading tokens in the store, a multiple of the chunk length."""
    blocks: int = 0
    """Number of blocks that these tokens have."""
    disk_blocks: int = 0
    """How many of them are on disk only."""


@frozen
class LayerDone:
    """One layer of all chunks of this job was computed, written, loaded or checked."""

    prompt: str
    work: Work
    layer: int
    payload_bytes: int
    busy_s: float
    """Time of this work for this layer, without waiting for other work."""


@frozen
class Finished:
    """The job is done, and every loaded byte was correct. Monotonic times in
    seconds.
    """

    prompt: str
    tokens: int
    hit_tokens: int
    loaded_bytes: int
    load_s: float
    """Time spent in calls to the store that load."""
    disk_blocks: int
    """How many of the loaded blocks were on disk only."""
    computed_tokens: int = 0
    """Tokens whose cache was not stored; 0 for decode, which does not compute."""
    compute_s: float = 0.0
    """Time of the simulated model for them, without delays."""
    written_bytes: int = 0
    write_s: float = 0.0
    """Time spent in calls to the store that write."""
    compute_and_write_s: float = 0.0
    """From the first layer's start to the last block's commit.

    Without overlap, it would be the sum of `compute_s` and `write_s`.
    """
    unstored_blocks: int = 0
    """How many blocks had no node to take them."""

    @property
    def storing_added_s(self) -> float:
        """How much longer prefill took because it stored what it computed. Writes that
        hide behind compute are free.
        """
        return max(0.0, self.compute_and_write_s - self.compute_s)

    def computing_instead_s(self, prefill_tokens_per_s: float) -> float:
        """Return what computing the tokens that were loaded would have taken, at the
        speed of the simulated model.
        """
        return self.hit_tokens / prefill_tokens_per_s

    def saved_s(self, prefill_tokens_per_s: float) -> float:
        """Return what loading saved compared with computing; negative if the store was
        the slower way.
        """
        return self.computing_instead_s(prefill_tokens_per_s) - self.load_s


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
    """Return `order` as a line, with its end."""
    return _CONVERTER.dumps(order, Order).encode() + b"\n"


def decode_order(line: bytes | str) -> Order:
    """Return what `encode_order` encoded. Anything else raises `ValueError` or one of
    cattrs' errors.
    """
    return _CONVERTER.loads(line, Order)  # type: ignore[arg-type]  # a union is not a class to mypy


def send_event(event: Event) -> None:
    """Write `event` to standard output, and flush it."""
    sys.stdout.write(_CONVERTER.dumps(event, Event) + "\n")
    sys.stdout.flush()


def decode_event(line: bytes | str) -> Event:
    """Return what `send_event` wrote. Anything else raises `ValueError` or one of
    cattrs' errors.
    """
    return _CONVERTER.loads(line, Event)  # type: ignore[arg-type]  # a union is not a class to mypy


class LineReader:
    """Splits the bytes of `stream` into lines. The caller closes the stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._rest = b""

    async def next_line(self) -> bytes | None:
        """Return the next line without its end, or None at the end of the stream.

        A line of more than 16 MiB raises `ValueError`. Cancellation loses no bytes.
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
