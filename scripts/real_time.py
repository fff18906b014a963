"""Name tests that look at a clock: they pass or fail by how busy the machine is.

    python scripts/real_time.py    name them, and fail if there are any

`make check` calls it. What it looks for in `tests/`:

- a sleep, but for a checkpoint (`sleep(0)`) and for one in virtual time
- a bound of less than 60 s on something that waits, outside of virtual time
- a look at the clock, which some comparison will be made of

A function is in virtual time if it, or one around it, has the fixture `autojump_clock`
or `mock_clock` as an argument, as pytest-trio wants it, or calls `run_in_virtual_time`;
or if that is so of every test of its module, or the module makes a `MockClock`. What
cannot do without says why on the line, `# real time: the peer never answers`; a bound that is certain to pass,
however slow the machine, is the usual reason. `tests/real_time` is where real time is
the subject. What is listed in `ELSEWHERE` is in virtual time as a whole, or is run by
itself.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT = Path(__file__).resolve().parents[1]

ENOUGH_S: Final = 60
"""What a test may wait for: a machine that was stopped for a while, and goes on."""

ELSEWHERE: Final = (
    "churn", "cluster_network", "deploy", "mutants/", "packages", "rdma", "real_time", "simulation", "site", "stress",
    "cluster_io/measure",
    *(f"integrations/{engine}/" for engine in ("aibrix", "lmcache", "sglang", "vllm")),
)  # fmt: skip
CLOCKS: Final = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "current_time"}
VIRTUAL: Final = {"autojump_clock", "mock_clock"}
RUNS_VIRTUAL: Final = "run_in_virtual_time"
BOUNDS: Final = {"timeout", "seconds", "timeout_s", "deadline_s"}
WAITS: Final = {
    "fail_after": 0, "join": 0, "move_on_after": 0, "result": 0, "settimeout": 0, "wait": 0, "wait_for": 1,
}  # fmt: skip
"""Methods and functions that wait, and which argument says for how long."""


def number(node: ast.expr | None) -> float | None:
    """The number that this is, if it is one as it stands."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


def complaint(call: ast.Call) -> str:
    """What is wrong with a call on a real clock, or nothing."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value.id if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) else ""
    first = call.args[0] if call.args else None
    if name == "sleep" and owner in ("time", "trio", "asyncio") and number(first) != 0:
        return "sleeps"
    if name in CLOCKS and owner in ("time", "trio", ""):
        return "looks at the clock"
    if name == "timedelta":
        return ""
    bounds = [keyword.value for keyword in call.keywords if keyword.arg in BOUNDS]
    place = WAITS.get(name)
    if place is not None and len(call.args) > place:
        bounds.append(call.args[place])
    if any((seconds := number(bound)) is not None and seconds < ENOUGH_S for bound in bounds):
        return f"waits for less than {ENOUGH_S} s"
    return ""


def is_virtual(function: ast.AST) -> bool:
    """Whether this is a function whose clock is virtual."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    named = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    called = {getattr(node.func, "id", "") for node in ast.walk(function) if isinstance(node, ast.Call)}
    return bool(VIRTUAL & named) or RUNS_VIRTUAL in called


def has_virtual_tests_only(tree: ast.Module) -> bool:
    """Whether every test of a module is in virtual time, and so what they call there."""
    tests = [
        node
        for node in tree.body
        if getattr(node, "name", "").casefold().startswith("test")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("Test"))
    ]
    return bool(tests) and all(map(is_virtual, tests))


def calls(tree: ast.AST, *, virtual: bool = False) -> Iterator[ast.Call]:
    """The calls on a real clock."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Call) and not virtual:
            yield child
        yield from calls(child, virtual=virtual or is_virtual(child))


def offences(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that look at a clock, with what they do."""
    source = path.read_text()
    if "MockClock(" in source:
        return
    lines, tree = source.splitlines(), ast.parse(source)
    for call in calls(tree, virtual=has_virtual_tests_only(tree)):
        said = complaint(call)
        if said and not any("# real time: " in line for line in lines[call.lineno - 1 : call.end_lineno]):
            yield call.lineno, said


def main() -> int:
    """Return the exit code."""
    tests = PROJECT / "tests"
    found = 0
    for path in sorted(tests.rglob("*.py")):
        if str(path.relative_to(tests)).startswith(ELSEWHERE):
            continue
        for line, said in offences(path):
            found += 1
            print(f"{path.relative_to(PROJECT)}:{line}: {said}")
    if found:
        print("a test waits for an event, in virtual time or for 60 s at least: docs/testing.md")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
