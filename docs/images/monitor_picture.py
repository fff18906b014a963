"""Makes `monitor.svg`, the picture of the monitor: a real server under a real load, as
the screen shows it.

    python docs/images/monitor_picture.py

The load is that of the benchmark, `bench/monitor_load.py`.
"""

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio
from pictures import recorder, write

from infinistore.monitor.app import Pace, Source, sample
from infinistore.monitor.controls import Controls
from infinistore.monitor.model import HISTORY_POINTS, Model, Snapshot
from infinistore.monitor.view import screen

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "bench"))

from monitor_cost import server  # noqa: E402
from monitor_load import RESUMING, WORKERS, load  # noqa: E402

WIDTH, HEIGHT = 100, 37
SAMPLES = 62
assert SAMPLES < HISTORY_POINTS


async def watch(url: str) -> Snapshot:
    """Look at the server for a minute."""
    model, pace, enough = Model(url), Pace(1.0), trio.Event()

    def sampled() -> None:
        if len(model.snapshot().history) >= SAMPLES:
            enough.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(sample, Source(url, name="monitor"), pace, model, sampled))
        await enough.wait()
        nursery.cancel_scope.cancel()
    return model.snapshot()


def main() -> None:
    """Write the picture beside this file."""
    with TemporaryDirectory(dir=HERE.parents[1]) as folder:  # not in memory, as /tmp may be
        disk = ("--disk", f"{folder}/nvme0:2GiB", "--disk-admission", "eager")
        with server("256MiB", *disk) as (_, url), load(url, workers=[*WORKERS, RESUMING]):
            snapshot = trio.run(watch, url)
    # Where it was is nobody's business, and other than where disks usually are.
    snapshot = attrs.evolve(snapshot, disks=[attrs.evolve(disk, path="/mnt/nvme0") for disk in snapshot.disks])
    console = recorder(WIDTH)
    for one in screen(snapshot, Controls(), WIDTH, HEIGHT):
        console.print(one)
    write(console, "monitor", "infinistore monitor")


if __name__ == "__main__":
    main()
