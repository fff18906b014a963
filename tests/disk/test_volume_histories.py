"""Long random histories of a volume: short of room, with errors, with rot, and with a
crash at every job.
"""

import random

import pytest

from tests.disk.volume_model import VolumeModel
from tests.disk.volume_world import VolumeWorld

KEYS = [f"key/{number}" for number in range(6)]


OFTEN = (0, 1, 2, 3, 6)
"""They go wherever 20 seeds of each kind of history go."""
some_seeds = pytest.mark.parametrize(
    "seed", [seed if seed in OFTEN else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(40)]
)


def model_of(seed: int) -> VolumeModel:
    model = VolumeModel(VolumeWorld(seed, compresses=seed % 2 == 1), KEYS)
    model.settle()
    return model


def act(model: VolumeModel, chance: random.Random) -> None:
    """Do one thing that a user or a disk may do, without a crash."""
    match chance.randrange(12):
        case 0:
            model.forget([chance.choice(KEYS)])
        case 1 if chance.random() < 0.2:
            model.purge()
        case 2:
            model.snapshot()
        case 3:
            model.check_lingers()
        case 4:
            model.settle()
        case 5 | 6:
            for _ in range(chance.randrange(4)):
                model.finish(chance.randrange(20))
        case _:
            some = chance.sample(KEYS, chance.randrange(1, 5))
            model.put({key: chance.choice([0, 1, 700, 5000, 9000]) for key in some})


@some_seeds
def test_with_room_nothing_durable_is_lost(seed: int) -> None:
    model, chance = model_of(seed), random.Random(seed)
    for _ in range(8):
        for _ in range(chance.randrange(12)):
            act(model, chance)
            model.check()
        model.crash(chance.randrange(-1, 25))
        model.check()
        if chance.random() < 0.3:
            model.restart()


@some_seeds
def test_when_room_is_short_the_oldest_go_and_some_are_appended_again(seed: int) -> None:
    model, chance = model_of(seed), random.Random(seed)
    model.world.accept_offers = False
    for _ in range(3):
        for _ in range(80):
            act(model, chance)
            model.put_again(chance)
            model.check()
        assert model.world.volume.statistics().allocated_bytes <= model.world.capacity_bytes
        model.settle()
        model.put_again(chance)
        model.crash(chance.randrange(-1, 40))


@some_seeds
def test_errors_lose_no_more_than_what_they_hit(seed: int) -> None:
    model, chance = model_of(seed), random.Random(seed)
    faults = model.world.disk.faults
    for _ in range(6):
        for _ in range(15):
            if chance.random() < 0.2:
                faults.write_error, faults.flush_error = chance.choice([(0.0, 0.0), (0.1, 0.0), (0.0, 0.3)])
            act(model, chance)
            model.check()
        faults.heal()
        model.crash(chance.randrange(-1, 25))


@some_seeds
def test_rot_and_misdirected_writes_never_give_wrong_bytes(seed: int) -> None:
    model, chance = model_of(seed), random.Random(seed)
    model.damaged = True
    for _ in range(6):
        for _ in range(15):
            model.world.disk.faults.misdirected_write = chance.choice([0.0, 0.1])
            model.world.disk.faults.read_error = chance.choice([0.0, 0.05])
            act(model, chance)
            model.check()
        for file, length in model.world.disk.files().items():
            if length and chance.random() < 0.5:
                model.world.disk.rot(file, chance.randrange(length), chance.randrange(8))
        model.crash(chance.randrange(-1, 25))


def test_a_crash_at_every_job_loses_nothing() -> None:
    jobs = 0
    while True:
        model, chance = model_of(7), random.Random(7)
        for _ in range(25):
            act(model, chance)
        model.settle()
        total = len(model.world.disk.history)
        if jobs > total:
            return
        model, chance = model_of(7), random.Random(7)
        for _ in range(25):
            if len(model.world.disk.history) >= jobs:
                break
            act(model, chance)
        while len(model.world.disk.history) < jobs and model.world.disk.under_way:
            model.finish(0)
        model.crash(jobs % 5)
        jobs += 3
