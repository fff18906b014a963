"""A CUDA without a GPU: a "device" that is memory of this process, and streams that put
off what they are told.

Nothing is copied before somebody waits, so that a test finds out what was forgotten to
be waited for. What PyTorch does `on` a stream it does at once here, after what the
stream waits for.
"""

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from infinistore.kept_errors import KeptError
from infinistore.tensors.cuda_runtime import Pieces, TorchCuda

__all__ = ["FakeCuda", "FakeStream", "PyTorchCopies"]


class FakeStream:
    """What it was told and has not done yet."""

    def __init__(self) -> None:
        self.told: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.told[self.done - 1]()


class FakeCuda(TorchCuda):
    """A runtime that writes down its calls. `compute` is the stream of the
    computation.
    """

    def __init__(self, *, batches: bool) -> None:
        super().__init__()
        self.batches = batches
        self.compute = FakeStream()
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.refuse_registration = False
        self.copy_error: Exception | None = None

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    def pieces(self) -> list[int]:
        """How many pieces each copy had."""
        return [call[1] for call in self.calls if call[0] == "copy"]

    def new_stream(self, device: torch.device) -> FakeStream:
        self.calls.append(("new_stream", str(device)))
        return FakeStream()

    def record(self, device: torch.device) -> int:
        self.calls.append(("record", str(device)))
        return len(self.compute.told)

    def wait_event(self, stream: FakeStream, event: int) -> None:
        self.calls.append(("wait_event", event))
        stream.told.append(lambda: self.compute.run(event))

    def wait(self, event: int) -> None:
        self.calls.append(("wait", event))
        self.compute.run(event)

    @contextmanager
    def on(self, stream: FakeStream) -> Generator[None, None, None]:
        stream.run(len(stream.told))
        yield

    def copy(self, stream: FakeStream, memory: torch.Tensor, pieces: Pieces, *, to_host: bool) -> None:
        assert memory.dtype is torch.uint8 and memory.dim() == 1 and memory.is_contiguous()
        self.calls.append(("copy", len(pieces.sizes), "to host" if to_host else "to device"))
        if self.copy_error is not None:
            raise KeptError(self.copy_error).again()
        for here, there, size in zip(*pieces, strict=True):
            assert 0 <= here <= here + size <= len(memory)
            device = memory.data_ptr() + here
            target, source = (there, device) if to_host else (device, there)
            stream.told.append(partial(ctypes.memmove, target, source, size))

    def finish(self, stream: FakeStream) -> None:
        self.calls.append(("finish",))
        stream.run(len(stream.told))

    def pinned(self, length: int) -> torch.Tensor:
        self.calls.append(("pinned", length))
        return torch.empty(length, dtype=torch.uint8)

    def register(self, device: torch.device, address: int, length: int, *, read_only: bool) -> bool:
        self.calls.append(("register", address, length, read_only))
        if self.refuse_registration or address in self.registered:
            return False
        self.registered[address] = length
        return True

    def unregister(self, device: torch.device, address: int) -> None:
        self.calls.append(("unregister", address))
        del self.registered[address]


class PyTorchCopies(TorchCuda):
    """The runtime as it is without cuda-bindings, but for streams, events and pinning:
    PyTorch makes the copies.
    """

    def new_stream(self, device: torch.device) -> Any:
        return None

    def record(self, device: torch.device) -> Any:
        return None

    def wait_event(self, stream: Any, event: Any) -> None:
        pass

    @contextmanager
    def on(self, stream: Any) -> Generator[None, None, None]:
        yield

    def finish(self, stream: Any) -> None:
        pass

    def pinned(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8)
