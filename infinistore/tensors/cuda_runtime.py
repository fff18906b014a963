"""CUDA through PyTorch and, if installed, cuda-bindings: the calls of `CudaCopies`.

Nothing is decided here, because nothing here runs without a GPU. Sources: the CUDA
Runtime API, "Memory Management" (cudaMemcpyBatchAsync: CUDA 12.8; cudaHostRegister) and
"Stream Management"; PyTorch, "CUDA semantics".
"""

import ctypes
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from infinistore.client.extension import cuda_driver
from infinistore.tensors.errors import CudaError

if TYPE_CHECKING:
    import torch

_FIRST_WITH_BATCHES = 12080
_PORTABLE, _READ_ONLY = 0x01, 0x08  # cudaHostRegisterPortable: pinned for every device; cudaHostRegisterReadOnly


class Pieces(NamedTuple):
    """Pieces of memory to copy: starts on both sides, and lengths, in bytes."""

    here: list[int]
    there: list[int]
    sizes: list[int]


class TorchCuda:
    """CUDA as PyTorch uses it. `bindings` is `cuda.bindings.runtime`, or None.

    Streams and events are opaque to callers.
    """

    def __init__(self, bindings: Any = None) -> None:
        self._bindings = bindings
        self.batches = bindings is not None and _takes_batches(bindings)
        """Whether `copy` copies any number of pieces by one call."""

    def new_stream(self, device: "torch.device") -> Any:
        """Make a stream besides those that compute."""
        import torch

        return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def record(self, device: "torch.device") -> Any:
        """Return an event on this thread's current stream of the device."""
        return cuda_driver.record_event(device)

    def wait_event(self, stream: Any, event: Any) -> None:
        """Make later work of the stream wait for the event."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Wait for the event, without the interpreter's lock."""
        cuda_driver.wait_for_event(event)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which PyTorch works on this stream, and on its device."""
        import torch

        return torch.cuda.stream(stream)

    def copy(self, stream: Any, memory: "torch.Tensor", pieces: Pieces, *, to_host: bool) -> None:
        """Queue copies on the stream, by one call if possible.

        `pieces` are offsets into `memory` (uint8, on the device), and addresses in this
        process.
        """
        import torch

        with self.on(stream), torch.inference_mode():  # or a tensor that was made in it could not be written
            if self.batches and len(pieces.sizes) > 1:
                self._copy_batch(stream, memory, pieces, to_host=to_host)
                return
            for here, there, size in zip(*pieces, strict=True):
                on_device, on_host = memory[here : here + size], _host_tensor(there, size)
                target, source = (on_host, on_device) if to_host else (on_device, on_host)
                target.copy_(source, non_blocking=True)

    def _copy_batch(self, stream: Any, memory: "torch.Tensor", pieces: Pieces, *, to_host: bool) -> None:
        runtime = self._bindings
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = int(runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
        here = (np.array(pieces.here, np.int64) + memory.data_ptr()).tolist()
        targets, sources = (pieces.there, here) if to_host else (here, pieces.there)
        count = len(pieces.sizes)
        self._check(
            "cudaMemcpyBatchAsync",
            # CUDA 12's returns besides which copy failed; it takes the same arguments.
            runtime.cudaMemcpyBatchAsync(
                targets, sources, pieces.sizes, count, [attributes], [0], 1, stream.cuda_stream
            )[0],
        )

    def finish(self, stream: Any) -> None:
        """Sleep until the stream is idle, without the interpreter's lock."""
        import torch

        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()

    def pinned(self, length: int) -> "torch.Tensor":
        """Allocate pinned memory, which PyTorch caches: uint8, `length` bytes."""
        import torch

        return torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, device: "torch.device", address: int, length: int, *, read_only: bool) -> bool:
        """Pin memory of this process, for every device. False if that fails, or it is
        pinned already. `device` is one that the process uses anyway.
        """
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with self.at(device):
            return self._register(address, length, flags)

    def unregister(self, device: "torch.device", address: int) -> None:
        """Undo `register`. No copy may use the memory meanwhile."""
        with self.at(device):
            if self._bindings is not None:
                self._bindings.cudaHostUnregister(address)
                return
            import torch

            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def at(self, device: "torch.device") -> AbstractContextManager[Any]:
        """Return a context for calls that concern this device.

        Otherwise CUDA would start to use the first device, too.
        """
        import torch

        return torch.cuda.device(device)

    def _register(self, address: int, length: int, flags: int) -> bool:
        if self._bindings is not None:
            (status,) = self._bindings.cudaHostRegister(address, length, flags)
            if status != self._bindings.cudaError_t.cudaSuccess:
                self._bindings.cudaGetLastError()  # it would be found by the next call that looks for one
                return False
            return True
        import torch

        if int(torch.cuda.cudart().cudaHostRegister(address, length, flags)) == 0:  # type: ignore[no-untyped-call]
            return True
        with suppress(RuntimeError):  # the same: a kernel's launch looks for it
            torch.zeros(1, device="cuda")
        return False

    def _check(self, what: str, status: Any) -> None:
        if status != self._bindings.cudaError_t.cudaSuccess:
            name = self._bindings.cudaGetErrorString(status)[1]
            self._bindings.cudaGetLastError()
            raise CudaError(f"{what}: {name.decode() if isinstance(name, bytes) else name}")


def cuda_bindings() -> Any:
    """Return `cuda.bindings.runtime`, or None if cuda-bindings is not installed."""
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:
        return None
    return runtime


def _takes_batches(bindings: Any) -> bool:
    """Whether bindings and driver both have the call."""
    if not hasattr(bindings, "cudaMemcpyBatchAsync"):
        return False
    error, driver = bindings.cudaDriverGetVersion()
    error_too, runtime = bindings.cudaRuntimeGetVersion()
    if any(status != bindings.cudaError_t.cudaSuccess for status in (error, error_too)):
        return False
    return bool(driver >= _FIRST_WITH_BATCHES and driver // 1000 >= runtime // 1000)


def _host_tensor(address: int, size: int) -> "torch.Tensor":
    """Return host memory as a tensor, which does not keep it alive."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
