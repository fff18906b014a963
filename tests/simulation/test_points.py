"""What the product seldom does happens in simulations, and is counted."""

from collections import Counter

from tests.simulation.buggify import Point
from tests.simulation.points import LEAST_FIRED, SEEDS, seldom_fired
from tests.simulation.scenario import Scenario


def test_scenarios_have_all_points_and_some_have_none() -> None:
    chosen = {Scenario.from_seed(seed).buggify.points for seed in range(60)}
    assert () in chosen
    assert {name for points in chosen for name in points} == {point.name for point in Point}


def test_a_point_that_fires_too_seldom_is_named() -> None:
    often = Counter({point.name: LEAST_FIRED for point in Point})
    assert seldom_fired(often, SEEDS) == []
    often["SHORT_SEND"] -= 1
    assert seldom_fired(often, SEEDS) == ["SHORT_SEND"]


def test_more_seeds_have_to_fire_each_point_more_often_and_few_seeds_need_not() -> None:
    fired = Counter({point.name: LEAST_FIRED for point in Point})
    assert len(seldom_fired(fired, 2 * SEEDS)) == len(Point)
    assert seldom_fired(Counter(), SEEDS - 1) == []
