"""Change the product in small ways, one at a time, and see whether a test notices
(mutation testing, with mutmut).

    python -m tests.mutants FILE [--children 2]
    python -m tests.mutants --glue [--only NAME] [--jobs 2]

A mutant that no test notices has survived. It is listed in tests/mutants/survivors,
with the reason why it may, or the program ends with an error and prints the entry,
without a reason. The mutants are in build/mutants, in a folder for each file, where
mutmut runs. With --glue, the mutants are the bugs of the past that `glue.toml` lists.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from . import glue
from .files import EQUIVALENT, Mutant, known_survivors, list_of_survivors, mutants_in, mutated_files

PROJECT = Path(__file__).parents[2]
MOST_MEMORY_BYTES = 4 << 30  # a mutant may be a loop that allocates without end
SURVIVED = {0: "survived", 5: "no test reaches it", 33: "no test reaches it"}
TOO_LONG = {-24, 24, 36, 152}  # the time was used up
KILLED = {1, 3, 255, -11, -9} | TOO_LONG  # or a test failed, or the memory was used up

# Without tests/limits.py: mutmut forks from a process that has run tests, and children
# would wait for the thread that sees that such a process ends.

MUTMUT = """
[tool.mutmut]
source_paths = {source_paths}
also_copy = ["infinistore", "examples", "docs"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:limits"]
pytest_add_cli_args_test_selection = {tests}
timeout_multiplier = 8
track_dependencies = false
use_git_change_detection = false
use_setproctitle = false
"""


def prepare(folder: Path, file: str, tests: list[str]) -> None:
    """Make the folder in which mutmut runs: links to the product, and its settings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("infinistore", "tests", "examples", "docs"):  # the links within are followed, too
        (folder / name).symlink_to(PROJECT / name)
    settings = MUTMUT.format(source_paths=json.dumps([file]), tests=json.dumps(tests))
    (folder / "pyproject.toml").write_text((PROJECT / "pyproject.toml").read_text() + settings)


def run_mutmut(folder: Path, children: int, *names: str) -> None:
    """Run all mutants, or those of these names, after their tests have passed without
    any."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "quick"}
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(children), *names]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        sys.exit(f"mutmut failed:\n{(folder / 'log').read_text()[-4000:]}")


def main() -> None:
    files = mutated_files()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Mutate one file, or put bugs back.")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "file",
        nargs="?",
        type=lambda name: name if name in files else f"infinistore/{name}",
        choices=files,
        metavar="FILE",
        help="one that tests/mutants/files.toml names, with or without infinistore/",
    )
    chosen.add_argument("--glue", action="store_true", help="put bugs of the past back, which glue.toml lists")
    parser.add_argument("--only", default="", metavar="NAME", help="with --glue: the bugs with this in their names")
    parser.add_argument("--jobs", type=int, default=2, help="with --glue: how many bugs are looked for at a time")
    parser.add_argument("--children", type=int, default=2, help="how many mutants are tested at a time")
    given = parser.parse_args()
    if given.glue:
        put_back(given.only, given.jobs)
    else:
        mutate(given.file, files[given.file], given.children)


def put_back(only: str, jobs: int) -> None:
    """Look for each bug of the past; end with an error if one is not found."""
    verdicts = glue.hunt_all([bug for bug in glue.known_bugs() if only in bug.name], jobs, partial(print, flush=True))
    lost = [verdict for verdict in verdicts if not verdict.by]
    print(f"{len(verdicts) - len(lost)} of {len(verdicts)} found, in {sum(one.seconds for one in verdicts):.0f} s")
    for verdict in lost:
        print(f"{verdict.bug.name} ({verdict.bug.file}): {verdict.problem or verdict.bug.wrong}")
    if lost:
        sys.exit(1)


def mutate(file: str, tests: list[str], children: int) -> None:
    """Change a file in small ways; end with an error if a mutant survives that is not
    listed."""
    folder = PROJECT / "build" / "mutants" / list_of_survivors(file).stem
    prepare(folder, file, tests)
    start = time.monotonic()
    run_mutmut(folder, children)
    minutes = (time.monotonic() - start) / 60

    mutated = folder / "mutants" / file
    mutants = mutants_in(mutated.read_text())
    codes: dict[str, int] = json.loads(Path(f"{mutated}.meta").read_text())["exit_code_by_key"]
    # mutmut does not tell a test that it cannot select from one that fails, unless it
    # is asked for mutants by name: here one of each function, said to be killed.
    killed_of = {name.rpartition("__mutmut_")[0]: name for name, code in codes.items() if code in KILLED}
    run_mutmut(folder, children, *killed_of.values())
    code_of: dict[Mutant, int] = {mutants[name.rpartition(".")[2]]: code for name, code in codes.items()}
    assert len(code_of) == len(mutants)
    undecided = [mutant for mutant, code in code_of.items() if code not in KILLED and code not in SURVIVED]
    survivors = [mutant for mutant, code in code_of.items() if code in SURVIVED]
    known = known_survivors(file)
    for mutant in known.keys() - code_of.keys():
        print(f"listed, but no longer there:\n{mutant.entry()}")
    for mutant in known.keys() & code_of.keys() - set(survivors):
        print(f"listed, but killed:\n{mutant.entry()}")
    for mutant in undecided:
        print(f"neither killed nor survived, but exit code {code_of[mutant]}:\n{mutant.entry()}")
    unknown = [mutant for mutant in survivors if mutant not in known and not mutant.only_asserts_less]
    for mutant in unknown:
        print(f"# {SURVIVED[code_of[mutant]]}\n{mutant.entry()}")

    killed = len(code_of) - len(survivors) - len(undecided)
    too_long = sum(code in TOO_LONG for code in code_of.values())
    equivalent = sum(mutant.only_asserts_less or known.get(mutant, "").startswith(EQUIVALENT) for mutant in survivors)
    print(
        f"{file}: {len(code_of)} mutants, {killed} killed ({killed / len(code_of):.1%}; of those that are not"
        f" equivalent, {killed / (len(code_of) - equivalent):.1%}; {too_long} because they took too long),"
        f" {equivalent} equivalent, {len(survivors) - equivalent} others survived, {len(unknown)} of them not listed;"
        f" {minutes:.1f} minutes"
    )
    if too_long > len(code_of) / 2:
        sys.exit("most mutants took too long, so that something else is wrong than they")
    if unknown or undecided:
        sys.exit(1)


main()
