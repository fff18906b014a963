"""jemalloc, in processes that were prepared for it.

A process must be started with a tunable to load the library, so the tests of the
contract run again in one that was.
"""

import ctypes.util
from collections.abc import Callable
from pathlib import Path

import pytest

from infinistore.allocators import create_allocator, jemalloc, prepare_process
from infinistore.errors import ConfigError
from tests.allocators.processes import PREPARED, jemalloc_is_missing_here, needs_jemalloc, run_python

UNIT = 64 * 1024

is_prepared = not jemalloc_is_missing_here()

needs_library = pytest.mark.skipif(
    not is_prepared
    and ctypes.util.find_library("jemalloc") is None
    and not list(Path("/usr/lib").glob("**/libjemalloc.so.2")),
    reason="libjemalloc.so.2 is not installed (Debian: libjemalloc2)",
)


def starts_processes(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that the process which runs the tests of the contract leaves out."""
    once = pytest.mark.skipif(is_prepared, reason="the process that started this one has done so")
    return needs_library(pytest.mark.process(once(test)))


@starts_processes
def test_jemalloc_keeps_the_contract_in_a_process_that_was_prepared() -> None:
    done = run_python("-m", "pytest", "tests/allocators", "-v", "-W", "error", "-k", "jemalloc", environment=PREPARED)
    assert done.returncode == 0, done.stdout + done.stderr
    for ran in (
        "TestJemalloc::test_calls_in_any_order_agree_with_a_model",
        "TestJemalloc::test_nothing_can_be_placed_before_the_first_arena",
    ):
        assert f"{ran} PASSED" in done.stdout


PROGRAM = """
import sys
print("started", flush=True)
from infinistore.allocators import create_allocator, prepare_process
prepare_process("jemalloc")
allocator = create_allocator("jemalloc", 64)
allocator.add_arena(0, 6400)
print(allocator.allocate([64, 128]), sys.argv[1:], flush=True)
"""


@starts_processes
def test_a_process_prepares_itself_by_starting_again_once_with_the_same_arguments() -> None:
    environment = {name: value for name, value in PREPARED.items() if name != "GLIBC_TUNABLES"}
    done = run_python("-c", PROGRAM, "--one", "two three", environment=environment)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:-1] in (["started"], ["started", "started"])
    assert lines[-1] == "[(0, 0, 64), (0, 64, 128)] ['--one', 'two three']"


@starts_processes
def test_other_tunables_survive_the_new_start() -> None:
    environment = {**PREPARED, "GLIBC_TUNABLES": "glibc.malloc.check=0"}
    program = PROGRAM + "import os; print(os.environ['GLIBC_TUNABLES'])"
    done = run_python("-c", program, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("glibc.malloc.check=0")


CPP_PROGRAM = """
import ctypes
from infinistore.allocators import create_allocator
create_allocator("jemalloc", 64)
make_string = ctypes.CDLL("libstdc++.so.6")._ZNSs4_Rep9_S_createEmmRKSaIcE
make_string.argtypes, make_string.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_void_p
free = ctypes.CDLL(None).free
free.argtypes = [ctypes.c_void_p]
free(make_string(100, 0, None))
print("done")
"""


@starts_processes
def test_the_c_plus_plus_runtime_keeps_its_own_memory() -> None:
    """A string that libstdc++ made can be freed by the process's `free`, which would
    abort at one of jemalloc's.
    """
    done = run_python("-c", CPP_PROGRAM, environment=PREPARED)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_missing_library_is_answered_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jemalloc, "_LIBRARY", "libjemalloc-that-is-not-there.so.2")
    jemalloc._library.cache_clear()
    with pytest.raises(ConfigError, match="apt-get install libjemalloc2"):
        create_allocator("jemalloc", UNIT)
    with pytest.raises(ConfigError, match="apt-get install libjemalloc2"):
        prepare_process("jemalloc")


@needs_library
@pytest.mark.skipif(is_prepared, reason="this process can load the library")
def test_a_process_that_was_not_prepared_is_told_how() -> None:
    with pytest.raises(ConfigError, match="prepare_process"):
        create_allocator("jemalloc", UNIT)


@needs_jemalloc
def test_jemalloc_gives_its_addresses_back_with_the_allocator() -> None:
    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    create_allocator("jemalloc", UNIT)
    before = address_space()
    for _ in range(5):
        allocator = create_allocator("jemalloc", UNIT)
        allocator.add_arena(0, UNIT << 18)  # one gigabyte of addresses
        assert allocator.allocate([UNIT] * 5) is not None
        assert address_space() - before > 1 << 17
        del allocator
    assert address_space() - before < 1 << 17


@needs_jemalloc
def test_jemalloc_takes_the_lowest_place_and_joins_what_is_freed() -> None:
    allocator = create_allocator("jemalloc", UNIT)
    allocator.add_arena(0, 1000 * UNIT)
    blocks = allocator.allocate([UNIT] * 1000)
    assert blocks is not None
    assert sorted(blocks) == [(0, index * UNIT, UNIT) for index in range(1000)]
    allocator.free([block for block in blocks if 300 <= block[1] // UNIT < 400])
    assert allocator.allocate([80 * UNIT]) == [(0, 300 * UNIT, 80 * UNIT)]
    assert allocator.allocate([16 * UNIT]) == [(0, 381 * UNIT, 16 * UNIT)]  # one unit of padding


@needs_jemalloc
def test_jemalloc_says_what_a_block_takes() -> None:
    allocator = create_allocator("jemalloc", UNIT)
    allocator.add_arena(0, 1000 * UNIT)
    for units, taken in ((1, 1), (2, 2), (3, 3), (4, 5), (8, 9), (9, 11), (224, 225), (225, 257)):
        assert allocator.footprint(units * UNIT) == taken * UNIT
