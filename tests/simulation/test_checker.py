"""The checker finds each broken promise in the shortest history that shows it, and
allows what the table of exceptions allows.
"""

import math
import re
from typing import Any

import pytest

from infinistore.access.identity import ALL_ROLES, Role
from infinistore.access.tenants import Tenant
from infinistore.access.tenants import Tenants as Table
from infinistore.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    InfiniStoreException,
    KeyNotFound,
    PermissionDenied,
    ProtocolError,
)
from infinistore.tenant_limits import TenantLimits
from tests.simulation.checker import check
from tests.simulation.history import Call, End, History, Hold, Life, TableInForce
from tests.simulation.network import Network, NetworkSettings
from tests.simulation.promises import PAGE, PromiseException, allowed_errors, promise_exceptions
from tests.simulation.streams import Connection
from tests.simulation.world import World


class Past:
    """A history that is told call by call: each begins at a second, and takes one."""

    def __init__(self, *, evicted: bool = True) -> None:
        self.history = History(lives=[Life(0.0, evicted=evicted)])
        self.network = Network(World(0), NetworkSettings())
        self.now = 0.0

    def call(self, method: str, keys: list[str], takes_s: float = 1.0, **facts: Any) -> Call:
        end, seen, present = facts.pop("end", End.RETURNED), facts.pop("seen", []), facts.pop("present", [])
        call = self.history.begin("client", method, keys, self.now, **facts)
        call.end, call.seen, call.present = end, seen, present
        call.ended = self.now + takes_s
        self.now += 2
        return call

    def put(self, value: bytes, *keys: str, **facts: Any) -> Call:
        puts = {key: value + key.encode() for key in keys}
        return self.call("put_many" if len(keys) > 1 else "put", list(keys), puts=puts, **facts)

    def get(self, *values: bytes | None, **facts: Any) -> Call:
        """Read the values of k0, k1, ...: those that `put` has put there."""
        seen = [(f"k{i}", None if value is None else value + f"k{i}".encode()) for i, value in enumerate(values)]
        return self.call("get_many", [key for key, _ in seen], seen=seen, **facts)

    def delete(self, *keys: str, **facts: Any) -> Call:
        return self.call("delete", list(keys), removes=list(keys), **facts)

    def end_server(self) -> None:
        self.history.lives[-1].ended = self.now
        self.history.lives.append(Life(self.now, evicted=True))
        self.now += 2

    def connection(self, closed_s: float) -> Connection:
        connection = Connection(self.network, 1, "client", "server", (700, 700))
        connection.server_closed_s = closed_s
        return connection

    def problems(self, *without: PromiseException) -> list[str]:
        return check(self.history, promise_exceptions() - set(without))


@pytest.fixture
def past() -> Past:
    return Past()


@pytest.fixture
def lossless() -> Past:
    """The past of a server that has evicted nothing."""
    return Past(evicted=False)


def found(problems: list[str], pattern: str) -> bool:
    return len(problems) == 1 and re.search(pattern, problems[0]) is not None


def test_a_value_that_is_replaced_removed_or_evicted_in_order_is_right(past: Past) -> None:
    past.put(b"a", "k0")
    past.get(b"a")
    past.put(b"b", "k0")
    past.get(b"b")
    past.get(None)
    past.put(b"c", "k0")
    past.delete("k0")
    past.get(None)
    assert past.problems() == []


def test_what_nobody_put_is_found(past: Past) -> None:
    past.get(b"a")
    assert found(past.problems(), "what nobody has put")


def test_what_was_put_only_later_is_found(past: Past) -> None:
    past.get(b"a")
    past.put(b"a", "k0")
    assert found(past.problems(), "what call 1 put later")


def test_what_was_refused_is_found(past: Past) -> None:
    past.put(b"a", "k0", end=End.REFUSED)
    past.get(b"a")
    assert found(past.problems(), "what nobody has put")


def test_what_was_replaced_and_returns_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    past.get(b"a")
    assert found(past.problems(), "again after it had been replaced")


def test_what_was_replaced_and_seen_before_and_after_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    past.get(b"b")
    past.get(b"a")
    past.get(b"b")
    assert any("at the same time" in problem for problem in past.problems())


def test_what_was_deleted_and_returns_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.delete("k0")
    past.get(b"a")
    assert found(past.problems(), "there again after")


def test_what_was_absent_and_returns_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.call("exists", ["k0"], present=[("k0", False)])
    past.get(b"a")
    assert found(past.problems(), "there again after")


def test_what_a_server_had_before_it_ended_and_returns_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.end_server()
    past.get(b"a")
    assert found(past.problems(), "its server ended")


def test_overlapping_calls_take_effect_in_any_order(past: Past) -> None:
    past.put(b"a", "k0", takes_s=10)
    past.delete("k0", takes_s=10)
    past.get(b"a")
    past.get(None)
    assert past.problems() == []


def test_a_key_that_is_there_without_a_value_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    past.delete("k0")
    past.call("exists", ["k0"], present=[("k0", True)])
    assert found(past.problems(), "nothing can be there")


def test_a_late_put_is_allowed_until_the_server_has_closed_its_connection(past: Past) -> None:
    put = past.put(b"a", "k0", end=End.UNKNOWN)
    put.connections[1] = past.connection(closed_s=6.0)
    past.delete("k0")
    past.get(b"a")
    assert past.problems() == []
    assert found(past.problems(PromiseException.LATE_OUTCOME), "there again after")
    put.connections[1].server_closed_s = 1.0
    assert found(past.problems(), "there again after")


def test_a_put_of_which_nothing_was_sent_has_no_effect(past: Past) -> None:
    past.put(b"a", "k0", end=End.UNKNOWN)
    past.get(b"a")
    assert found(past.problems(), "what nobody has put")


def test_what_is_lost_without_eviction_is_found(lossless: Past) -> None:
    lossless.put(b"a", "k0")
    lossless.get(None)
    assert found(lossless.problems(), "was lost")


def test_what_may_be_evicted_is_not_lost(past: Past) -> None:
    past.put(b"a", "k0")
    past.get(None)
    assert past.problems() == []
    assert found(past.problems(PromiseException.EVICTION), "was lost")


def test_what_was_corrupted_may_be_dropped(lossless: Past) -> None:
    lossless.history.lives[0].dropped = True
    lossless.put(b"a", "k0")
    lossless.get(None)
    assert lossless.problems() == []
    assert found(lossless.problems(PromiseException.CHECKSUM_DROP), "was lost")


def test_what_a_server_has_goes_with_it(lossless: Past) -> None:
    lossless.put(b"a", "k0")
    lossless.end_server()
    lossless.history.lives[-1].evicted = False
    lossless.get(None)
    assert lossless.problems() == []
    assert found(lossless.problems(PromiseException.RESTART), "was lost")


@pytest.mark.parametrize("end", [End.RETURNED, End.UNKNOWN])
def test_what_may_have_been_deleted_is_not_lost(lossless: Past, end: End) -> None:
    lossless.put(b"a", "k0")
    lossless.delete("k0", end=end).connections[1] = lossless.connection(closed_s=100.0)
    lossless.get(None)
    assert lossless.problems() == []


def test_what_is_held_and_goes_is_found(past: Past) -> None:
    past.put(b"a", "k0")
    match = past.call("match_prefix", ["k0"], present=[("k0", True)])
    hold = Hold(match, ["k0"], match.ended, until_s=10.0)
    past.history.holds.append(hold)
    past.get(None)
    assert found(past.problems(), "although call 1 held it")
    hold.until_s = 4.5
    assert past.problems() == []


def test_what_is_held_and_replaced_is_not_held_any_more(past: Past) -> None:
    past.put(b"a", "k0")
    match = past.call("match_prefix", ["k0"], present=[("k0", True)])
    past.history.holds.append(Hold(match, ["k0"], match.ended, until_s=10.0))
    past.put(b"b", "k0")
    past.get(None)
    assert past.problems() == []


def test_a_key_that_is_read_after_its_time_is_found(past: Past) -> None:
    past.put(b"a", "k0", lasts_s=3.0)  # over at 4
    past.get(b"a")
    past.get(b"a")  # begins at 4
    assert past.problems() == []
    past.get(b"a")
    assert found(past.problems(), r"read k0 after the time of call 0")


def test_a_key_that_is_there_after_its_time_is_found(past: Past) -> None:
    past.put(b"a", "k0", lasts_s=1.0)
    past.call("exists", ["k0"], present=[("k0", True)])
    assert past.problems() == []
    past.call("exists", ["k0"], present=[("k0", True)])
    assert found(past.problems(), r"nothing can be there")


def test_a_key_that_ends_is_not_lost(lossless: Past) -> None:
    lossless.put(b"a", "k0", lasts_s=3.0)
    lossless.get(None)  # ends at 3
    assert lossless.problems() == []


def test_a_key_that_goes_before_its_time_is_found(lossless: Past) -> None:
    lossless.put(b"a", "k0", lasts_s=3.5)
    lossless.get(None)
    assert found(lossless.problems(), r"k0: what call 0 \(put of client\) put was lost")


def test_a_key_that_goes_at_the_time_that_it_had_before_is_found(lossless: Past) -> None:
    lossless.put(b"a", "k0", lasts_s=3.0)
    lossless.put(b"b", "k0")
    lossless.get(None)
    assert found(lossless.problems(), r"k0: what call 1 \(put of client\) put was lost")


def pin(past: Past, *keys: str) -> None:
    call = past.call("pin", list(keys))
    past.history.holds.append(Hold(call, keys, call.ended, math.inf, pins=True))


def test_a_pinned_key_that_goes_is_found_also_when_it_was_put_again(past: Past) -> None:
    past.put(b"a", "k0")
    pin(past, "k0")
    past.put(b"b", "k0")
    past.get(None)
    assert found(past.problems(), r"k0: call 3 \(get_many\) did not find it, although call 1 held it")


@pytest.mark.parametrize("end", [End.RETURNED, End.UNKNOWN])
def test_a_key_that_may_be_unpinned_deleted_or_over_may_go(past: Past, end: End) -> None:
    ways: dict[str, Any] = {"unpins": ["k0"], "removes": ["k1"], "puts": {"k2": b"bk2"}, "lasts_s": 0.5}
    past.put(b"a", "k0", "k1", "k2")
    pin(past, "k0", "k1", "k2")
    past.call("all of them", [], connections={1: past.connection(5.0)}, end=end, **ways)
    past.get(None, None, None)
    assert past.problems() == []


def test_a_batch_that_is_seen_in_part_is_found(past: Past) -> None:
    past.put(b"a", "k0", "k1")
    past.put(b"b", "k0", "k1")
    past.get(b"b", b"a")
    assert any("as it was before that" in problem for problem in past.problems())


def test_a_batch_over_the_limits_may_be_seen_in_part(past: Past) -> None:
    past.put(b"a", "k0", "k1")
    past.put(b"b", "k0", "k1", takes_s=5, is_whole=False)
    past.get(b"b", b"a")
    assert past.problems() == []
    assert found(past.problems(PromiseException.SPLIT_BATCH), "as it was before that")


def test_keys_that_a_batch_has_skipped_are_not_part_of_it(past: Past) -> None:
    past.put(b"a", "k1")
    past.put(b"b", "k0", "k1", may_skip=True, skipped=["k1"])
    past.get(b"b", b"a")
    assert past.problems() == []


@pytest.mark.parametrize(
    ("error", "event"), [(ProtocolError("x"), "corrupted_heads"), (ChecksumMismatch("x"), "corrupted_replies")]
)
def test_errors_about_bytes_need_corrupted_bytes(past: Past, error: InfiniStoreException, event: str) -> None:
    call = past.get(end=End.REFUSED)
    call.error = error
    assert found(past.problems(), "raised")
    getattr(past.history, event).append((0.5, "client"))
    assert past.problems() == []


def test_a_corrupted_block_is_seen_once(past: Past) -> None:
    put = past.put(b"a", "k0")
    past.history.corrupted_puts.append(("k0", put))
    for _ in range(2):
        past.call("get", ["k0"], end=End.REFUSED).error = ChecksumMismatch("x")
    assert found(past.problems(), "call 2: get of client raised ChecksumMismatch")


def test_a_lease_that_verifies_nothing_gives_what_came_to_the_server(past: Past) -> None:
    put = past.put(b"a", "k0")
    past.get(b"what a cable made of it").verified = False
    assert found(past.problems(), "what nobody has put")
    past.history.corrupted_puts.append(("k0", put))
    assert past.problems() == []
    past.history.calls[-1].verified = True
    assert found(past.problems(), "what nobody has put")


def test_a_client_that_verifies_nothing_gives_what_a_cable_made_of_a_block(past: Past) -> None:
    past.put(b"a", "k0")
    past.get(b"what a cable made of it").verified = False
    assert found(past.problems(), "what nobody has put")
    past.history.corrupted_replies.append((past.history.calls[-1].begun, "client"))
    assert past.problems() == []
    past.history.calls[-1].verified = True
    assert found(past.problems(), "what nobody has put")


def test_a_cable_may_make_a_block_what_it_was_before(past: Past) -> None:
    past.put(b"a", "k0")
    past.put(b"b", "k0")
    call = past.get(b"a")
    call.verified = False
    assert found(past.problems(), "there again after it had been replaced")
    past.history.corrupted_replies.append((call.begun, "client"))
    assert past.problems() == []


def test_a_block_without_a_checksum_may_have_come_wrong_for_everybody(past: Past) -> None:
    put = past.put(b"a", "k0")
    past.history.corrupted_puts.append(("k0", put))
    past.get(b"what a cable made of it")
    assert found(past.problems(), "what nobody has put")
    put.verified = False
    assert past.problems() == []


def test_a_block_without_a_checksum_may_come_wrong_to_who_verifies(past: Past) -> None:
    past.put(b"a", "k0")
    call = past.get(b"what a cable made of it")
    past.history.corrupted_replies.append((call.begun, "client"))
    assert found(past.problems(), "what nobody has put")
    past.put(b"b", "k0", verified=False)
    assert past.problems() == []


def test_an_error_that_a_method_does_not_promise_is_found(past: Past) -> None:
    past.call("put", ["k0"], end=End.REFUSED).error = KeyNotFound("x")
    assert found(past.problems(), "put of client raised KeyNotFound")


def test_the_page_lists_the_exceptions_that_the_checker_knows() -> None:
    assert promise_exceptions() == set(PromiseException)


def test_the_page_lists_the_errors_of_calls() -> None:
    assert allowed_errors("get") == {
        "StoreUnavailable", "DeadlineExceeded", "KeyNotFound", "ChecksumMismatch", "LimitExceeded",
    }  # fmt: skip
    assert allowed_errors("exists") == {"StoreUnavailable", "DeadlineExceeded"}
    assert PAGE.name == "promises.md"


def with_tenants(past: Past, *tables: tuple[float, frozenset[Role], tuple[str, ...]]) -> None:
    """Give `client` and `other` a tenant each: the first one with these roles and
    tokens, each from a second on.
    """
    past.history.tenant_of |= {"client": ("a", "token"), "other": ("b", "another")}
    for since_s, roles, digests in tables:
        tenants = {"a": Tenant(TenantLimits("a"), digests, roles), "b": Tenant(TenantLimits("b"), ("another",))}
        past.history.tables.append(TableInForce(since_s, since_s, Table(tenants)))


def test_a_tenant_that_reads_what_another_has_put_is_found(past: Past) -> None:
    with_tenants(past, (-math.inf, ALL_ROLES, ("token",)))
    past.put(b"a", "k0")
    past.get(b"a")
    assert past.problems() == []
    past.history.calls[-1].client = "other"
    assert found(past.problems(), r"b: call 1: other read under k0 what nobody has put")


@pytest.mark.parametrize(
    ("roles", "digests", "why"),
    [
        (ALL_ROLES, (), "its token was revoked"),
        (ALL_ROLES - {Role.WRITE}, ("token",), "a may not write"),
    ],
)
def test_a_call_that_returns_to_who_may_not_make_it_is_found(
    past: Past, roles: frozenset[Role], digests: tuple[str, ...], why: str
) -> None:
    with_tenants(past, (-math.inf, ALL_ROLES, ("token",)), (2.5, roles, digests))
    past.put(b"a", "k0")
    past.put(b"b", "k0")  # it may have been carried out before
    assert past.problems() == []
    past.put(b"c", "k0")
    assert found(past.problems(), why)


def test_a_refusal_that_counts_as_the_loss_of_a_node_is_found_where_none_is_lost(past: Past) -> None:
    with_tenants(past, (-math.inf, ALL_ROLES, ("token",)), (0.5, ALL_ROLES - {Role.READ}, ("token",)))
    past.history.nodes["node-1"] = []
    past.get(None)  # it may have been answered before
    past.get(None)
    past.history.calls[-1].lost = True
    assert past.problems() == []
    past.history.may_lose_nodes = False
    assert found(past.problems(), "a may not read")


@pytest.mark.parametrize("error", [PermissionDenied("no"), AuthenticationFailed("no")])
def test_who_may_do_everything_is_denied_nothing(past: Past, error: InfiniStoreException) -> None:
    with_tenants(past, (-math.inf, ALL_ROLES, ("token",)), (2.5, frozenset(), ()))
    past.put(b"a", "k0", error=error, end=End.REFUSED)
    assert found(past.problems(), type(error).__name__)
    past.history.calls.clear()
    past.put(b"a", "k0", error=error, end=End.REFUSED)
    assert past.problems() == []
