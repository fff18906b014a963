"""Makes `performance-*.svg`, the plots of the page on performance, of what
`make compare` has measured last.

    python docs/images/performance_pictures.py

It needs matplotlib, which the environment of `make compare` has.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCH = HERE.parents[1] / "bench"
sys.path.insert(0, str(BENCH))

from peers.plots import draw  # noqa: E402
from peers.work import read_results  # noqa: E402


def main() -> None:
    """Write the pictures beside this file."""
    found = json.loads((BENCH / "out" / "compare.json").read_text(encoding="utf-8"))
    results = read_results(found["rows"])
    draw(results, HERE)


if __name__ == "__main__":
    main()
