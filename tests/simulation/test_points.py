"""What the product seldom does happens in simulations, and is counted."""

from collections import Counter

from infinistore.buggify import Point
from tests.simulation.points import LEAST_FIRED, seldom_fired
from tests.simulation.scenario import Scenario


def test_scenarios_have_all_points_and_some_have_none() -> None:
    chosen = {Scenario.from_seed(seed).buggify.points for seed in range(60)}
    assert () in chosen
    assert {name for points in chosen for name in points} == {point.name for point in Point}


def test_a_point_that_fires_too_seldom_is_named() -> None:
    often = Counter({point.name: LEAST_FIRED for point in Point})
    assert seldom_fired(often) == []
    often["SHORT_SEND"] -= 1
    assert seldom_fired(often) == ["SHORT_SEND"]
