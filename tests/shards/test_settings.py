"""What a server with shards refuses before it starts anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from infinistore.config import MOST_SHARDS as MOST_IN_SETTINGS
from infinistore.config import ServerConfig, load_server_config
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.protocol.messages import MOST_SHARDS
from infinistore.server import serve
from infinistore.sizes import KIB, MIB


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"shards": "0"}, "--shards 0: must be a whole number between 1 and 256"),
        ({"shards": "257"}, "--shards 257: must be a whole number between 1 and 256"),
        (
            {"shards": "3", "service_port": "65534"},
            "--shards 3: would need the ports 65534 to 65536; lower --service-port",
        ),
        (
            {"shards": "4", "service_port": "100", "manage_port": "103"},
            "--manage-port 103: is the port of a shard too: they have 100 to 103; give one of them another port",
        ),
        (
            {"shards": "4", "prealloc_size": "255KiB"},
            "--prealloc-size 255KiB: leaves less than 64KiB for each of 4 shards; give 256KiB or more",
        ),
        (
            {"shards": "2", "prealloc_size": "3MiB", "minimal_allocate_size": "2MiB"},
            "--prealloc-size 3MiB: leaves less than 2MiB for each of 2 shards; give 4MiB or more",
        ),
        (
            {"shards": "2", "disk": "/mnt/a:100MiB"},
            "--disk /mnt/a:100MiB: /mnt/a:100MiB leaves less than 64MiB for each of 2 shards; give 128MiB or more",
        ),
    ],
)
def test_what_cannot_be_divided_is_one_clear_line(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_server_config(given, environment={})
    assert str(refused.value) == problem


def test_what_is_enough_for_one_server_is_enough_without_shards() -> None:
    config = ServerConfig(
        service_port=65535, prealloc_bytes=64 * KIB, disks=(DiskPlace(Path("/mnt/a"), 64 * MIB),), manage_port=18080
    )
    assert config.shards == 1


def test_a_management_port_after_those_of_the_shards_is_free() -> None:
    assert ServerConfig(shards=4, service_port=100, manage_port=104).manage_port == 104
    assert ServerConfig(shards=4, service_port=0, manage_port=3).manage_port == 3


def test_as_many_shards_can_be_told_as_can_be_had() -> None:
    assert MOST_IN_SETTINGS == MOST_SHARDS


async def test_a_server_in_this_process_has_no_shards() -> None:
    with pytest.raises(ConfigError, match="--shards 2: this is one process; start the command infinistore"):
        await serve(ServerConfig(shards=2))


@pytest.mark.process
def test_a_plain_server_loads_nothing_of_shards() -> None:
    program = (
        "import sys; from infinistore.server import serve; print([n for n in sys.modules if 'server.shards' in n])"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout == b"[]\n"
