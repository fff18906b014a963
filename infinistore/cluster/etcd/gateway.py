"""The requests to etcd's JSON gateway, its answers, and HTTP/1.1 to one member of etcd,
without I/O: one request and its answer at a time.

The gateway of etcd 3.4 takes JSON by POST: keys and values in base64, integers of 64
bits as text, and what has its default value is left out. A watch is answered by a
stream of lines. The API is specified at https://etcd.io/docs/v3.4/learning/api/. Any
bytes that etcd sends are understood or raise `EtcdMisbehaved`.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import attrs
import h11

from infinistore.sizes import in_units

NOT_FOUND_CODE = 5
"""gRPC's code for a lease that there is no longer."""
UNAVAILABLE_CODES = (4, 14)
"""gRPC's deadline exceeded and unavailable: no leader, or no quorum."""


class EtcdRefused(Exception):
    """etcd answered with an error. `code` is gRPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class EtcdMisbehaved(Exception):
    """What answered is not etcd, or not one that is understood."""


@attrs.frozen
class Request:
    """A path of the gateway, and the object that is posted to it."""

    path: str
    body: dict[str, Any]

    def encode(self) -> bytes:
        """Return the body as it is sent."""
        return json.dumps(self.body).encode()


@attrs.frozen
class Answer:
    """An answer of HTTP."""

    status: int
    body: bytes


@attrs.frozen
class Item:
    """A key and its value. A `mod_revision` of 0 says that it does not exist."""

    key: str
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    lease: int = 0


@attrs.frozen
class Found:
    """What a range found, at a revision of all of etcd."""

    revision: int
    items: tuple[Item, ...]


@attrs.frozen
class Outcome:
    """What a transaction did; `items` are those that its range found."""

    succeeded: bool
    revision: int
    items: tuple[Item, ...]


@attrs.frozen
class Change:
    """A message of a watch. A deleted item has its `mod_revision`, and no value."""

    revision: int
    created: bool = False
    canceled: bool = False
    reason: str = ""
    written: tuple[Item, ...] = ()
    deleted: tuple[Item, ...] = ()

    def apply_to(self, items: dict[str, Item]) -> int:
        """Change these items, by their keys, one after the other as it was in etcd: a
        key may have been deleted and written again. What they know already may come
        once more. Returns the revision of the last change, 0 if there was none.
        """
        last = 0
        events = [(item.mod_revision, item, True) for item in self.written]
        events += [(item.mod_revision, item, False) for item in self.deleted]
        for revision, item, written in sorted(events, key=itemgetter(0)):
            known = items.get(item.key)
            if revision > (known.mod_revision if known is not None else 0) and (written or known is not None):
                if written:
                    items[item.key] = item
                else:
                    del items[item.key]
                last = revision
        return last


# Requests


def _coded(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _under(prefix: str) -> dict[str, str]:
    """All keys with a prefix: up to the first that is greater than all of them."""
    return {"key": _coded(prefix), "range_end": _coded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


def range_of(prefix: str) -> Request:
    """Ask for all keys with a prefix, as a quorum knows them."""
    return Request("/v3/kv/range", _under(prefix))


def put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Write a key, in a transaction. Without its lease, an item would outlive it."""
    return {"request_put": {"key": _coded(key), "value": _coded(value), "lease": str(lease)}}


def delete(key: str) -> dict[str, Any]:
    """Delete a key, in a transaction."""
    return {"request_delete_range": {"key": _coded(key)}}


def unless_changed(item: Item) -> dict[str, Any]:
    """Require that a key is still as it was read, or still does not exist."""
    return {"key": _coded(item.key), "target": "MOD", "result": "EQUAL", "mod_revision": str(item.mod_revision)}


def transaction(compare: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], otherwise_read: str) -> Request:
    """Do `then` if all comparisons hold; if not, read a key."""
    failure = [{"request_range": {"key": _coded(otherwise_read)}}]
    return Request("/v3/kv/txn", {"compare": list(compare), "success": list(then), "failure": failure})


def grant_lease(ttl_s: int) -> Request:
    """Ask for a lease."""
    return Request("/v3/lease/grant", {"TTL": str(ttl_s)})


def keep_alive(lease: int) -> Request:
    """Renew a lease."""
    return Request("/v3/lease/keepalive", {"ID": str(lease)})


def revoke_lease(lease: int) -> Request:
    """Give a lease up, and delete what was written under it."""
    return Request("/v3/lease/revoke", {"ID": str(lease)})


def watch(prefix: str, start_revision: int) -> Request:
    """Ask for every change of keys with a prefix, from a revision on."""
    return Request("/v3/watch", {"create_request": {**_under(prefix), "start_revision": str(start_revision)}})


def authenticate(user: str, password: str) -> Request:
    """Ask for a token."""
    return Request("/v3/auth/authenticate", {"name": user, "password": password})


# Answers


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        raise EtcdMisbehaved(f"the answer is not JSON: {body[:60]!r}") from None
    if not isinstance(decoded, dict):
        raise EtcdMisbehaved(f"the answer is no object: {body[:60]!r}")
    return decoded


def _object(holder: dict[str, Any], name: str) -> dict[str, Any]:
    found = holder.get(name, {})
    if not isinstance(found, dict):
        raise EtcdMisbehaved(f"{name} in the answer is no object")
    return found


def _objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = holder.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise EtcdMisbehaved(f"{name} in the answer is no list of objects")
    return found


def _integer(holder: dict[str, Any], name: str) -> int:
    try:
        return int(holder.get(name, 0))
    except (TypeError, ValueError, OverflowError):
        raise EtcdMisbehaved(f"{name} in the answer is no number") from None


def _text(holder: dict[str, Any], name: str, otherwise: str = "") -> str:
    found = holder.get(name)
    return found if isinstance(found, str) and found else otherwise


def _bytes(holder: dict[str, Any], name: str) -> bytes:
    try:
        return b64decode(holder.get(name, ""), validate=True)
    except (TypeError, ValueError):
        raise EtcdMisbehaved(f"{name} in the answer is not in base64") from None


def _item(kv: dict[str, Any]) -> Item:
    return Item(
        key=_bytes(kv, "key").decode(errors="replace"),
        value=_bytes(kv, "value"),
        create_revision=_integer(kv, "create_revision"),
        mod_revision=_integer(kv, "mod_revision"),
        lease=_integer(kv, "lease"),
    )


def _revision(reply: dict[str, Any]) -> int:
    return _integer(_object(reply, "header"), "revision")


def read_error(answer: Answer) -> EtcdRefused:
    """Return the error that an answer has, which is not 200."""
    try:
        decoded = _decoded(answer.body)
    except EtcdMisbehaved:
        return EtcdRefused(14 if answer.status >= 500 else 2, f"HTTP status {answer.status}")
    message = _text(decoded, "message") or _text(decoded, "error", f"HTTP status {answer.status}")
    return EtcdRefused(_integer(decoded, "code"), message)


def read_range(body: bytes) -> Found:
    """Read the answer to `range_of`."""
    reply = _decoded(body)
    return Found(_revision(reply), tuple(_item(kv) for kv in _objects(reply, "kvs")))


def read_outcome(body: bytes) -> Outcome:
    """Read the answer to `transaction`."""
    reply = _decoded(body)
    ranges = [_object(one, "response_range") for one in _objects(reply, "responses")]
    items = tuple(_item(kv) for found in ranges for kv in _objects(found, "kvs"))
    return Outcome(bool(reply.get("succeeded")), _revision(reply), items)


def read_lease(body: bytes) -> int:
    """Read the id of a lease."""
    lease = _integer(_decoded(body), "ID")
    if not lease:
        raise EtcdMisbehaved("the answer has no lease")
    return lease


def read_ttl(body: bytes) -> int:
    """Read for how many seconds a lease was renewed; 0 says that it is lost."""
    return max(0, _integer(_object(_decoded(body), "result"), "TTL"))


def read_token(body: bytes) -> str:
    """Read a token."""
    token = _decoded(body).get("token")
    if not isinstance(token, str) or not token:
        raise EtcdMisbehaved("the answer has no token")
    return token


def read_watch(line: bytes) -> Change:
    """Read a line of a watch.

    Raises:
        EtcdRefused: it is an error.
    """
    decoded = _decoded(line)
    if "error" in decoded:
        error = decoded["error"] if isinstance(decoded["error"], dict) else decoded
        message = _text(error, "message") or _text(error, "error", "an error without a message")
        raise EtcdRefused(_integer(error, "grpc_code") or _integer(error, "code"), message)
    result = _object(decoded, "result")
    events = _objects(result, "events")
    return Change(
        revision=_revision(result),
        created=bool(result.get("created")),
        # A watch on a revision that is compacted is created, then canceled.
        canceled=bool(result.get("canceled")) or _integer(result, "compact_revision") > 0,
        reason=_text(result, "cancel_reason"),
        written=tuple(_item(_object(one, "kv")) for one in events if one.get("type") != "DELETE"),
        deleted=tuple(_item(_object(one, "kv")) for one in events if one.get("type") == "DELETE"),
    )


MOST_ANSWER_BYTES = 64 * 1024 * 1024
"""The longest answer, or line of a stream: some 60,000 nodes."""


class HttpConversation:
    """The requests over one connection: `request` makes bytes to send, and `receive`
    takes what comes until `complete`, or for as long as lines are wanted.

    Bytes that are not HTTP raise `EtcdMisbehaved`; then the connection is of no use.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._connection = h11.Connection(h11.CLIENT)
        self._status = 0
        self._body = bytearray()
        self._looked_at = 0
        self.complete = False
        """Whether the answer is there as a whole."""

    @property
    def reusable(self) -> bool:
        """Whether another request may follow."""
        return self._connection.our_state in (h11.IDLE, h11.DONE) and self._connection.their_state in (
            h11.IDLE,
            h11.DONE,
        )

    @property
    def answer(self) -> Answer:
        """The answer, or what there is of it."""
        return Answer(self._status, bytes(self._body))

    def request(self, path: str, body: bytes, token: str) -> bytes:
        """Return the bytes of a request."""
        if self._connection.our_state is h11.DONE:
            self._connection.start_next_cycle()
        self._status, self.complete, self._looked_at = 0, False, 0
        self._body.clear()
        headers = [("Host", self._host), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if token:
            headers.append(("Authorization", token))
        parts = [h11.Request(method="POST", target=path, headers=headers), h11.Data(body), h11.EndOfMessage()]
        return b"".join(self._connection.send(part) or b"" for part in parts)

    def receive(self, data: bytes) -> None:
        """Take what came; nothing if the peer has closed."""
        try:
            self._connection.receive_data(data)
            while True:
                event = self._connection.next_event()
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > MOST_ANSWER_BYTES:
                        raise EtcdMisbehaved(f"an answer is longer than {in_units(MOST_ANSWER_BYTES)}")
                elif isinstance(event, h11.EndOfMessage):
                    self.complete = True
                elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                    return
        except h11.RemoteProtocolError as error:
            raise EtcdMisbehaved(f"what answers does not speak HTTP: {error}") from None

    def closed(self) -> bool:
        """Note that the peer has closed; return whether the answer is complete."""
        with suppress(EtcdMisbehaved):  # it broke off
            self.receive(b"")
        return self.complete

    def take_line(self) -> bytes | None:
        """Take the next line of the answer, if it is there; its end is a line, too."""
        end = self._body.find(b"\n", self._looked_at)
        if end < 0:
            self._looked_at = len(self._body)
            if not self.complete or not self._body:
                return None
            end = len(self._body)
        line = bytes(self._body[:end])
        del self._body[: end + 1]
        self._looked_at = 0
        return line
