"""A purge that takes long takes nobody out of the cluster."""

from random import Random

from infinistore.cluster.etcd.follower import READ_AGAIN_S
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.registration import Registration, RegistrationState
from infinistore.cluster.etcd.session import EtcdSession
from infinistore.cluster.membership import Node

from .fake_etcd import World

LAYOUT = Layout("test")
KEY, MARK = LAYOUT.node("a"), LAYOUT.purged("a")


class _Purging(World):
    """With a node that is told to purge, and does it when `done` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        node = Node("a", "infinistore://a:1", instance="one")
        self.registration = Registration(
            EtcdSession(1), LAYOUT, node, clock=self.clock, random=Random(1), on_purge=self._begin, warm_up_s=0
        )

    def _begin(self) -> None:
        self.begun += 1

    def register(self) -> None:
        self.flow = self.start(self.registration.run())

    def purge(self) -> int:
        self.etcd.put(LAYOUT.purge, "")
        self.run(READ_AGAIN_S + 10)
        return self.etcd.revision

    def done(self, *, lasting: bool = True) -> None:
        self.registration.purged(lasting=lasting)
        self.wake(self.flow)
        self.run(0.01)

    @property
    def mark(self) -> int:
        return int(self.etcd.kvs[MARK].value)


def test_the_lease_is_renewed_while_blocks_are_deleted() -> None:
    world = _Purging()
    world.register()
    revision = world.purge()
    world.run(100)
    assert (world.begun, world.mark) == (1, 0)
    assert world.registration.registrations == 1
    assert world.etcd.kvs[KEY].create_revision < revision

    world.done()
    assert (world.begun, world.mark) == (1, revision)
    assert world.registration.registrations == 1


def test_a_purge_that_is_told_meanwhile_is_carried_out_after_the_first() -> None:
    world = _Purging()
    world.register()
    first = world.purge()
    second = world.purge()
    assert world.begun == 1
    world.done()
    assert (world.begun, world.mark) == (2, first)
    world.done()
    world.run(100)
    assert (world.begun, world.mark) == (2, second)


def test_a_node_that_comes_registers_when_its_blocks_are_deleted() -> None:
    world = _Purging()
    first = world.purge()
    world.register()
    second = world.purge()
    assert (world.begun, KEY in world.etcd.kvs) == (1, False)
    world.done()
    assert (world.begun, KEY in world.etcd.kvs) == (2, False)  # the other one came before it was there
    world.done()
    assert world.registration.state is RegistrationState.REGISTERED
    assert first < second == world.mark


def test_a_purge_that_a_restart_may_undo_is_not_told_as_done_and_not_repeated() -> None:
    world = _Purging()
    world.register()
    world.purge()
    world.done(lasting=False)
    world.run(100)
    assert (world.begun, world.mark) == (1, 0)


def test_a_mark_that_somebody_deleted_is_written_again() -> None:
    world = _Purging()
    world.register()
    revision = world.purge()
    world.done()
    world.etcd.delete(MARK)
    world.run(READ_AGAIN_S + 10)
    assert world.mark == revision
