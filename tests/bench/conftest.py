"""The programs of `bench`, and of `scripts`, are top-level modules to these tests."""

import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
sys.path += [str(PROJECT / "bench"), str(PROJECT / "scripts")]
