"""Fuzz one target, guided by what it reaches of InfiniStore (atheris, which is
libFuzzer for Python).

    python -m tests.fuzz TARGET [--seconds 60 | --runs N] [--seed 1]

With `--runs`, a seed and PYTHONHASHSEED=0, it goes the same way again, however fast the
machine is. It begins with what is in tests/fuzz/corpus/TARGET. When an input raises, it
is written to build/fuzz, the program ends with an error, and the input becomes a file
of the corpus when the fault is mended: `tests/fuzz/test_corpus.py` replays those in
`make test`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["infinistore", "cattrs"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz one target.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="how long; 60")
    parser.add_argument("--runs", type=int, default=0, help="how many inputs, instead of how long")
    parser.add_argument("--seed", type=int, default=0, help="go the same way again; 0, another way each time")
    given = parser.parse_args()
    found = Path("build/fuzz")
    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as grown:
        options = [
            f"-runs={given.runs}" if given.runs else f"-max_total_time={given.seconds}",
            f"-seed={given.seed}",
            "-max_len=4096",
            "-timeout=30",
            "-rss_limit_mb=2048",
            "-verbosity=0",
            "-print_final_stats=1",
            f"-artifact_prefix={found}/{given.target}-",
        ]
        atheris.Setup([sys.argv[0], *options, grown, str(CORPUS / given.target)], TARGETS[given.target])
        atheris.Fuzz()


main()
