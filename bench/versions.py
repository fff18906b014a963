"""`bench/local.py` and `bench/tcp.py` with the package here and with that of another
checkout, in turns.

    python bench/versions.py PATH [--pairs 10] [--only tcp]

Each pair is one run with either package, one right after the other, in an order that is
drawn. A ratio is the cost here / there, whichever way the figure itself counts: above
1.0 this checkout is slower. It is the median of the pairs; the interval has 95 % of
2,000 bootstrap samples of it. The exit code is 1 if an interval lies above 1.05.

A pair takes some minutes: this is for an otherwise idle machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent
PROGRAMS = ("local", "tcp")
MOST = 1.05
YARDSTICKS = ("pymemcache get", "pymemcache exists", "raw echo")


def run(program: str, checkout: Path) -> dict[str, float]:
    """Run a program of this folder with the package of a checkout."""
    # `python -m` looks into the working directory first, and a program only where it is
    # told to.
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(BENCH / f"{program}.py"), "--quick", "--json"]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def cost(name: str, figure: float) -> float:
    """Return what grows when the store becomes slower."""
    is_time = name.endswith((" time", " us")) or ", us" in name
    return figure if is_time else 1 / figure


def interval(ratios: list[float], generator: random.Random) -> tuple[float, float]:
    """Return where the median of the ratios lies with a probability of 95 %."""
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", choices=PROGRAMS)
    arguments = parser.parse_args()
    here, there = BENCH.parent, arguments.checkout.resolve()
    generator = random.Random(1)
    slower = False
    for program in [arguments.only] if arguments.only else PROGRAMS:
        ratios: dict[str, list[float]] = {}
        for _ in range(arguments.pairs):
            figures = {checkout: run(program, checkout) for checkout in generator.sample([here, there], 2)}
            for name, figure in figures[here].items():
                if not any(name.startswith(yardstick) for yardstick in YARDSTICKS):
                    ratios.setdefault(name, []).append(cost(name, figure) / cost(name, figures[there][name]))
        for name, paired in ratios.items():
            low, high = interval(paired, generator)
            slower = slower or low > MOST
            mark = "  SLOWER" if low > MOST else ""
            print(f"{program}: {name:75} {statistics.median(paired):6.3f}  {low:6.3f} to {high:6.3f}{mark}", flush=True)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
