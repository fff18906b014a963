"""The follower of the examples, for tests: it takes dumps of an engine's blocks."""

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["following"]

_EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm" / "follow_blocks.py"


@contextmanager
def following(folder: Path) -> Iterator[Any]:
    """One that follows what is published in a folder, at `live` and `dumps`."""
    follower_class: Any = runpy.run_path(str(_EXAMPLE))["BlockFollower"]

    class Follower(follower_class):  # type: ignore[misc]
        def miss(self, wait_s: float) -> None:
            """Lose the next batch."""
            assert self._events.poll(int(wait_s * 1e3))
            self._events.recv_multipart()

    follower = Follower(f"ipc://{folder}/live", f"ipc://{folder}/dumps", patience_s=60.0)
    try:
        yield follower
    finally:
        follower.close()
