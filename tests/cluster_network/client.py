"""A client of a cluster under load, as a program: `python -m
tests.cluster_network.client URL`. It checks every value that it reads.

A value says its key and its version. A get returns nothing, or the value of that key in
a version that somebody has begun to put. A node that has stayed in the view all the
time also returns none that is older than the last that was stored before the get.

A line of standard input is a command, in JSON, and is answered by one line: `["start"]`
begins, `["begin", VICTIM]` forgets what was seen so far, `["view", IDS, SECONDS]` and
`["hits", NODE, SECONDS]` wait for a view, and until a node has what it should have, and
`["report"]` says what was seen.
"""

import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from infinistore import blocking
from infinistore.cluster.locate import parse_cluster_url
from infinistore.cluster.placement import Placement
from infinistore.cluster.view import View
from infinistore.cluster_io.thread import open_membership
from infinistore.errors import PartialPut

KEYS = [f"key-{number}" for number in range(600)]
BATCH = 16
PAUSE_S = 0.002
RECENT = 200


def value_of(key: str, version: int) -> bytes:
    """Four times the same, so that a value made of two is seen."""
    return f"{key} {version} ".ljust(1024, ".").encode() * 4


def read_value(value: bytes) -> tuple[str, int]:
    key, version, _ = value[:1024].decode().split(" ", 2)
    return (key, int(version)) if value == value_of(key, int(version)) else ("", 0)


@attrs.define
class Seen:
    """What was seen since the last "begin"."""

    victim: str = ""
    asked: dict[str, int] = attrs.field(factory=dict)
    hits: dict[str, int] = attrs.field(factory=dict)
    first_miss_at: dict[str, float] = attrs.field(factory=dict)
    errors: list[str] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    views: list[tuple[float, list[str]]] = attrs.field(factory=list)
    lookups: int = 0
    longest_lookup_s: float = 0.0
    longest_get_s: float = 0.0
    puts: int = 0
    failed_puts: int = 0


class Client:
    def __init__(self, url: str, store: blocking.BlockingStore) -> None:
        self._store = store
        self._membership = open_membership(parse_cluster_url(url))
        self._membership.add_listener(self._note_view)
        self._news = threading.Condition()
        self._seen = Seen()
        self._home: dict[str, str] = {}
        self._recent: dict[str, deque[bool]] = {}
        self._begun = dict.fromkeys(KEYS, 0)
        self._stored = dict.fromkeys(KEYS, 0)
        self._unordered: set[str] = set()
        """Keys of which an older version may still arrive, or come back."""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin, with the nodes that are there."""
        view = self._membership.view
        owners = Placement(view).owners(KEYS)
        self._home = {key: view.nodes[owner].id for key, owner in zip(KEYS, owners, strict=True)}
        self._recent = {node.id: deque(maxlen=RECENT) for node in view.nodes}
        for start in range(0, len(KEYS), BATCH):
            self._put(KEYS[start : start + BATCH])
        for work in (self._write, self._read, self._look):
            thread = threading.Thread(target=self._repeat, args=(work,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._membership.close()

    def begin(self, victim: str) -> None:
        with self._news:
            self._seen = Seen(victim, views=[(time.monotonic(), self._ids(self._membership.view))])
            self._unordered |= {key for key in KEYS if self._home[key] == victim}
            for recent in self._recent.values():
                recent.clear()

    def view(self, ids: list[str], timeout_s: float) -> float | None:
        """Wait for a view of these nodes, all with their whole weights. Return when it
        was there; None if it was not in time.
        """

        def there() -> bool:
            view = self._membership.view
            return self._ids(view) == ids and all(node.weight == 100 for node in view.nodes)

        with self._news:
            return time.monotonic() if self._news.wait_for(there, timeout_s) else None

    def hit(self, node: str, timeout_s: float) -> bool:
        """Wait until nearly all of the keys of a node are found."""
        with self._news:
            recent = self._recent[node]
            recent.clear()
            return self._news.wait_for(lambda: len(recent) == RECENT and sum(recent) >= 0.99 * RECENT, timeout_s)

    def report(self) -> dict[str, Any]:
        with self._news:
            return attrs.asdict(self._seen)

    @staticmethod
    def _ids(view: View) -> list[str]:
        return [node.id for node in view.nodes]

    def _note_view(self, view: View) -> None:
        with self._news:
            self._seen.views.append((time.monotonic(), self._ids(view)))
            self._news.notify_all()

    def _repeat(self, work: Callable[[list[str]], None]) -> None:
        choose = random.Random(work.__name__)
        while not self._over.wait(PAUSE_S):
            try:
                work(choose.sample(KEYS, BATCH))
            except Exception as error:  # noqa: BLE001  # each is reported
                with self._news:
                    self._seen.errors.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def _write(self, keys: list[str]) -> None:
        self._put(keys)
        with self._news:
            self._seen.puts += 1

    def _put(self, keys: list[str]) -> None:
        for key in keys:
            self._begun[key] += 1
        versions = {key: self._begun[key] for key in keys}
        try:
            self._store.put_many({key: value_of(key, version) for key, version in versions.items()})
            stored = keys
        except PartialPut as error:
            stored = error.stored
            lost = {*error.failed, *error.unknown}
            if sorted([*stored, *lost]) != sorted(keys):
                raise
            self._unordered |= lost
            with self._news:
                self._seen.failed_puts += 1
        for key in stored:
            self._stored[key] = versions[key]

    def _read(self, keys: list[str]) -> None:
        least = {key: self._stored[key] for key in keys}
        began = time.monotonic()
        values = self._store.get_many(keys)
        now = time.monotonic()
        found = [None if value is None else read_value(bytes(value)) for value in values]
        with self._news:
            seen = self._seen
            seen.longest_get_s = max(seen.longest_get_s, now - began)
            for key, one in zip(keys, found, strict=True):
                home = self._home[key]
                self._recent[home].append(one is not None)
                seen.asked[home] = seen.asked.get(home, 0) + 1
                if one is None:
                    seen.first_miss_at.setdefault(home, now)
                    continue
                seen.hits[home] = seen.hits.get(home, 0) + 1
                oldest = 1 if key in self._unordered else least[key]
                if one[0] != key or not oldest <= one[1] <= self._begun[key]:
                    seen.wrong.append(f"{key}: {one}, stored {least[key]}, begun {self._begun[key]}")
            self._news.notify_all()

    def _look(self, keys: list[str]) -> None:
        began = time.monotonic()
        self._store.exists_many(keys)
        passed_s = time.monotonic() - began
        with self._news:
            self._seen.lookups += 1
            self._seen.longest_lookup_s = max(self._seen.longest_lookup_s, passed_s)


def main() -> None:
    url = sys.argv[1]
    with blocking.open_store(url) as store:
        client = Client(url, store)
        commands: dict[str, Callable[..., Any]] = {
            "start": client.start,
            "begin": client.begin,
            "view": client.view,
            "hits": client.hit,
            "report": client.report,
        }
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            sys.stdout.write(json.dumps(commands[name](*arguments)) + "\n")
            sys.stdout.flush()
        client.close()


if __name__ == "__main__":
    main()
