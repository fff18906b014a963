"""The examples run as they stand, against a server of this test's own or embedded."""

import runpy
import sys
from pathlib import Path

import pytest

from tests import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str, cold: bool = False) -> str:
    """Run an example with warnings as errors; return what it printed."""
    command = [sys.executable, "-P", "-W", "error", str(EXAMPLES / name), *arguments]
    done = warm.run(command, cold=cold, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


def test_every_example_is_tested_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")

    assert [file.name for file in EXAMPLES.glob("*.py") if f'"{file.name}"' not in here] == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("original_client.py", arguments) for arguments in ([], ["127.0.0.1"], ["127.0.0.1", "a-port"])),
        *(("prefill_and_decode.py", arguments) for arguments in ([], ["decode"], ["neither", "url", "a b"])),
    ],
)
def test_an_example_that_is_started_wrongly_says_how(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert str(ended.value.code).startswith("usage: ")
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("in_place.py", "numpy"),
        ("first_fit_allocator.py", "hypothesis"),
        ("cold_first_eviction.py", "hypothesis"),
        ("vllm/follow_blocks.py", "msgspec"),
    ],
)
def test_an_example_that_lacks_a_package_names_it(name: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for contract in ("infinistore.allocators.contract", "infinistore.eviction.contract"):
        monkeypatch.delitem(sys.modules, contract, raising=False)  # another test may have imported it
    with pytest.raises(SystemExit, match=f"pip install {missing}"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_quick_start_runs_embedded() -> None:
    printed = run_example("quickstart.py")

    assert "greeting: hello\nlongest prefix: 8 of 10 keys\nKeyNotFound: " in printed


def test_the_quick_start_runs_against_a_server(url: str) -> None:
    assert "the bytes went by: tcp" in run_example("quickstart.py", url)


def test_threads_share_the_blocking_client(url: str) -> None:
    assert run_example("blocking_client.py", url).startswith("4 threads wrote and read 67 MB")


@pytest.mark.parametrize(("where", "pinned"), [("embedded", 262144), ("server", 0)])
def test_blocks_are_written_and_read_in_place_or_as_if(url: str, where: str, pinned: int) -> None:
    printed = run_example("in_place.py", *([url] if where == "server" else []))

    assert printed.startswith(f"scores: [0.0, 1024.0, 2048.0, 3072.0]\npinned: {pinned} bytes\n")


@pytest.mark.parametrize("where", ["embedded", "server"])
def test_layers_are_stored_while_the_next_is_computed(url: str, where: str) -> None:
    printed = run_example("layer_by_layer.py", *([url] if where == "server" else []))

    assert "read back layer by layer, every byte is right\n" in printed


def test_decode_finds_what_prefill_left_and_no_more(url: str) -> None:
    def run(role: str, prompt: str) -> str:
        return run_example("prefill_and_decode.py", role, url, prompt)

    assert run("prefill", "a b c d e f g h") == "prefill: 0 of 4 chunks were there, 4 computed and stored\n"
    assert run("prefill", "a b c d e X g h") == "prefill: 2 of 4 chunks were there, 2 computed and stored\n"
    assert run("decode", "a b c d e f g h") == "decode: loaded 4 of 4 chunks, every byte is right\n"
    assert run("decode", "a b c d Y f g h") == "decode: loaded 2 of 4 chunks, every byte is right\n"
    assert run("decode", "Z b c d e f g h") == "decode: loaded 0 of 4 chunks, every byte is right\n"


def test_a_program_for_the_original_runs_as_it_is(url: str) -> None:
    host, port = url.removeprefix("tcp://").split(":")

    assert run_example("original_client.py", host, port) == (
        "last match: 31\n"
        "read back what was written: True\n"
        "deleted: 32\n"
        "still there: False\n"
        "a read of what is missing is an error of its own\n"
        "by TCP: a value for TCP\n"
    )


@pytest.mark.nightly
def test_an_allocator_of_ones_own_keeps_the_contract() -> None:
    """As tests/allocators does, of the same class."""
    assert run_example("first_fit_allocator.py", cold=True) == "first-fit keeps the contract\n"


@pytest.mark.nightly
def test_an_eviction_strategy_of_ones_own_keeps_the_contract() -> None:
    """As tests/eviction does, of the same class."""
    assert run_example("cold_first_eviction.py", cold=True) == "cold-first keeps the contract\n"


def test_a_mover_of_another_package() -> None:
    """The tests of the clients use it; here it is only seen to load."""
    assert run_example("loopback_mover.py") == ""
