"""The demonstration with a cluster: a node is killed, another one joins, and nothing is
left behind.
"""

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from infinistore.demo.prompts import KVLayout, block_key, chunk_names

from .conftest import started
from .test_demo import CHUNK_TOKENS, LAYERS, SMALL, demo_as_json, is_running, refused, text_file

__all__ = ["text_file"]

NODES = [*SMALL, "--pool-size", "64MiB", "--nodes", "3"]


@pytest.fixture
def without_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


def check(found: Any) -> None:
    """Nothing but what was lost is missing, and what was computed again is there."""
    loss, join = found["cluster"]["loss"], found["cluster"]["join"]
    whole = found["prompts"][0]["decode"]["hit_tokens"]
    assert loss["blocks"] == whole // CHUNK_TOKENS * LAYERS
    assert 0 < loss["missing_blocks"] <= loss["blocks"]
    assert loss["hit_tokens"] < whole
    assert loss["hit_tokens_again"] == whole
    assert (join["node"], join["moved_blocks"] <= join["blocks"]) == ("node-4", True)


@pytest.mark.usefixtures("without_etcd")
def test_a_lost_node_takes_only_its_part_and_a_new_one_gets_copies(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = demo_as_json(*NODES, "--input", str(text_file))
    assert found["cluster"]["membership"] == "file"
    check(found)
    assert found["cluster"]["join"]["reads"] == 2
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_with_etcd_the_lease_of_a_killed_node_runs_out(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = demo_as_json(*NODES, "--input", str(text_file))
    assert found["cluster"]["membership"] == "etcd"
    check(found)
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.nightly
@pytest.mark.usefixtures("without_etcd")
def test_a_signal_ends_all_nodes_and_removes_the_folder(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started("demo", *NODES, "--input", str(text_file)) as demo:
        assert demo.stdout is not None
        processes: list[int] = []
        while "Prompt A" not in (line := demo.stdout.readline()):
            assert line, "the demo ended"
            processes += map(int, re.findall(r" process (\d+) ", line))
        assert len(processes) == 5
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate()
    assert demo.returncode == 128 + signal.SIGINT
    assert errors == "infinistore: stopped by SIGINT; the server and the workers have ended\n"
    assert not any(map(is_running, processes))
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.nightly
@pytest.mark.usefixtures("without_etcd")
def test_a_node_that_ends_by_itself_is_named(text_file: Path) -> None:
    with started("demo", *NODES, "--input", str(text_file), "--prefill-tokens-per-s", "1") as demo:
        assert demo.stdout is not None
        processes: dict[str, int] = {}
        while "Prompt A" not in (line := demo.stdout.readline()):
            assert line, "the demo ended"
            processes |= {name: int(number) for name, number in re.findall(r"^(node-\d) +process (\d+) ", line)}
        os.kill(processes["node-2"], signal.SIGKILL)
        _, errors = demo.communicate()
    assert demo.returncode == 1
    assert "the node-2 process was killed by signal 9" in errors


@pytest.mark.parametrize("other", [["--disk"], ["--url", "tcp://127.0.0.1:1"], ["--nodes", "1"]], ids=str)
def test_what_does_not_go_together_is_refused(other: list[str], tmp_path: Path) -> None:
    assert refused(tmp_path, "--nodes", "3", *other).returncode == 2


def test_chunks_of_a_group_have_one_hash_tag() -> None:
    grouped = KVLayout(layers=1, chunk_tokens=4, group_chunks=2)
    keys = [block_key(name, 0) for name in chunk_names(grouped, range(20))]
    tags = [re.match(r"demo/\{([0-9a-f]{32})\}([0-9a-f]{32})/L00$", key) for key in keys]
    assert all(tags) and len(keys) == 5
    named = [(found[1], found[2]) for found in tags if found]
    first_of_group = [named[index - index % 2][1] for index in range(5)]
    assert [tag for tag, _ in named] == first_of_group
    plain = [block_key(name, 0) for name in chunk_names(KVLayout(layers=1, chunk_tokens=4), range(20))]
    assert [key.split("/")[1] for key in plain] == [own for _, own in named]
