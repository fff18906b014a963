"""Whether a request loads what the store has of its prompt, or computes it: with the
setting `"load": "faster"`, what workers measure of their reads, and what the scheduler
concludes from that and from its steps.

`infinistore.scheduling` decides. Here is what it needs to know: how much each worker
has read in how many seconds and how much waits, from the store's memory and from its
disks; and which parts of prompts each step has computed in how many seconds.

What is read counts in tokens that need not be computed. Bytes do not compare: stages of
a pipeline have different numbers of layers, and of sliding windows little is read.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs

from infinistore.integrations.vllm.observations import Observations
from infinistore.scheduling import Advice, LoadAdvisor

_log = logging.getLogger("vllm.infinistore")
_LONG_S: Final = 1.0
"""After so long, a read that goes on is reported."""
_TOKEN: Final = 1024
"""What a token counts for, where bytes are expected."""


@attrs.frozen
class Reads:
    """What was read from one medium since the last report, and what waits."""

    tokens: float
    seconds: float
    """In which at least one read was under way."""
    waiting_tokens: float


@attrs.frozen
class LinkReport:
    """What one worker has read."""

    memory: Reads | None = None
    disk: Reads | None = None


class LinkMeter:
    """Measures the reads of one worker from one medium. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = self._ended = 0
        self._waiting = self._tokens = self._seconds = self._since = 0.0

    def queue(self, tokens: float) -> None:
        """Note that so much is to be read."""
        with self._lock:
            self._waiting += tokens

    def begin(self) -> None:
        """Note that a load begins."""
        with self._lock:
            self._count_time()
            self._under_way += 1

    def read(self, tokens: float) -> None:
        """Note that a load under way has read so much."""
        with self._lock:
            self._tokens += tokens
            self._waiting -= tokens

    def end(self, left: float) -> None:
        """Note that a load has ended, and so much of it is not read any more."""
        with self._lock:
            self._count_time()
            self._under_way -= 1
            self._ended += 1
            self._waiting -= left

    def take(self) -> Reads | None:
        """Return what is new since the last report; None if that is nothing, or only a
        part of a short read."""
        with self._lock:
            self._count_time()
            if not self._ended and self._seconds < _LONG_S:
                return None
            reads = Reads(self._tokens, self._seconds, self._waiting)
            self._ended = 0
            self._tokens = self._seconds = 0.0
            return reads

    def _count_time(self) -> None:
        now = self._clock()
        if self._under_way:
            self._seconds += now - self._since
        self._since = now


class LoadChoice:
    """Chooses for the requests of one engine. One thread uses it.

    `ranks` is the number of its workers. Until each has reported a load, all is
    loaded.
    """

    def __init__(self, clock: Callable[[], float], *, ranks: int, observations: Observations) -> None:
        self._clock = clock
        self._observed = observations
        self._advisor = LoadAdvisor(clock, rank_bytes_per_token=_TOKEN, ranks=ranks)
        self._planned = 0
        self._steps: dict[int, tuple[float, Sequence[tuple[int, int]]]] = {}
        """The steps under way, by number: when they were planned, and what of prompts
        is in them."""
        self._ended = clock()
        self._prefers_loading: bool | None = None

    def planned(self, chunks: Sequence[tuple[int, int]]) -> int:
        """Note that a step is planned, with these parts of prompts; return its
        number."""
        self._planned += 1
        self._steps[self._planned] = self._clock(), chunks
        return self._planned

    def ended(self, number: int, reports: Mapping[int, LinkReport]) -> None:
        """Note that a step has ended, with reports by rank."""
        now = self._clock()
        for rank, report in reports.items():
            for reads, disk in ((report.memory, False), (report.disk, True)):
                if reads is not None:
                    self._advisor.loaded(rank, round(_TOKEN * reads.tokens), reads.seconds, disk=disk)
                    self._advisor.waiting(rank, round(_TOKEN * reads.waiting_tokens), disk=disk)
        step = self._steps.get(number)
        self._steps = {other: planned for other, planned in self._steps.items() if other > number}
        if step is not None:
            planned, chunks = step
            # The next step may be planned before this one has ended.
            self._advisor.step(max(planned, self._ended), now, chunks)
        self._ended = now
        self._tell_side()

    def loads(
        self,
        request_id: str,
        *,
        tokens: int,
        cached_tokens: int,
        stored_tokens: int,
        is_on_disk: bool,
        queued: Sequence[tuple[int, int]],
    ) -> Advice:
        """Return whether a request should load what the store has of its prompt: the
        tokens from `cached_tokens` to `stored_tokens`. `queued` are the parts of other
        prompts that are computed before."""
        advisor = self._advisor
        before = advisor.statistics
        advice = advisor.advise(
            request_id,
            tokens=tokens,
            cached_tokens=cached_tokens,
            stored_tokens=stored_tokens,
            disk_tokens=stored_tokens - cached_tokens if is_on_disk else 0,
            queued_s=sum(advisor.compute_s(first, end) for first, end in queued),
        )
        after = advisor.statistics
        self._observed.count(
            tried_loads=after.trials - before.trials,
            skipped_loads=after.skipped_loads - before.skipped_loads,
            skipped_tokens=after.skipped_tokens - before.skipped_tokens,
        )
        return advice

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._advisor.forget(request_id)

    def _tell_side(self) -> None:
        prefers = self._advisor.prefers_loading
        if prefers is None or prefers is self._prefers_loading:
            return
        self._prefers_loading = prefers
        _log.info(
            "InfiniStore: %s is faster now: a prompt of 4,096 tokens takes %.3g s to compute",
            "loading" if prefers else "computing",
            self._advisor.compute_s(0, 4096),
        )
