"""Make the golden states: `python -m tests.core.golden.record`.

`pool-N.bin` is the state of a pool in format N, and `groups-N.bin` that of a server
with tenants, whose stores have such states. Each is made by the code of a commit that
wrote this format, taken out of git into a folder of its own, and the last by the code
here. When the format changes, name the last commit with the old one in `COMMITS`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from infinistore.core.pool_state import FORMAT
from tests.core.golden.states import GOLDEN
from tests.protocol.golden.record import unpack

__all__ = ["COMMITS"]

COMMITS = {2: "d5d953654bce14cc45112e161a7b9e616b87fd71"}
"""The last commit with each older format. Format 1 was never in one."""
_PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
import infinistore, states
assert infinistore.__file__.startswith(sys.argv[1] + "/"), infinistore.__file__
states.write(sys.argv[3])
"""


def _write(folder: Path, number: int) -> None:
    command = [sys.executable, "-P", "-c", _PROGRAM, str(folder), str(GOLDEN), str(number)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    for number, commit in COMMITS.items():
        with tempfile.TemporaryDirectory() as folder:
            unpack(Path(folder), commit)
            _write(Path(folder), number)
    _write(GOLDEN.parents[2], FORMAT)
