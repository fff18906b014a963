"""What the hot operations cost in instructions, against the numbers that are kept
beside this file.

    python bench/guard.py                   fails, and names them, if operations have become more expensive
    python bench/guard.py --against PATH    compares with the package in another checkout, without bounds
    python bench/guard.py --record          keeps the present numbers; also together with --against

Times swing by a factor of two where cores are shared; the number of instructions does
not. Valgrind counts them. Client, server and store run in one thread (`guarded.py`), so
that two runs differ by a few in ten thousand; with the Trio client, whose loop is also
the server's, by up to two in a hundred.

How many instructions Python takes depends on its version and on how it was built. So
there are numbers for each minor version, and each is relative to work that has nothing
of the store in it and is counted in the same run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from callgrind import read_counts, start_counted, why_not

__all__ = ["Counts", "differences"]

GROUPS = (
    "shared memory",
    "socket",
    "Trio client",
    "cluster of one, socket",
    "shared memory, asking",
    "core",
    "embedded",
    "protocol",
)
"""Longest first: two run at a time, each in a process of its own."""
CALIBRATION = "calibration"
CALLS = 64
BOUND, BOUND_FOR_OTHER_BUILDS = 0.08, 0.12
"""By how much an operation may become more expensive. Two builds of one version of
CPython differed by up to 9.9 %.
"""
SURCHARGE = 0.10
"""How many more instructions a batch may take in a cluster of one node than without."""
SAME_BUILD = 0.02
"""By how much the calibration may differ where Python is the very same."""
NUMBERS = Path(__file__).with_suffix(".json")
PYTHON = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
HOW_TO_RECORD = "make bench-guard RECORD=1"


@attrs.frozen
class Counts:
    """How many instructions a call of each operation takes, and a round of the
    calibration.
    """

    operations: Mapping[str, int]
    calibration: float
    versions: Mapping[str, str]
    """Of the packages that do a part of the work."""


class Failed(Exception):
    """Nothing can be said."""


def differences(now: Counts, before: Counts) -> dict[str, float]:
    """Return by which part each operation that is in both has become more expensive:
    0.1 for 10 %.
    """
    scale = before.calibration / now.calibration
    found = {
        name: count * scale / before.operations[name] - 1
        for name, count in now.operations.items()
        if name in before.operations
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def count_group(group: str, package: Path | None, plant: str) -> tuple[dict[str, int], dict[str, str]]:
    """Count the operations of one group, in a process of its own."""
    # Nothing else is passed on: what Python does depends on the seed of its hashes, and
    # a little on its environment.
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    if package is not None:
        environment["PYTHONPATH"] = str(package)
    command = [sys.executable, str(Path(__file__).with_name("guarded.py")), group, "--plant", plant]
    with tempfile.TemporaryDirectory(prefix="infinistore-guard-") as folder:
        with start_counted(command, Path(folder), environment) as process:
            output, _ = process.communicate()
        if process.returncode:
            raise Failed(f"the operations of '{group}' could not be counted")
        counts = read_counts(Path(folder))
    told = json.loads(output)
    if package is not None and Path(told["package"]).parent != package:
        raise Failed(f"{told['package']} was imported instead of the package in {package}")
    return {name: counts[name][0] // CALLS for name in told["names"]}, told["versions"]


def count(groups: Sequence[str], packages: Sequence[Path | None] = (None,), plant: str = "") -> list[Counts]:
    """Count these groups with each of these packages; None is the one that is
    installed.
    """
    if reason := why_not():
        raise Failed(reason)
    jobs = [(group, package) for group in groups for package in packages]
    with ThreadPoolExecutor(max_workers=2) as threads:
        counted = list(threads.map(lambda job: count_group(job[0], job[1], plant), jobs))
    found = []
    for package in packages:
        parts = [part for (_, of_package), part in zip(jobs, counted, strict=True) if of_package == package]
        calibration = statistics.median(operations.pop(CALIBRATION) for operations, _ in parts)
        operations = {name: number for of_group, _ in parts for name, number in of_group.items()}
        found.append(Counts(operations, calibration, parts[0][1]))
    return found


def surcharges(now: Counts) -> dict[str, float]:
    """Return by which part each operation with a batch of 64 is more expensive in a
    cluster of one node than without: 0.1 for 10 %.
    """
    prefix = "cluster of one, "
    plain = {name: now.operations.get(name.removeprefix(prefix)) for name in now.operations if name.startswith(prefix)}
    return {
        name: now.operations[name] / number - 1 for name, number in plain.items() if number and name.endswith(" 64")
    }


def read_numbers(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def record(file: Path, now: Counts, *, all_groups: bool) -> None:
    """Keep the numbers; those of groups that were not counted stay."""
    numbers = read_numbers(file)
    before = numbers.get(PYTHON)
    if before is not None and not all_groups:
        now = attrs.evolve(now, operations={**before["operations"], **now.operations})
    numbers[PYTHON] = attrs.asdict(now)
    file.write_text(json.dumps(numbers, indent=2) + "\n")


def show(now: Counts, before: Counts | None) -> None:
    """Print a line for each operation."""
    changes = {} if before is None else differences(now, before)
    for name, number in now.operations.items():
        change = f"{changes[name]:+8.1%}" if name in changes else ""
        print(f"{name:45} {number:12,} instructions {change}")


def read_kept(file: Path) -> Counts:
    """Return the numbers that are kept for this version of Python."""
    numbers = read_numbers(file)
    if PYTHON not in numbers:
        known = ", ".join(numbers) or "nothing"
        raise Failed(
            f"there are no numbers for {PYTHON}, {file.name} has: {known}. With the commit before yours checked out:"
            f" {HOW_TO_RECORD}; then try again"
        )
    return Counts(**numbers[PYTHON])


def compare(now: Counts, kept: Counts) -> list[str]:
    """Print the numbers beside those that are kept; return what is wrong."""
    show(now, kept)
    changes = differences(now, kept)
    build = now.calibration / kept.calibration - 1
    bound = BOUND if abs(build) < SAME_BUILD else BOUND_FOR_OTHER_BUILDS
    if bound != BOUND:
        print(f"The numbers are from another build of {PYTHON}: work without the store takes {build:+.1%} here.")
    wrong = [f"'{name}' has no number yet" for name in now.operations if name not in changes]
    for name, change in changes.items():
        if change > bound:
            numbers = f"{kept.operations[name]:,} before, {now.operations[name]:,} now"
            wrong.append(f"'{name}' takes {change:.1%} more instructions ({numbers}); allowed are {bound:.0%}")
        elif change < -bound:
            print(f"'{name}' takes {-change:.1%} fewer instructions. Keep that: {HOW_TO_RECORD}")
    for name, extra in surcharges(now).items():
        print(f"'{name}' takes {extra:+.1%} of what it takes without a cluster")
        if extra > SURCHARGE:
            wrong.append(f"'{name}' takes {extra:.1%} more instructions than without a cluster; allowed are 10 %")
    if wrong and now.versions != kept.versions:
        print(f"The numbers were recorded with {kept.versions}, and here are {now.versions}.")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep these numbers")
    parser.add_argument("--against", type=Path, metavar="PATH", help="a checkout to compare with")
    parser.add_argument("--only", action="append", choices=GROUPS, help="this group of operations; may be repeated")
    parser.add_argument("--numbers", type=Path, default=NUMBERS, help=argparse.SUPPRESS)
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)  # for the test of this
    arguments = parser.parse_args()
    groups = arguments.only or GROUPS
    try:
        kept = None if arguments.record or arguments.against else read_kept(arguments.numbers)
        packages = [None, arguments.against.resolve()] if arguments.against else [None]
        now, *others = count(groups, packages, arguments.plant)
    except Failed as error:
        print(f"bench-guard: {error}", file=sys.stderr)
        return 2
    if arguments.record:
        record(arguments.numbers, now, all_groups=groups == GROUPS)
    if kept is None:
        show(now, others[0] if others else None)
        return 0
    wrong = compare(now, kept)
    if wrong:
        wrong.append(f"if that is meant, keep the new numbers: {HOW_TO_RECORD}; and say why in the commit")
    for line in wrong:
        print(f"bench-guard: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
