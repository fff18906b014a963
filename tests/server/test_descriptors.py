"""How a server shares out what descriptors its process may open."""

import os
import resource

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import ConfigError
from infinistore.server.budgets import DescriptorBudget


def shares(limit: int, open_now: int = 12, arenas: int = 0) -> tuple[DescriptorBudget, int]:
    """The budget of a process with this limit, soft and hard, and how many clients of
    two descriptors it has.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
        patch.setattr(resource, "setrlimit", lambda kind, limits: None)
        budget = DescriptorBudget(clients=1024, strangers=128, management=64, arenas=arenas, open_now=lambda: open_now)
        return budget, budget.clients(each=2)


def test_who_may_open_enough_gets_what_was_wished_for() -> None:
    budget, clients = shares(10_000)
    assert (clients, budget.strangers, budget.management) == (1024, 128, 64)


@given(limit=st.integers(0, 5000), open_now=st.integers(5, 50), arenas=st.integers(0, 20))
@example(limit=37, open_now=12, arenas=0)
@example(limit=38, open_now=12, arenas=0)
def test_clients_have_what_the_process_and_the_others_leave(limit: int, open_now: int, arenas: int) -> None:
    left = limit - open_now - arenas - 16
    eighth = max(4, left // 8)
    strangers, management = min(128, eighth), min(64, eighth)
    clients = min(1024, (left - strangers - management) // 2)
    if clients < 1:
        with pytest.raises(ConfigError, match="too few to serve anybody"):
            shares(limit, open_now, arenas)
        return
    budget, given_to_clients = shares(limit, open_now, arenas)
    assert (given_to_clients, budget.strangers, budget.management) == (clients, strangers, management)


def test_the_soft_limit_is_raised_to_what_is_wanted_and_never_lowered() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 100
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        budget = DescriptorBudget(clients=200, strangers=5, management=5, arenas=0)
        assert budget.clients(each=2) == 200
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert (raised[0] > low, raised[1]) == (True, hard)
        DescriptorBudget(clients=1, strangers=1, management=1, arenas=0)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_disks_that_come_later_get_what_clients_do_not_have() -> None:
    limits = [100, 10_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
        patch.setattr(resource, "setrlimit", lambda kind, given: limits.__setitem__(0, given[0]))
        budget = DescriptorBudget(clients=100, strangers=10, management=10, arenas=0, open_now=lambda: 12)
        assert limits[0] == 12 + 2 * 100 + 10 + 10 + 16
        budget.reserve(5000)
        assert budget.clients(each=2) == 100
        before = limits[0]
        budget.reserve(1000)
        assert limits[0] == before + 1000
        with pytest.raises(ConfigError, match="10000 descriptors, too few for more disks"):
            budget.reserve(9000)
        budget.reserve(-6000)
        budget.reserve(9000)
        budget.reserve(10_000 - (12 + 2 * 100 + 10 + 10 + 16 + 9000))
        with pytest.raises(ConfigError, match="too few for more disks"):
            budget.reserve(1)
        assert budget.clients(each=1) == 100
        budget.reserve(100)  # of clients that have one descriptor instead of two


def test_disks_leave_clients_their_places_or_the_server_does_not_start() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda kind: (500, 500))
        patch.setattr(resource, "setrlimit", lambda kind, limits: None)
        budget = DescriptorBudget(clients=100, strangers=10, management=10, arenas=0, open_now=lambda: 12)
        budget.reserve(400)
        assert budget.clients(each=2) == (500 - 400 - 12 - 16 - 20) // 2
        budget = DescriptorBudget(clients=100, strangers=10, management=10, arenas=0, open_now=lambda: 12)
        budget.reserve(460)
        with pytest.raises(ConfigError, match="too few to serve anybody"):
            budget.clients(each=2)
