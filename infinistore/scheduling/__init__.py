"""Where a request should run, and whether to load or to compute its prompt.

No I/O, no clock: a router or a connector tells these objects what happened and when,
and asks them. docs/scheduling.md explains them together.
"""

from infinistore.scheduling.advice import Advice, AdviceStatistics, LoadAdvisor, Reason, price_s
from infinistore.scheduling.engines import Engine, Loads, Plan, RecentBlocks, Request
from infinistore.scheduling.policies import (
    DEFAULT_POLICY,
    POLICY_ENTRY_POINT_GROUP,
    LeastWork,
    Policy,
    RoundRobin,
    Soonest,
    create_policy,
    policy_names,
)
from infinistore.scheduling.rates import BusyShare, LinkRate, PrefillRate

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_ENTRY_POINT_GROUP",
    "Advice",
    "AdviceStatistics",
    "BusyShare",
    "Engine",
    "LeastWork",
    "LinkRate",
    "LoadAdvisor",
    "Loads",
    "Plan",
    "Policy",
    "PrefillRate",
    "Reason",
    "RecentBlocks",
    "Request",
    "RoundRobin",
    "Soonest",
    "create_policy",
    "policy_names",
    "price_s",
]
