"""The state of a node in a file that lists it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from infinistore.cluster.locate import FilePlace
from infinistore.cluster.membership import NodeState
from infinistore.cluster_io.operators import set_state_in_file
from infinistore.errors import ConfigError

NODES: dict[str, Any] = {
    "copies": 2,
    "nodes": [{"id": "a", "address": "a:1", "weight": 7}, {"id": "b", "address": "b:1"}],
    "note": "theirs",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(NODES))
    file.chmod(0o640)
    return file


def drain(file: Path, node: str = "a", *, state: NodeState = NodeState.DRAINING, force: bool = False) -> bool:
    return trio.run(partial(set_state_in_file, FilePlace(file), node, state, force=force))


def test_the_state_is_written_and_the_rest_stays(file: Path) -> None:
    assert drain(file)
    wanted = json.loads(json.dumps(NODES))
    wanted["nodes"][0]["state"] = "draining"
    assert json.loads(file.read_text()) == wanted
    assert file.stat().st_mode & 0o777 == 0o640
    assert not drain(file)
    assert drain(file, state=NodeState.SERVING)
    assert json.loads(file.read_text())["nodes"][0]["state"] == "serving"
    assert list(file.parent.iterdir()) == [file]


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(file: Path) -> None:
    link = file.parent / "link.json"
    link.symlink_to(file)
    assert drain(link)
    assert link.is_symlink()
    assert "draining" in file.read_text()


def test_the_last_node_needs_force(file: Path) -> None:
    drain(file)
    with pytest.raises(ConfigError, match=r"b is the last node of .*nodes.json that takes blocks: .*--force"):
        drain(file, "b")
    assert drain(file, "b", force=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", 'nodes.json must have a list of "nodes"'),
        ("nonsense", "nodes.json is not JSON"),
        (json.dumps(NODES), "has no node 'c'; it has a, b"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(file: Path, text: str | None, problem: str) -> None:
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        drain(file, "c")


def test_a_file_that_cannot_be_written_says_what_to_write_where(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("infinistore.cluster_io.operators.tempfile.mkstemp", refuse)
    with pytest.raises(ConfigError, match='Read-only file system; write "state": "draining" for a where'):
        drain(file)
    assert json.loads(file.read_text()) == NODES
