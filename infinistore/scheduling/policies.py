"""Which engine a request goes to: the built-in policies, and those of other packages.

Another package adds a policy with an entry point:

    [project.entry-points."infinistore.policies"]
    fewest-tokens = "some_package:FewestTokens"

The object behind it is called without arguments, once for each scheduler, and returns a
`Policy`. Built-in names cannot be overridden.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, runtime_checkable

from infinistore.errors import ConfigError
from infinistore.named_classes import Named
from infinistore.scheduling.advice import price_s
from infinistore.scheduling.engines import Engine, Request

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_ENTRY_POINT_GROUP",
    "LeastWork",
    "Policy",
    "RoundRobin",
    "Soonest",
    "create_policy",
    "policy_names",
]

POLICY_ENTRY_POINT_GROUP: Final = "infinistore.policies"
DEFAULT_POLICY: Final = "soonest"

_HERE: Final = "infinistore.scheduling.policies"
_POLICIES: Final = Named(
    kind="policy",
    group=POLICY_ENTRY_POINT_GROUP,
    built_in={
        "soonest": f"{_HERE}:Soonest",
        "least-work": f"{_HERE}:LeastWork",
        "round-robin": f"{_HERE}:RoundRobin",
    },
)
_SAME_S: Final = 0.001
"""Engines whose times differ by less than this take turns."""


@runtime_checkable
class Policy(Protocol):
    """Chooses an engine for each request. One object serves one scheduler, and may keep
    state of its own.
    """

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        """Return one of `engines`, of which there is at least one.

        Only engines that can take the request are among them. `now` is seconds of the
        scheduler's clock. The caller sends the request and tells the engine so: a
        policy only asks engines (`plan`, `queued_s`, `requests` and the like).
        """


class Soonest:
    """The engine that answers first: queue, load and computation together, in seconds,
    with what its own cache and the store have of the prompt.

    Where engines are busy, what a request computes delays others, too. So it goes by
    `price_s`, with the mean busy share of the engines: a later first token is taken for
    less computation. Equal engines take turns.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        """Return the engine with the lowest price."""
        busy_share = sum(engine.busy_share(now) for engine in engines) / max(1, len(engines))

        def price(engine: Engine) -> float:
            plan = engine.plan(request, now)
            return price_s(plan.first_token_s, plan.compute_s, busy_share)

        return self._turns.least(engines, price)


class LeastWork:
    """The engine that is done first with what it has, in seconds. Caches matter only to
    how much work a request is counted for. Equal engines take turns.
    """

    def __init__(self) -> None:
        self._turns = _Turns()

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        """Return the engine with the shortest queue."""
        return self._turns.least(engines, lambda engine: engine.queued_s(now))


class RoundRobin:
    """One engine after the other, whatever they have to do."""

    def __init__(self) -> None:
        self._turns = _Turns()

    def pick(self, request: Request, engines: Sequence[Engine], now: float) -> Engine:
        """Return the next engine."""
        return self._turns.least(engines, lambda engine: 0.0)


def policy_names() -> list[str]:
    """Return the names of all policies: built-in ones first, then others, sorted."""
    return _POLICIES.names()


def create_policy(name: str = DEFAULT_POLICY) -> Policy:
    """Return a new policy.

    Raises:
        ConfigError: there is none of this name, or it cannot be loaded.
    """
    point = _POLICIES.find(name)
    where = f"the policy {name!r} ({point.value})"
    try:
        policy = point.load()()
    except Exception as error:
        raise ConfigError(f"{where} cannot be loaded: {error!r}") from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"{where} makes a {type(policy).__name__}, which has no method pick(request, engines, now)")
    return policy


class _Turns:
    """Chooses the least, and of equal ones another each time."""

    def __init__(self) -> None:
        self._first = 0

    def least(self, engines: Sequence[Engine], value: Callable[[Engine], float]) -> Engine:
        if not engines:
            raise ValueError("there is no engine to pick from")
        first = self._first = self._first % len(engines)
        self._first += 1
        best, least = engines[first], value(engines[first])
        for index in range(first + 1, first + len(engines)):
            engine = engines[index % len(engines)]
            if (seconds := value(engine)) < least - _SAME_S:
                best, least = engine, seconds
        return best
