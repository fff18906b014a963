"""The GPU of these tests, or what stands in for it.

With TEST_GPU=cpu, tensors are in this process's memory, and CUDA is the one that
`tests/tensors/fake_cuda.py` fakes. That says nothing about a GPU: it tries the tests
themselves, so that the first run on a GPU does not fail on a typing error.
"""

import os
import shutil
import subprocess
from functools import cache
from typing import Final

import torch

__all__ = ["DEVICE", "REHEARSAL", "busy", "synchronize", "why_no_gpu"]

REHEARSAL: Final = os.environ.get("TEST_GPU") == "cpu"
DEVICE: Final = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)

_BUSY_CYCLES: Final = 200_000_000
"""A tenth of a second."""


@cache
def why_no_gpu() -> str:
    """Return why there is no GPU for these tests; nothing if there is one."""
    if REHEARSAL:
        return ""
    if shutil.which("nvidia-smi") is None:
        return "there is no GPU here: no nvidia-smi is installed"
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.startswith("GPU "):
        return f"there is no GPU here: nvidia-smi -L says {(done.stdout + done.stderr).strip()[:200]!r}"
    if not torch.cuda.is_available():
        return f"nvidia-smi finds a GPU, and torch {torch.__version__} does not: install its build for CUDA"
    return ""


def busy(times: int = 1) -> None:
    """Have the GPU be busy on the current stream, a tenth of a second each time."""
    if not REHEARSAL:
        torch.cuda._sleep(times * _BUSY_CYCLES)  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait until the GPU is idle."""
    if not REHEARSAL:
        torch.cuda.synchronize()
