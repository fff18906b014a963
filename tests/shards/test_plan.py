"""How what was asked for is divided among shards."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.config import ServerConfig
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.server.shards.fleet import choose_cores, divide, prepare_disks, siblings_here
from infinistore.sizes import GIB, KIB, MIB
from tests.tables import for_each

PAGE = 4 * KIB


def parts_of(config: ServerConfig, *, available_bytes: int = GIB) -> list[ServerConfig]:
    return divide(config, page_bytes=PAGE, available_bytes=available_bytes, spins=True)


@given(
    count=st.integers(1, 64),
    pool_bytes=st.integers(64 * 64 * KIB, 16 * GIB),
    unit=st.sampled_from([64, 768, 3 * MIB]),
    page_bytes=st.sampled_from([4 * KIB, 2 * MIB]),
)
def test_the_pool_is_divided_into_equal_parts_of_whole_pages(
    count: int, pool_bytes: int, unit: int, page_bytes: int
) -> None:
    pool_bytes = max(pool_bytes, count * unit)
    config = ServerConfig(shards=count, service_port=0, prealloc_bytes=pool_bytes, minimal_allocate_bytes=unit)
    (part,) = {one.prealloc_bytes for one in divide(config, page_bytes=page_bytes, available_bytes=GIB, spins=True)}
    assert pool_bytes - count * page_bytes < part * count <= pool_bytes
    assert part % page_bytes == 0 or part == pool_bytes // count < max(unit, page_bytes) + page_bytes


@for_each(
    case=[
        (
            {"service_port": 5000, "unix_socket": "/run/s.sock"}, ("service_port", "unix_socket"),
            [(5000, "/run/s.sock"), (5001, "/run/s.sock.1"), (5002, "/run/s.sock.2")],
        ),
        ({"service_port": 0, "unix_socket": "auto"}, ("service_port", "unix_socket"), [(0, "auto")] * 3),
        ({"service_port": 0, "unix_socket": "off"}, ("service_port", "unix_socket"), [(0, "off")] * 3),
        (
            {"cluster": "infinistore+etcd://h/c", "node_id": "r 1", "node_weight": 100, "advertise": "host:7000"},
            ("node_id", "node_weight", "advertise"),
            [("r 1/0", 33, "host:7000"), ("r 1/1", 33, "host:7001"), ("r 1/2", 33, "host:7002")],
        ),
        ({"advertise": "host"}, ("node_id", "advertise"), [(None, "host")] * 3),
    ]
)  # fmt: skip
def test_ports_sockets_and_nodes_follow_those_of_the_first_unless_they_are_free(
    case: tuple[dict[str, Any], tuple[str, ...], list[tuple[Any, ...]]],
) -> None:
    given, names, each = case
    config = ServerConfig(shards=3, prealloc_bytes=MIB, **given)
    assert [tuple(getattr(one, name) for name in names) for one in parts_of(config)] == each


@pytest.mark.parametrize(("whole", "each"), [(0, 0), (1, 1), (2, 1), (3, 2), (10_000, 5000)])
def test_shards_divide_the_weight_and_have_none_of_none(whole: int, each: int) -> None:
    config = ServerConfig(shards=2, prealloc_bytes=MIB, node_weight=whole)
    assert [one.node_weight for one in parts_of(config)] == [each, each]


def test_each_shard_has_a_part_of_each_disk_in_a_folder_that_tells_how_many_there_are() -> None:
    disks = (DiskPlace(Path("/mnt/a"), GIB), DiskPlace(Path("/mnt/b"), 2 * GIB))
    parts = parts_of(ServerConfig(shards=2, service_port=0, prealloc_bytes=MIB, disks=disks))
    assert [one.disks for one in parts] == [
        (DiskPlace(Path(f"/mnt/a/shard-{n}-of-2"), GIB // 2), DiskPlace(Path(f"/mnt/b/shard-{n}-of-2"), GIB))
        for n in range(2)
    ]


def test_growth_is_divided_whether_its_limit_was_given_or_is_the_machine() -> None:
    config = ServerConfig(shards=4, service_port=0, prealloc_bytes=MIB, max_pool_bytes=8 * MIB, auto_increase=True)
    assert {one.max_pool_bytes for one in parts_of(config)} == {2 * MIB}
    config = attrs.evolve(config, max_pool_bytes=None)
    assert {one.max_pool_bytes for one in parts_of(config, available_bytes=GIB)} == {GIB // 4}
    assert {one.max_pool_bytes for one in parts_of(config, available_bytes=0)} == {MIB // 4}
    config = attrs.evolve(config, auto_increase=False)
    assert {one.max_pool_bytes for one in parts_of(config)} == {None}


def test_limits_of_requests_and_connections_are_those_of_each_shard() -> None:
    config = ServerConfig(shards=2, service_port=0, prealloc_bytes=MIB, max_connections=10, max_batch_keys=100)
    for part in parts_of(config):
        divided = ("shards", "prealloc_bytes", "disks", "max_pool_bytes", "unix_socket", "service_port", "node_weight")
        same = {field.name: getattr(config, field.name) for field in attrs.fields(ServerConfig)}
        assert attrs.evolve(part, **{name: same[name] for name in divided}) == config


def test_each_shard_has_a_core_and_physical_ones_come_first() -> None:
    siblings = {core: frozenset((core % 4, core % 4 + 4)) for core in range(8)}
    every = frozenset(range(8))
    assert choose_cores(every, siblings, 4) == [0, 1, 2, 3]
    every_other = frozenset((1, 3, 4, 5))
    assert choose_cores(every_other, siblings, 2) == [1, 3]
    neighbours = {core: frozenset((core // 2 * 2, core // 2 * 2 + 1)) for core in range(8)}
    assert choose_cores(every, neighbours, 4) == [0, 2, 4, 6]
    assert choose_cores(frozenset((2, 3, 4, 7)), neighbours, 2) == [2, 4]
    assert choose_cores(frozenset((1, 3, 4, 7)), {}, 2) == [1, 3]


def test_without_two_cores_for_each_shard_none_has_its_own() -> None:
    assert choose_cores(frozenset((0, 1, 2)), {}, 2) is None
    assert choose_cores(frozenset((0, 1, 2, 3)), {}, 2) is not None


@pytest.mark.parametrize(
    ("given", "spins", "spin_us"), [(None, True, None), (None, False, 0), (50, False, 50), (0, True, 0)]
)
def test_shards_spin_if_there_is_room_or_somebody_wants_it(given: int | None, spins: bool, spin_us: int | None) -> None:
    config = ServerConfig(shards=2, service_port=0, prealloc_bytes=MIB, spin_us=given)
    parts = divide(config, page_bytes=PAGE, available_bytes=GIB, spins=spins)
    assert [one.spin_us for one in parts] == [spin_us] * 2


def test_every_core_of_this_machine_is_its_own_sibling() -> None:
    assert all(core in found for core, found in siblings_here(frozenset((0, 1, 100_000))).items())


def test_the_folder_of_a_disk_is_created_and_taken_again(tmp_path: Path) -> None:
    place = DiskPlace(tmp_path / "disk", GIB)
    prepare_disks([place], 2)
    (place.folder / "shard-0-of-2").mkdir()
    prepare_disks([place], 2)
    assert [path.name for path in place.folder.iterdir()] == ["shard-0-of-2"]


@pytest.mark.parametrize(("name", "count"), [("shard-0-of-4", 4), ("disk", 1)])
def test_a_disk_with_blocks_of_another_number_of_shards_is_refused(tmp_path: Path, name: str, count: int) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"has blocks of --shards {count}, .* or remove what is in the folder"):
        prepare_disks([DiskPlace(tmp_path, GIB)], 2)


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk .*missing/disk: No such file or directory; create the folder"):
        prepare_disks([DiskPlace(tmp_path / "missing" / "disk", GIB)], 2)
