"""The share of the hottest group beside what was really read."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from infinistore.core import Client, StoreCore
from infinistore.core.hot_groups import MOST_GROUPS, WINDOW, HotGroups
from tests.core.test_store import put

STRIDE = 64


def read(groups: HotGroups, keys: list[str]) -> None:
    groups.left -= len(keys)
    if groups.left < 0:
        groups.sample(keys)


def group(number: int, blocks: int) -> list[str]:
    return [f"{{{number}}}/{block}" for block in range(blocks)]


@pytest.mark.parametrize("blocks", [1, 7, 64, 300])
def test_it_is_about_the_share_of_what_was_read(blocks: int) -> None:
    chance = random.Random(1)
    popular = [1 / (number + 1) for number in range(2000)]
    reads = chance.choices(range(2000), popular, k=200_000 // blocks)
    groups = HotGroups(STRIDE)
    for number in reads:
        read(groups, group(number, blocks))
    ((_, most),) = Counter(reads).most_common(1)
    assert groups.share() == pytest.approx(most / len(reads), rel=0.25)


def test_no_group_is_called_hot_where_all_are_read_as_often() -> None:
    groups = HotGroups(STRIDE)
    for turn in range(100):
        for number in range(20 * MOST_GROUPS):
            read(groups, group(number, 1 + turn % 2))
    assert 0 < groups.share() < 0.02


def test_batches_that_begin_alike_are_sampled_everywhere() -> None:
    groups = HotGroups(STRIDE)
    for number in range(10_000):
        read(groups, ["{first}/0", *group(number, 63)])
    assert groups.share() == pytest.approx(63 / 64 / 10_000 + 1 / 64, abs=0.01)


def test_a_group_that_is_read_no_more_cools_down() -> None:
    groups = HotGroups(STRIDE)
    for _ in range(WINDOW):
        read(groups, group(1, 64))
    assert groups.share() > 0.99
    for number in range(6 * WINDOW):
        read(groups, group(number % 100, 64))
    assert groups.share() < 0.1


def test_a_few_reads_tell_nothing() -> None:
    groups = HotGroups(STRIDE)
    for _ in range(10):
        read(groups, group(1, 64))
    assert groups.share() == 0


def lease(core: StoreCore, client: Client, key: str) -> None:
    core.release(core.lease(client, [key]))


def get_single(core: StoreCore, client: Client, key: str) -> None:
    core.use_one(client, key, core.find_one(client, key))


def read_alone(core: StoreCore, client: Client, key: str) -> None:
    core.note_use([key], read=True)


def look_up(core: StoreCore, client: Client, key: str) -> None:
    core.note_use([key], read=False)


@pytest.mark.parametrize("how", [lease, get_single, read_alone, look_up])
def test_every_way_to_read_counts(
    how: Callable[[StoreCore, Client, str], None], core: StoreCore, client: Client
) -> None:
    core.hot_groups = HotGroups(STRIDE)
    put(core, client, {"{a}/1": b"x", "{b}/1": b"x"})
    for _ in range(5000):
        how(core, client, "{a}/1")
        how(core, client, "{b}/1")
        how(core, client, "missing")
    share = core.statistics().hottest_group_share
    assert share == 0 if how is look_up else 0.45 < share < 0.6
