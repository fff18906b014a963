"""What one node refuses, others have done: what docs/promises.md says of errors."""

from collections.abc import Iterator

import pytest

from infinistore import blocking
from infinistore.errors import InfiniStoreException, OutOfMemory, ValueTooLarge
from tests.cluster_client.clusters import Cluster, Member
from tests.server.running import KIB, MIB


@pytest.fixture
def large_and_small() -> Iterator[Cluster]:
    members: list[Member] = []
    try:
        members.extend(Member(prealloc_bytes=size, minimal_allocate_bytes=KIB) for size in (8 * MIB, MIB))
        yield Cluster(members)
    finally:
        for member in members:
            member.stop()


@pytest.mark.parametrize(
    ("error", "blocks"),
    [
        (ValueTooLarge, {"key": bytes(2 * MIB)}),
        (OutOfMemory, {f"{{tag}} {i}": bytes(MIB // 2) for i in range(4)}),
    ],
)
def test_a_copy_that_is_refused_by_one_node_is_stored_on_the_other(
    error: type[InfiniStoreException], blocks: dict[str, bytes], large_and_small: Cluster
) -> None:
    large, small = large_and_small.members
    with blocking.open_store(large_and_small.url("copies=2"), deadline_s=60) as store:
        with pytest.raises(error, match=small.address):
            store.put_many(blocks)
        assert (large.keys(), small.keys()) == (set(blocks), set())
        assert store.exists_many(list(blocks)) == [True] * len(blocks)
