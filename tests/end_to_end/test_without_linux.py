"""Clients and embedded stores work where there is no Linux, as on a Mac, and what does
not work there says so. No Mac is here: what only Linux has is hidden instead.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests import warm

WITHOUT_LINUX = str(Path(__file__).with_name("without_linux.py"))

STORES = """
import asyncio, json, sys
import trio
import infinistore
from infinistore import aio, blocking

long = bytes(range(256)) * 20_000

def use(store):
    assert store.put_many([("a", b"1"), ("b", long)]) == []
    assert bytes(store.get("b")) == long
    assert store.get_many(["a", "x"]) == [b"1", None]
    assert store.match_prefix(["a", "b", "x"]) == 2
    with store.lease(["b"]) as views:
        assert bytes(views[0]) == long
    assert store.keys() == ["a", "b"]
    assert store.delete(["a", "b", "x"]) == 2
    return store.stats().transport

async def use_async(open_store, *where, **options):
    async with open_store(*where, **options) as store:
        await store.put("c", long)
        assert bytes(await store.get("c")) == long
        await store.delete(["c"])

url = sys.argv[1]
nodes = f"infinistore+file://{sys.argv[2]}"
transports = []
for where, options in [((), {"pool_bytes": 16 << 20}), ((url,), {}), ((url.replace("tcp", "infinistore"),), {})]:
    with blocking.open_store(*where, **options) as store:
        transports.append(use(store))
    trio.run(lambda: use_async(infinistore.open_store, *where, **options))
    asyncio.run(use_async(aio.open_store, *where, **options))
with blocking.open_store(nodes) as store:
    store.put("d", long)
    assert bytes(store.get("d")) == long
print(json.dumps(transports))
"""

ERRORS = """
import contextlib, io, json, sys
import trio
from infinistore import blocking, server
from infinistore.cli import main
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError

said = {}
for name, where, options in [
    ("shared memory", ("shm:///run/store.sock",), {}),
    ("RDMA", ("rdma://127.0.0.1:9",), {}),
    ("a transport", ("infinistore://127.0.0.1:9",), {"transport": "shm"}),
    ("a disk", (), {"disk": f"{sys.argv[2]}:1GiB"}),
    ("huge pages", (), {"huge_pages": True}),
    ("a NUMA node", (), {"numa_node": 0}),
]:
    try:
        with blocking.open_store(*where, **options):
            said[name] = "it opens"
    except ConfigError as error:
        said[name] = str(error)
try:
    trio.run(server.serve, ServerConfig(service_port=0))
except* ConfigError as group:
    said["server"] = str(group.exceptions[0])
for arguments in sys.argv[3:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(arguments.split())
        except SystemExit as end:
            said[arguments] = f"{end.code}: {out.getvalue()}"
print(json.dumps(said))
"""


def run(program: str, *arguments: str) -> Any:
    """Run a program without Linux; return what it says."""
    command = [sys.executable, "-P", "-W", "error", WITHOUT_LINUX, program, *arguments]
    done = warm.run(command, cold=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stores_work_without_linux(url: str, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text(json.dumps({"nodes": [{"id": "a", "address": url.removeprefix("tcp://")}]}))

    assert run(STORES, url, str(nodes)) == ["embedded", "tcp", "tcp"]


def test_what_needs_linux_says_so_and_other_commands_work(url: str, tmp_path: Path) -> None:
    refused = ("serve", "serve --shards 2", "demo", f"disk inspect {tmp_path}")
    work = ("--help", f"stat --url {url}", f"selftest --url {url}", f"doctor --disk {tmp_path}")

    said = run(ERRORS, url, str(tmp_path), *refused, *work)

    codes = {arguments: said.pop(arguments).partition(":")[0] for arguments in work}
    assert codes == {work[0]: "0", work[1]: "0", work[2]: "0", work[3]: "1"}  # the disk is bad
    assert {name: text for name, text in said.items() if "inux" not in text and name != "a NUMA node"} == {}
    assert "leave the setting out" in said["a NUMA node"]
    assert [said[arguments][:1] for arguments in refused] == ["2"] * len(refused)
