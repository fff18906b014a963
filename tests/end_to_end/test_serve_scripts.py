"""The scripts in examples/ that start an engine with a store: it starts when the store
answers, or not at all.
"""

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))
ENGINES = ["vllm", "lmcache", "python"]
STORE = """#!/bin/sh
echo "store $1" >>"$LOG"
case $1 in
    stat) {stat} ;;
    *) {serve} ;;
esac
"""


def run(script: Path, folder: Path, **store: str) -> tuple[int, list[str]]:
    """Run a script with a store and engines that are none; return how it ended, and
    what was started, in order.
    """
    log = folder / "log"
    os.mkfifo(folder / "answers")
    for name in ENGINES:
        (folder / name).write_text(f'#!/bin/sh\necho {name} >>"$LOG"\n')
    (folder / "infinistore").write_text(STORE.format(**store))
    for file in folder.iterdir():
        file.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(log),
        "FIFO": str(folder / "answers"),
    }
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, check=False, timeout=60)
    return done.returncode, log.read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(EXAMPLES)))
def test_no_engine_starts_when_the_store_has_failed(script: Path, tmp_path: Path) -> None:
    status, started = run(script, tmp_path, serve="exit 3", stat="exec sleep 600")

    assert status != 0
    assert [name for name in started if name in ENGINES] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(EXAMPLES)))
def test_an_engine_starts_when_the_store_answers(script: Path, tmp_path: Path) -> None:
    status, started = run(script, tmp_path, serve='echo ready >"$FIFO"; exec sleep 600', stat='read line <"$FIFO"')

    assert status == 0
    assert set(started[:2]) == {"store --service-port", "store stat"}
    assert started[2:] and set(started[2:]) <= set(ENGINES)
