"""An etcd in memory with virtual time, and a world that runs flows against it.

It answers as etcd 3.4 was seen to: `tests/cluster_io` runs the same flows against a
real one.
"""

import heapq
import itertools
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from infinistore.cluster.etcd.gateway import Answer
from infinistore.cluster.etcd.session import EtcdUnavailable, Exchange, Flow, NextLine, OpenStream, Pause, Post, Probe
from infinistore.cluster.membership import Node


def coded(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def decoded(text: str) -> str:
    return b64decode(text).decode()


@attrs.define
class Kv:
    value: str
    create_revision: int
    mod_revision: int
    lease: int

    def document(self, key: str) -> dict[str, str]:
        found = {
            "key": coded(key),
            "value": coded(self.value),
            "create_revision": str(self.create_revision),
            "mod_revision": str(self.mod_revision),
        }
        return found | ({"lease": str(self.lease)} if self.lease else {})


class FakeEtcd:
    """One etcd, whose members differ only in whether they answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.kvs: dict[str, Kv] = {}
        self.revision = 1
        self.compacted = 0
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.leases: dict[int, list[float]] = {}  # the time to live, and when it ends
        self.away: set[int] = set()
        """The members that do not answer."""
        self.calls: list[tuple[int, str]] = []
        self.password = ""
        self.tokens: set[str] = set()
        self._ids = itertools.count(7000)

    def expire(self) -> None:
        for lease in [lease for lease, (_, ends) in self.leases.items() if ends <= self._clock()]:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        del self.leases[lease]
        for key in [key for key, kv in self.kvs.items() if kv.lease == lease]:
            self.delete(key)

    def refill_leases(self) -> None:
        """What a new leader does."""
        for lease in self.leases.values():
            lease[1] = self._clock() + lease[0]

    def empty(self) -> None:
        """Restart with nothing on disk."""
        self.kvs, self.revision, self.compacted, self.events, self.leases = {}, 1, 0, [], {}

    def compact(self) -> None:
        self.compacted = self.revision
        self.events.clear()

    def put(self, key: str, value: str, lease: int = 0) -> None:
        self.revision += 1
        self._put_at(self.revision, key, value, lease)

    def delete(self, key: str) -> None:
        self.revision += 1
        self._delete_at(self.revision, key)

    def _put_at(self, revision: int, key: str, value: str, lease: int) -> None:
        created = self.kvs[key].create_revision if key in self.kvs else revision
        self.kvs[key] = Kv(value, created, revision, lease)
        self.events.append((revision, {"kv": self.kvs[key].document(key)}))

    def _delete_at(self, revision: int, key: str) -> None:
        if self.kvs.pop(key, None) is not None:
            self.events.append((revision, {"type": "DELETE", "kv": {"key": coded(key), "mod_revision": str(revision)}}))

    # The gateway

    def _header(self) -> dict[str, str]:
        return {"revision": str(self.revision)}

    def answer(self, post: Post) -> Answer:
        self.calls.append((post.endpoint, post.path))
        self.expire()
        body = json.loads(post.body)
        if post.path == "/v3/auth/authenticate":
            if body["password"] != self.password:
                return self._error(400, 3, "etcdserver: authentication failed, invalid user ID or password")
            token = f"token {next(self._ids)}"
            self.tokens.add(token)
            return self._ok({"token": token})
        if self.password and not post.token:
            return self._error(400, 3, "etcdserver: user name is empty")
        if self.password and post.token not in self.tokens:
            return self._error(401, 16, "etcdserver: invalid auth token")
        handlers = {
            "/v3/kv/range": self._range,
            "/v3/kv/txn": self._txn,
            "/v3/lease/grant": self.grant,
            "/v3/lease/keepalive": self._keep_alive,
            "/v3/lease/revoke": self._revoke,
        }
        return handlers[post.path](body)

    def _ok(self, document: dict[str, Any]) -> Answer:
        return Answer(200, json.dumps({"header": self._header(), **document}).encode())

    def _error(self, status: int, code: int, message: str) -> Answer:
        return Answer(status, json.dumps({"error": message, "message": message, "code": code}).encode())

    def _found(self, body: dict[str, Any]) -> list[dict[str, str]]:
        first = decoded(body["key"])
        last = decoded(body["range_end"]) if "range_end" in body else first + "\0"
        return [kv.document(key) for key, kv in sorted(self.kvs.items()) if first <= key < last]

    def _range(self, body: dict[str, Any]) -> Answer:
        return self._ok({"kvs": self._found(body)})

    def _txn(self, body: dict[str, Any]) -> Answer:
        holds = all(
            (self.kvs[key].mod_revision if (key := decoded(one["key"])) in self.kvs else 0) == int(one["mod_revision"])
            for one in body["compare"]
        )
        if not holds:
            return self._ok(
                {"responses": [{"response_range": {"kvs": self._found(body["failure"][0]["request_range"])}}]}
            )
        puts = [one["request_put"] for one in body["success"] if "request_put" in one]
        if any(int(one["lease"]) and int(one["lease"]) not in self.leases for one in puts):
            return self._error(404, 5, "etcdserver: requested lease not found")
        self.revision += 1
        for one in puts:
            self._put_at(self.revision, decoded(one["key"]), decoded(one["value"]), int(one["lease"]))
        for one in body["success"]:
            if "request_delete_range" in one:
                self._delete_at(self.revision, decoded(one["request_delete_range"]["key"]))
        return self._ok({"succeeded": True, "responses": [{} for _ in body["success"]]})

    def grant(self, body: dict[str, Any]) -> Answer:
        lease, ttl = next(self._ids), int(body["TTL"])
        self.leases[lease] = [ttl, self._clock() + ttl]
        return self._ok({"ID": str(lease), "TTL": str(ttl)})

    def _keep_alive(self, body: dict[str, Any]) -> Answer:
        lease = int(body["ID"])
        if lease not in self.leases:
            return self._ok({"result": {"header": self._header(), "ID": str(lease)}})
        self.leases[lease][1] = self._clock() + self.leases[lease][0]
        return self._ok({"result": {"ID": str(lease), "TTL": str(int(self.leases[lease][0]))}})

    def _revoke(self, body: dict[str, Any]) -> Answer:
        if int(body["ID"]) not in self.leases:
            return self._error(404, 5, "etcdserver: requested lease not found")
        self.revoke(int(body["ID"]))
        return self._ok({})


@attrs.define(eq=False)
class Stream:
    """A watch, as far as it has been read."""

    member: int
    start: int
    lines: list[bytes] = attrs.field(factory=list)
    silent: bool = False
    canceled: bool = False


@attrs.define(eq=False)
class Running:
    """A flow that waits: for a time, or for a line."""

    flow: Flow[Any]
    due: float = 0.0
    reads: bool = False
    error: BaseException | None = None
    done: bool = False
    stream: Stream | None = None
    woken: bool = False


class World:
    """Runs flows in virtual time. `reachable` are the instances that answer a probe."""

    def __init__(self, members: int = 1) -> None:
        self.now = 0.0
        self.etcd = FakeEtcd(lambda: self.now)
        self.members = members
        self.flows: list[Running] = []
        self.reachable: dict[str, str] = {}
        self.probed: list[tuple[str, ...]] = []

    def clock(self) -> float:
        return self.now

    def start(self, flow: Flow[Any]) -> Running:
        running = Running(flow)
        self.flows.append(running)
        self._step(running, flow.send, None)
        return running

    def stop(self, running: Running) -> None:
        running.flow.close()
        running.done = True

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            self.etcd.expire()
            self._deliver()
            waiting = [(flow.due, number) for number, flow in enumerate(self.flows) if not flow.done]
            heapq.heapify(waiting)
            ends = [ends for _, ends in self.etcd.leases.values() if self.now < ends < end]
            until = min([end, *ends, *(due for due, _ in waiting)])
            self.now = max(self.now, until)
            if waiting and waiting[0][0] <= self.now and waiting[0][0] < end:
                flow = self.flows[waiting[0][1]]
                self._step(flow, flow.flow.send, None)
            elif until == end:
                self.etcd.expire()
                self._deliver()
                return

    def cut_streams(self) -> None:
        """Every watch breaks."""
        for flow in self.flows:
            if flow.stream is not None and not flow.done:
                flow.stream = None
                if flow.reads:
                    self._step(flow, flow.flow.throw, EtcdUnavailable("the watch broke"))

    def wake(self, flow: Running) -> None:
        flow.due = self.now

    def _deliver(self) -> None:
        """Pass on what has come by watches."""
        for flow in self.flows:
            while flow.reads and not flow.done and flow.stream is not None and (line := self._next_line(flow.stream)):
                self._step(flow, flow.flow.send, line)

    def _next_line(self, stream: Stream) -> bytes | None:
        if stream.lines:
            return stream.lines.pop(0)
        if stream.silent or stream.canceled or stream.member in self.etcd.away:
            return None
        events = [event for revision, event in self.etcd.events if revision >= stream.start]
        if not events:
            return None
        stream.start = self.etcd.revision + 1
        return json.dumps({"result": {"header": {"revision": str(self.etcd.revision)}, "events": events}}).encode()

    def _open(self, effect: OpenStream) -> Stream:
        start = int(json.loads(effect.body)["create_request"]["start_revision"])
        stream = Stream(effect.endpoint, start)
        stream.lines.append(json.dumps({"result": {"header": {"revision": "9"}, "created": True}}).encode())
        if start <= self.etcd.compacted:
            canceled = {"canceled": True, "compact_revision": str(self.etcd.compacted)}
            stream.lines.append(json.dumps({"result": {"header": {}, **canceled}}).encode())
            stream.canceled = True
        return stream

    def _step(self, running: Running, resume: Callable[[Any], Any], value: Any) -> None:
        running.reads = False
        try:
            while True:
                effect = resume(value)
                resume, value = running.flow.send, None
                match effect:
                    case Exchange() | OpenStream() if effect.endpoint in self.etcd.away:
                        resume, value = running.flow.throw, EtcdUnavailable(f"member {effect.endpoint} is away")
                    case Exchange():
                        value = self.etcd.answer(effect)
                    case OpenStream():
                        running.stream = self._open(effect)
                    case Pause() | NextLine():
                        seconds = effect.seconds if isinstance(effect, Pause) else effect.timeout_s
                        running.due, running.reads = self.now + seconds, isinstance(effect, NextLine)
                        return
                    case Probe():
                        self.probed.append(tuple(node.id for node in effect.nodes))
                        value = self._answering(effect.nodes)
        except StopIteration:
            running.done = True
        except Exception as error:  # noqa: BLE001  # what a flow ends with is what a test looks at
            running.done, running.error = True, error

    def _answering(self, nodes: Iterable[Node]) -> frozenset[str]:
        return frozenset(node.id for node in nodes if self.reachable.get(node.id) == node.instance)
