"""A hunt: seed after seed with a bug planted in the product, until one finds it.

The bug is the source text of a module, which is imported instead of the module's own:
so it is in place wherever the module is used, and the product has no part in it. Or it
is one of `shared_memory_mutants`. Run as a program, in a process of its own, this takes
a `Plant` on its standard input and answers with a `Hunt`:

    python -m tests.simulation.hunt
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario

__all__ = ["Hunt", "Plant", "hunt", "look_for"]

TOP = Path(__file__).parents[2]


@attrs.frozen
class Plant:
    """A bug to be found."""

    sources: Mapping[str, str] = attrs.field(factory=dict)
    """The modules that are replaced, and the source text of each instead."""
    shared_memory: str = ""
    """The name of a bug of `shared_memory_mutants`, if it is one."""
    needs: str = ""
    """What a world must have besides what follows from the modules: "tenants"."""


@attrs.frozen
class Hunt:
    """What a hunt came to."""

    seeds: int
    calls: int
    seconds: float
    """Of processor time, the start of Python included."""
    found: str
    """What was found wrong first; empty if nothing was."""
    seed: int
    """The last seed: that which found it, if one did."""


def hunt(plant: Plant, seconds: float, first_seed: int = 1) -> Hunt:
    """Look for a bug in a process of its own, for so many seconds of processor time.

    A program that cannot even start with the bug has found it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.hunt"],
        input=json.dumps([attrs.asdict(plant), seconds, first_seed]),
        capture_output=True,
        text=True,
        check=False,
        cwd=TOP,
    )
    if done.returncode:
        return Hunt(0, 0, 0.0, f"it does not start: {done.stderr}", 0)
    return Hunt(**json.loads(done.stdout.splitlines()[-1]))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._plant.sources:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._plant.sources[fullname])
        return spec


def _has_what_is_broken(plant: Plant, scenario: "Scenario") -> bool:
    """Whether the world of a scenario has the disks, the cluster, the etcd, the
    tenants or the keys that end that a bug is in.
    """
    has = {
        "infinistore.disk": scenario.disks.disks,
        "infinistore.client.cluster": scenario.cluster.nodes,
        "infinistore.cluster.etcd": scenario.etcd.registers,
        "infinistore.core.retention": scenario.has_retention,
        "infinistore.core.sharing": scenario.tenants.tenants,
        "infinistore.core.tenant": scenario.tenants.tenants,
        "infinistore.server.session.session": scenario.tenants.tenants,
    }
    if not all(has[part] for part in has for name in plant.sources if name.startswith(part)):
        return False
    return plant.needs != "tenants" or bool(scenario.tenants.tenants)


def look_for(plant: Plant, seconds: float, first_seed: int) -> Hunt:
    """As `hunt`, in this process and with all the processor time that it has used."""
    sys.meta_path.insert(0, _Finder(plant))
    # Only now: these import the product.
    from tests.simulation.scenario import Scenario
    from tests.simulation.shared_memory_mutants import MUTANTS
    from tests.simulation.trial import try_scenario

    seed, calls, found = first_seed - 1, 0, ""
    with MUTANTS[plant.shared_memory]() if plant.shared_memory else nullcontext():
        while not found and time.process_time() < seconds:
            seed += 1
            scenario = Scenario.from_seed(seed)
            if not _has_what_is_broken(plant, scenario):
                continue
            trial = try_scenario(scenario)
            calls += trial.calls
            found = trial.problems[0] if trial.problems else ""
    return Hunt(seed - first_seed + 1, calls, time.process_time(), found, seed)


def main() -> None:
    """Hunt for what the standard input describes."""
    plant, seconds, first_seed = json.loads(sys.stdin.read())
    sys.stdout.write(json.dumps(attrs.asdict(look_for(Plant(**plant), seconds, first_seed))))


if __name__ == "__main__":
    main()
