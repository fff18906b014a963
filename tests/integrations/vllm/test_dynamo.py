"""Dynamo's own indexer follows vLLM's publisher with what the connector tells, and
reads dumps.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinistore.integrations.vllm.block_events import BlockEvents, Run

from .marks import NEEDS_VLLM
from .test_dumps import BLOCK, asking, decoded, numbered, publish, publishing, removed, stored

HELPER = Path(__file__).with_name("dynamo_indexer.py")
ALONE = ["unshare", "--user", "--map-root-user", "--net"]


def may_be_alone() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode == 0


pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs Dynamo: make test-integrations"),
    pytest.mark.process,
    pytest.mark.nightly,
]
Ask = Callable[..., Any]
Block = tuple[int, int | None, int]
"""Its hash, that of its parent, and Dynamo's hash of its tokens."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def ask(log: Path) -> Iterator[Ask]:
    """Asks an indexer in a process and a network of its own."""
    if not may_be_alone():
        pytest.skip("Dynamo's indexer listens on all addresses, and no network of its own can be made here")
    with subprocess.Popen(
        [*ALONE, sys.executable, "-P", str(HELPER), str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        told, heard = process.stdin, process.stdout
        assert told is not None
        assert heard is not None

        def ask(path: str, **posted: Any) -> Any:
            told.write(f"{path} {json.dumps(posted) if posted else ''}\n")
            told.flush()
            return json.loads(heard.readline())

        try:
            yield ask
        finally:
            told.close()


def register(ask: Ask, worker: int, **endpoints: str) -> None:
    assert ask("/register", instance_id=worker, model_name="made", block_size=BLOCK, **endpoints) == {"status": "ok"}


def blocks_of(ask: Ask) -> dict[int, set[Block]]:
    """The blocks of each worker."""
    found: dict[int, set[Block]] = {}
    for told in ask("/dump")["made:default"]["events"]:
        stored = told["event"]["data"]["stored"]
        parent = stored["parent_hash"]
        for block in stored["blocks"]:
            found.setdefault(told["worker_id"], set()).add((block["block_hash"], parent, block["tokens_hash"]))
            parent = block["block_hash"]
    return found


def hashes(blocks: set[Block]) -> set[int]:
    return {name for name, _, _ in blocks}


def test_it_reads_the_connectors_events_and_leaves_out_what_is_in_a_store(ask: Ask, log: Path, tmp_path: Path) -> None:
    """It asks vLLM's replay for what it has missed before it had subscribed."""
    from infinistore.integrations.vllm.kv_events import Teller

    about = SimpleNamespace(lora_id=None, lora_name=None)
    changes = BlockEvents(
        1,
        lambda request, first, end: Run(
            (101, 102), None, tuple(range(2 * BLOCK)), about, ((("cache_salt", "s"),), None)
        ),
    )
    group: Any = SimpleNamespace(index=0, block_tokens=BLOCK)
    teller = Teller(changes, group, "full_attention")
    with publishing(tmp_path) as publisher:
        changes.found(None, ["one", "two"])
        publish(publisher, stored([1, 2, 3], kv_cache_spec_kind="full_attention"), *teller.take())
        changes.missing(["two"])
        publish(publisher, stored([4], 3), removed([2]), *teller.take())
        register(ask, 1, endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/replay")
        publish(publisher, stored([5], 1))
        while 5 not in hashes(blocks_of(ask).get(1, set())):
            publish(publisher)

    assert hashes(blocks_of(ask)[1]) >= {1, 5}
    assert hashes(blocks_of(ask)[1]).isdisjoint({101, 102})
    told = log.read_text()
    assert "Failed to decode" not in told
    assert "ERROR" not in told


def test_one_that_is_given_a_dump_has_the_same_as_one_that_saw_everything(ask: Ask, log: Path, tmp_path: Path) -> None:
    import zmq

    with ExitStack() as stack:
        publisher = stack.enter_context(publishing(tmp_path))
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        relay = context.socket(zmq.XPUB)
        relay.bind(f"ipc://{tmp_path}/relay")
        register(ask, 1, endpoint=f"ipc://{tmp_path}/live", replay_endpoint=f"ipc://{tmp_path}/replay")
        register(ask, 2, endpoint=f"ipc://{tmp_path}/relay")
        publish(publisher, stored(range(1, 2001)))
        publish(publisher, stored(range(3001, 3101), 70), stored([1, 2], medium="STORAGE", locality="REMOTE"))
        publish(publisher, removed([3100, 2000]), stored([4000], 3099))

        assert relay.recv() == b"\x01"  # it has subscribed
        asked = stack.enter_context(asking(tmp_path))
        asked.send_multipart([b"", b"dump"])
        _, *answer = asked.recv_multipart()
        header, _ = decoded(answer)
        parts = [answer[1]]
        for part in range(1, header["parts"]):
            asked.send_multipart([b"", *numbered(header, part)])
            parts.append(asked.recv_multipart()[2])
        assert (header["next"], len(parts)) == (3, 3)
        for number, batch in enumerate(parts):
            relay.send_multipart([b"", number.to_bytes(8, "big"), batch])
        while 4000 not in hashes(blocks_of(ask).get(1, set())):
            publish(publisher)
        while 4000 not in hashes(blocks_of(ask).get(2, set())):
            pass

        found = blocks_of(ask)
        assert hashes(found[1]) == {*range(1, 2000), *range(3001, 3100), 4000}
        assert found[2] == found[1]
    assert "Failed to decode" not in log.read_text()
