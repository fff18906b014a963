"""Whatever happens to a disk: each durable, undeleted key gives its bytes, and no key
gives anything but one completed put's.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.disk.volume_model import VolumeModel
from tests.disk.volume_world import SEGMENT_BYTES, VolumeWorld
from tests.examples import examples

KEYS = [f"key/{number}" for number in range(4)]
lengths = st.dictionaries(st.sampled_from(KEYS), st.sampled_from([0, 1, 700, 5000, 9000]), min_size=1, max_size=4)


class VolumeMachine(RuleBasedStateMachine):
    """A disk on which room never is short, so nothing durable may be lost."""

    @initialize(seed=st.integers(0, 2**32), compresses=st.booleans())
    def begin(self, seed: int, compresses: bool) -> None:
        world = VolumeWorld(seed, capacity_bytes=64 * SEGMENT_BYTES, compresses=compresses)
        self.model = VolumeModel(world, KEYS)
        self.model.settle()

    @rule(lengths=lengths)
    def put(self, lengths: dict[str, int]) -> None:
        self.model.put(lengths)

    @rule(which=st.integers(0, 20))
    def finish_one_job(self, which: int) -> None:
        self.model.finish(which)

    @rule()
    def finish_all_jobs(self) -> None:
        self.model.settle()

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: str) -> None:
        self.model.forget([key])

    @rule()
    def purge(self) -> None:
        self.model.purge()

    @rule()
    def snapshot(self) -> None:
        self.model.snapshot()

    @rule()
    def what_does_not_linger_never_comes_back(self) -> None:
        self.model.check_lingers()

    @rule(jobs=st.integers(-1, 30))
    def crash(self, jobs: int) -> None:
        self.model.crash(jobs)

    @rule()
    def end_and_restart(self) -> None:
        self.model.restart()

    @invariant()
    def each_key_gives_what_is_durable(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


def test_volume() -> None:
    run_state_machine_as_test(VolumeMachine, settings=settings(max_examples=examples(70), stateful_step_count=30))
