"""The programs on pages that are no tutorials run, too. Each test gives them what the
reader has: a server, a certificate, a disk, a cache.
"""

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import trio

import infinistore
from infinistore import aio, blocking
from infinistore.cli.route import command as route
from infinistore.errors import StoreUnavailable
from infinistore.routing.metrics import Metrics as RouterMetrics
from tests import warm
from tests.bad_days.servers import ServerHere, running_server_here
from tests.documentation.blocks import PROJECT, programs
from tests.routing.fakes import MODEL, routed
from tests.transports.certificates import issue

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHere]:
    with running_server_here() as here:
        yield here


def with_server(code: str, server: ServerHere) -> str:
    """The program for the server of a test, wherever it has one."""
    for host in ("127.0.0.1", "host", "kv1.example"):
        code = code.replace(f"//{host}:22345", f"//127.0.0.1:{server.port}")
    return code.replace("service_port=22345", f"service_port={server.port}")


def run(code: str, **names: Any) -> dict[str, Any]:
    """Run a fragment with these names, and return all names that it has then. Each of
    its statements that awaits runs in Trio, or in asyncio if it names `aio`.
    """
    for statement in ast.parse(code).body:
        compiled = compile(ast.Module([statement], []), "fragment", "exec", flags=FLAGS, dont_inherit=True)
        if compiled.co_flags & inspect.CO_COROUTINE:
            made = FunctionType(compiled, names)

            async def awaited(made: FunctionType = made) -> None:
                found: Coroutine[Any, Any, None] = made()
                await found

            if "aio." in ast.unparse(statement):
                asyncio.run(awaited())
            else:
                trio.run(awaited)
        else:
            exec(compiled, names)
    return names


def program(page: str, containing: str) -> str:
    (found,) = (block.code for block in programs(page) if containing in block.code)
    return found


def printed(code: str, folder: Path) -> str:
    """What a whole program prints."""
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    done = warm.run(command, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


def pytest_of(folder: Path, *arguments: str) -> None:
    """Run the tests in a folder, which is also where they import from."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_program_for_trio_in_the_readme(server: ServerHere, tmp_path: Path) -> None:
    assert printed(with_server(program("README.md", "trio.run"), server), tmp_path) == "True\n"


def test_the_stores_that_can_be_opened(server: ServerHere) -> None:
    run(with_server(program("docs/opening-a-store.md", "import infinistore").replace("1 << 30", "1 << 22"), server))


def test_a_store_as_long_as_a_service(server: ServerHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/opening-a-store.md"

    async def started_and_stopped(service: Any) -> None:
        await service.start()
        assert not await service.store.exists("nothing")
        await service.stop()

    async def served(app: Any) -> None:
        async with app.router.lifespan_context(app):
            assert not await app.state.store.exists("nothing")

    names = run(with_server(program(page, "aio.connect"), server), aio=aio, blocking=blocking)
    assert names["value"] is None
    asyncio.run(started_and_stopped(names["Service"]()))
    asyncio.run(served(run(with_server(program(page, "Starlette"), server), aio=aio)["app"]))
    monkeypatch.chdir(tmp_path)
    cache = run(with_server(program(page, "ExitStack"), server), blocking=blocking)["Cache"](server.url)
    assert not cache.store.exists("nothing")
    cache.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        cache.store.exists("nothing")
    assert cache.log.closed


def test_the_store_with_a_disk(tmp_path: Path) -> None:
    code = program("docs/disk.md", "disk=").replace("/mnt/nvme0:1TiB", f"{tmp_path}/nvme0:64MiB")
    run(code.replace("64 << 30", "1 << 22"), blocking=blocking, blocks={"a": b"1", "b": b"2"})
    with blocking.open_store(pool_bytes=1 << 22, disk=f"{tmp_path}/nvme0:64MiB") as store:
        while (found := store.stats().disk) and found.disks[0].state == "recovering":
            os.sched_yield()
        assert bytes(store.get("b")) == b"2"


def test_the_gauges_of_a_client_of_a_cluster(server: ServerHere) -> None:
    class Gauge:
        def __init__(self) -> None:
            self.value: float | None = None

        def set(self, value: float) -> None:
            self.value = value

    lost_reads, view_age = Gauge(), Gauge()
    with blocking.open_store(f"infinistore+static://127.0.0.1:{server.port}") as store:
        code = program("docs/reference/metrics.md", "lost_reads.set")
        run(code, store=store, lost_reads=lost_reads, view_age=view_age)
    assert lost_reads.value == 0
    assert view_age.value is not None


def test_the_store_by_tls(tmp_path: Path) -> None:
    files = issue(tmp_path)
    code = program("docs/security.md", "infinistores://").replace("ca=ca.pem", f"ca={files.ca}")
    with running_server_here(tls_cert=files.cert, tls_key=files.key) as server:
        run(with_server(code, server))
        with pytest.RaisesGroup(StoreUnavailable, allow_unwrapped=True, flatten_subgroups=True):
            run(with_server(code.replace(str(files.ca), str(issue(tmp_path, ca="two", stem="two").ca)), server))


@pytest.mark.parametrize("what", ["device=", "start:end", "other_block"])
def test_the_programs_for_rdma_without_a_device(what: str, server: ServerHere) -> None:
    """As their page says, they run without one; tests/rdma runs such with one."""
    code = with_server(program("docs/rdma.md", what), server)
    if what == "device=":
        run(code, infinistore=infinistore)
        return
    cache = bytearray(os.urandom(8192))
    opened = f"async with infinistore.open_store('{server.url}') as store:\n"
    slices = {"block": slice(0, 4096), "other_block": slice(4096, 8192), "start": 0, "end": 4096}
    kept = bytes(cache[:4096])
    run(
        opened + "".join(f"    {line}\n" for line in code.splitlines()),
        infinistore=infinistore, kv_cache=memoryview(cache), key="a", **slices,
    )  # fmt: skip
    with blocking.open_store(server.url) as store:
        assert bytes(store.get("a")) == kept
    assert bytes(cache[4096:]) == kept or what == "start:end"


@pytest.mark.nightly
def test_the_contract_tests_an_allocator_of_another_package(tmp_path: Path) -> None:
    example = (PROJECT / "examples" / "first_fit_allocator.py").read_text()
    (tmp_path / "some_package.py").write_text(example.replace("FirstFitAllocator", "BuddyAllocator"))
    (tmp_path / "test_buddy.py").write_text(program("docs/add-an-allocator.md", "TestBuddy"))
    pytest_of(tmp_path)


def test_the_parts_of_a_mover_are_those_of_the_example() -> None:
    """Which tests/clients/test_outside_movers.py runs."""
    example = (PROJECT / "examples" / "loopback_mover.py").read_text()
    for line in program("docs/add-a-mover.md", "LOOPBACK =").split("\n\n"):
        assert line in example


def test_a_request_is_scheduled_by_a_policy_of_the_library_and_by_one_of_your_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run(programs("docs/scheduling.md")[0].code)
    assert capsys.readouterr().out == "http://10.0.0.1:8000: the first token in 0.50 s\n"
    engines = names["engines"]
    engines[0].send("request 2", names["request"], 20.0)
    policy = run(programs("docs/scheduling.md")[1].code)["FewestRequests"]()
    assert policy.pick(names["request"], engines, 20.0) is engines[1]


def test_a_client_of_openai_asks_a_router(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """OpenAI's client is an imitation here; the router and its headers are not."""

    class Answered:
        def __init__(self, headers: dict[str, str]) -> None:
            self.headers = headers

        def parse(self) -> Any:
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="A cache."))])

    def open_client(*, base_url: str, api_key: str) -> Any:
        assert base_url == f"http://127.0.0.1:{route_default('port')}/v1"

        def create(**body: Any) -> Answered:
            async def ask() -> Answered:
                async with routed("a") as world:
                    _, _, headers = await world.ask("/v1/chat/completions", {**body, "model": MODEL})
                    return Answered(headers)

            return trio.run(ask)

        return SimpleNamespace(
            chat=SimpleNamespace(completions=SimpleNamespace(with_raw_response=SimpleNamespace(create=create)))
        )

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=open_client))
    run(program("docs/fleet.md", "OpenAI"))
    assert capsys.readouterr().out == "http://a\nA cache.\n"


def route_default(name: str) -> Any:
    (found,) = (one.default for one in route.params if one.name == name)
    return found


def test_the_metrics_of_a_router_are_those_of_its_page() -> None:
    text = RouterMetrics([], lambda: 0.0).text().decode()
    named = {name for name in re.findall(r"^# TYPE (\w+)", text, re.MULTILINE) if not name.endswith("_created")}
    page = (PROJECT / "docs" / "fleet.md").read_text()
    assert set(re.findall(r"^\| `(infinistore_router_\w+)", page, re.MULTILINE)) == named


def test_a_long_conversation_is_cut_in_a_chat_and_in_an_agent() -> None:
    chat, agent = (run(one.code) for one in programs("docs/long-conversations.md"))
    sent: list[list[dict[str, str]]] = []

    def create(model: str, messages: list[dict[str, str]]) -> Any:
        sent.append(messages)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="a" * 2000))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    tokenizer = SimpleNamespace(encode=lambda text: [0] * (len(text) // 2))
    turns = [[{"role": "system", "content": "Be brief."}]]
    for turn in range(60):
        assert chat["ask"](client, "model", tokenizer, turns, f"question {turn}") == "a" * 2000
        assert sent[-1][0] == turns[0][0]
        assert sent[-1][-1]["content"] == f"question {turn}"
        assert [one["role"] for one in sent[-1][1:]] == [*["user", "assistant"] * (len(sent[-1]) // 2 - 1), "user"]
    assert len(turns) == 61
    assert sum(after[: len(before)] != before for before, after in pairwise(sent)) == 7, "cuts"

    messages = [{"role": role, "content": role} for role in ("system", "user", *["assistant", "tool"] * 5)]
    shown = agent["prompt"](messages, [100 if one["role"] == "tool" else 10 for one in messages], 400)
    gone = [one for one, message in enumerate(shown) if message["content"] == agent["GONE"]]
    assert gone == [3, 5, 7]
