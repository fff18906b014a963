"""Where the GPU of this process is in the machine, so that the RDMA device next to it
can be chosen.

Never run on a GPU: the tests show it a driver that is made of Python.
"""

import sys
from pathlib import Path

from infinistore.transports.cuda.memory import Cuda
from infinistore.transports.rdma.devices import ROOT, Place, pci_place

__all__ = ["current_gpu", "gpu_place"]


def current_gpu() -> int | None:
    """Return the number of PyTorch's current GPU; None if this process does not use one
    yet. Begins nothing: a process that has begun to use CUDA can no longer fork.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def gpu_place(cuda: Cuda, ordinal: int, root: Path = ROOT) -> Place | None:
    """Return where a GPU is; None if the driver or the kernel does not say."""
    address = cuda.pci_address(ordinal)
    return None if address is None else pci_place(address, root)
