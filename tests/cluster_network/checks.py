"""What holds for what the clients of a cluster have seen, whatever happened to it; and
what becomes of a test that cannot look.
"""

import os
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import pytest

from tests.cluster_network.client import CLIENTS, KEYS
from tests.cluster_network.cluster import NODES, Cluster

__all__ = ["LOOKUP_S", "SCHEDULING_S", "TTL_S", "check", "check_lookups", "check_values", "do_without", "views_of"]

TTL_S: Final = 10
"""The lease of a node."""
LOOKUP_S: Final = 0.5
"""The longest that a node may hold a lookup up."""
SCHEDULING_S: Final = 1.0
"""How long a process may wait for a core that others use."""


def check_values(reports: dict[str, Any]) -> None:
    """No wrong byte, and no version that its writer has not begun to put."""
    for name, report in reports.items():
        assert report["wrong"] == [], f"client {name} has read {report['wrong'][:3]}"
        for key in KEYS:
            writer = reports[key.partition("-")[0]]
            begun = report["highest"][key] <= writer["begun"][key]
            assert begun, f"client {name} has read a version of {key} that nobody has begun to put"


def check_lookups(reports: dict[str, Any], of: Sequence[str] = CLIENTS) -> None:
    """No lookup of these clients was held up for longer than a node may do that."""
    for name in of:
        longest_s = reports[name]["longest_lookup_s"]
        assert longest_s <= LOOKUP_S + SCHEDULING_S, f"a lookup of client {name} took {longest_s:.2f} s"


def check(
    cluster: Cluster, victim: str = "", *, of: Sequence[str] = CLIENTS, found: float = 0.99
) -> dict[str, dict[str, Any]]:
    """Check what was seen since the last "begin", and return it: no error, no wrong
    byte, no older value, and the nodes that nothing happened to have all they should.
    `of` are the clients that nothing happened to.
    """
    reports = cluster.reports()
    check_values(reports)
    for name in of:
        report = reports[name]
        assert report["errors"] == [], (name, report["errors"][:3])
        assert report["puts"] > 0, name
        unordered = {key for other in CLIENTS for key in reports[other]["unordered"]}
        assert [one for one in report["older"] if one[0] not in unordered] == [], name
        for node in NODES:
            if node != victim:
                assert report["hits"][node] >= found * report["asked"][node] > 0, (name, node, report)
    check_lookups(reports, of)
    return reports


def views_of(report: dict[str, Any]) -> set[tuple[str, ...]]:
    """The nodes of all views of a client."""
    return {tuple(ids) for _, ids in report["views"]}


def do_without(what: str) -> NoReturn:
    """Fail for root, who can have what is missing: a run in which all skips would look
    like success. For others, skip.
    """
    if os.geteuid() == 0:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)
