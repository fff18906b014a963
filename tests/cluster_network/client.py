"""A client of a cluster under load, as a program: `python -m
tests.cluster_network.client URL NAME`. It checks every value that it reads.

Each client writes keys of its own and reads those of all. A value says its key and its
version. A get returns nothing, or the value of that key in a version that its writer
has begun to put. A node that has stayed in the view all the time also returns none that
is older than the last that was stored before the get, or that was read before it.

A line of standard input is a command, in JSON, and is answered by one line: `["start"]`
begins, `["begin", VICTIM]` puts all keys again and forgets what was seen so far,
`["view", IDS, SECONDS]` and `["hits", NODE, SECONDS]` wait for a view, and until a node
has what it should have, and `["report"]` and `["begun"]` say what was
seen, and which version of each own key was begun to be put.
"""

import json
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from infinistore import blocking
from infinistore.cluster.locate import parse_cluster_url
from infinistore.cluster.membership import View
from infinistore.cluster.placement import Placement
from infinistore.cluster_io.thread import open_membership
from infinistore.errors import PartialPut

CLIENTS: Final = ("x", "y")
BATCH: Final = 16
PAUSE_S: Final = 0.005
RECENT: Final = 100
ANY: Final = "*"
"""A victim that may be any node: then no order is expected."""


def keys_of(client: str) -> list[str]:
    """The keys that a client writes."""
    return [f"{client}-{number}" for number in range(300)]


KEYS: Final = [key for client in CLIENTS for key in keys_of(client)]


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
    older: list[tuple[str, str]] = attrs.field(factory=list)
    """Keys of which a value came that is older than one that was seen before."""
    views: list[tuple[float, list[str]]] = attrs.field(factory=list)
    lookups: int = 0
    longest_lookup_s: float = 0.0
    longest_get_s: float = 0.0
    longest_put_s: float = 0.0
    puts: int = 0
    failed_puts: int = 0


class Client:
    def __init__(self, url: str, name: str, store: blocking.BlockingStore) -> None:
        self._store = store
        self._own = keys_of(name)
        self._membership = open_membership(parse_cluster_url(url))
        self._membership.add_listener(self._note_view)
        self._news = threading.Condition()
        self._putting = threading.Lock()
        self._seen = Seen()
        self._home: dict[str, str] = {}
        self._recent: dict[str, deque[bool]] = {}
        self._begun = dict.fromkeys(self._own, 0)
        self._least = dict.fromkeys(KEYS, 0)
        """The version that was stored, of the own keys, or read, of those of others."""
        self._highest = dict.fromkeys(KEYS, 0)
        self._unordered = set(KEYS)
        """Keys of which an older version may still arrive, or come back."""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin, with the nodes that are there."""
        view = self._membership.view
        owners = Placement(view).owners(KEYS)
        self._home = {key: view.nodes[owner].id for key, owner in zip(KEYS, owners, strict=True)}
        self._recent = {node.id: deque(maxlen=RECENT) for node in view.nodes}
        self._put_all()
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
        lost = self._put_all()
        with self._news:
            self._seen = Seen(victim, views=[(time.monotonic(), self._ids(self._membership.view))])
            self._unordered = lost | {key for key in KEYS if victim in (self._home[key], ANY)}
            self._least.update(dict.fromkeys(set(KEYS).difference(self._own), 0))
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
            return {**attrs.asdict(self._seen), "highest": self._highest, "unordered": sorted(self._unordered)}

    def begun(self) -> dict[str, int]:
        return self._begun

    @staticmethod
    def _ids(view: View) -> list[str]:
        return [node.id for node in view.nodes]

    def _note_view(self, view: View) -> None:
        with self._news:
            self._seen.views.append((time.monotonic(), self._ids(view)))
            self._news.notify_all()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._over.wait(PAUSE_S):
            try:
                work()
            except Exception as error:  # noqa: BLE001  # each is reported
                with self._news:
                    self._seen.errors.append("".join(traceback.format_exception(error)[-4:]))

    def _write(self) -> None:
        lost = self._put(random.sample(self._own, BATCH))
        with self._news:
            self._seen.puts += 1
            self._seen.failed_puts += bool(lost)
            self._unordered |= lost

    def _put_all(self) -> set[str]:
        starts = range(0, len(self._own), BATCH)
        return {key for start in starts for key in self._put(self._own[start : start + BATCH])}

    def _put(self, keys: Sequence[str]) -> set[str]:
        """Put a new version of each key; return the keys of which it was not stored."""
        with self._putting:
            for key in keys:
                self._begun[key] += 1
            began = time.monotonic()
            lost: set[str] = set()
            try:
                self._store.put_many({key: value_of(key, self._begun[key]) for key in keys})
            except PartialPut as error:
                lost = {*error.failed, *error.unknown}
                if sorted([*error.stored, *lost]) != sorted(keys):
                    raise
            with self._news:
                self._seen.longest_put_s = max(self._seen.longest_put_s, time.monotonic() - began)
                self._least.update({key: self._begun[key] for key in keys if key not in lost})
        return lost

    def _read(self) -> None:
        keys = random.sample(KEYS, BATCH)
        with self._news:
            period = self._seen
            least = {key: 1 if key in self._unordered else self._least[key] for key in keys}
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
                version = one[1]
                self._highest[key] = max(self._highest[key], version)
                if one[0] != key or version < 1 or version > self._begun.get(key, version):
                    seen.wrong.append(f"{key}: {one}, begun {self._begun.get(key)}")
                if seen is not period:
                    continue
                if version < least[key] and key not in self._unordered:
                    seen.older.append((key, f"version {version}, and {least[key]} was seen before"))
                if key not in self._begun:
                    self._least[key] = max(self._least[key], version)
            self._news.notify_all()

    def _look(self) -> None:
        began = time.monotonic()
        self._store.exists_many(random.sample(KEYS, BATCH))
        passed_s = time.monotonic() - began
        with self._news:
            self._seen.lookups += 1
            self._seen.longest_lookup_s = max(self._seen.longest_lookup_s, passed_s)


def main() -> None:
    _, url, name = sys.argv
    with blocking.open_store(url) as store:
        client = Client(url, name, store)
        commands: dict[str, Callable[..., Any]] = {
            "start": client.start,
            "begin": client.begin,
            "view": client.view,
            "hits": client.hit,
            "report": client.report,
            "begun": client.begun,
        }
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            sys.stdout.write(json.dumps(commands[command](*arguments)) + "\n")
            sys.stdout.flush()
        client.close()


if __name__ == "__main__":
    main()
