"""Where no GPU answers, all of these tests skip, with one line. `make test-gpu` runs
them; `make test` leaves them out.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.client import AsyncStore
from infinistore.tensors import devices
from infinistore.tensors.copies import CudaCopies
from infinistore.tensors.cuda_runtime import TorchCuda, cuda_bindings
from tests.gpu.device import REHEARSAL, why_no_gpu
from tests.tensors.conftest import any_store, other_server, server, store
from tests.tensors.fake_cuda import FakeCuda

__all__ = ["any_store", "other_server", "server", "store"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test of the folder."""
    item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup() -> None:
    """Skip without a GPU. Not in a fixture: pytest would print a line for each test."""
    if reason := why_no_gpu():
        pytest.skip(reason)


@attrs.frozen
class Calls:
    """What CUDA was asked for. `batches` says whether one call may copy many pieces."""

    batches: bool
    pieces: list[int] = attrs.field(factory=list)
    """How many pieces each copy had."""
    pinned: list[int] = attrs.field(factory=list)
    """How many bytes of pinned memory were asked for."""
    registered: list[bool] = attrs.field(factory=list)
    """Whether each arena of a pool could be registered."""


@pytest.fixture(params=["batches", "no batches"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Copies by cudaMemcpyBatchAsync, and by the fallback for older drivers."""
    batches = request.param == "batches"
    made: dict[int, CudaCopies] = {}
    if REHEARSAL:

        def copies_for(store: BlockingStore | AsyncStore, tensor: torch.Tensor) -> CudaCopies:
            return made.setdefault(id(store), CudaCopies(FakeCuda(batches=batches)))

        monkeypatch.setattr(devices, "copies_for", copies_for)
    elif not batches:
        monkeypatch.setattr(devices, "cuda_bindings", lambda: None)
    elif not TorchCuda(cuda_bindings()).batches:
        pytest.skip("cuda-bindings are missing, or driver and bindings do not both have cudaMemcpyBatchAsync")
    calls = Calls(batches)
    runtime = FakeCuda if REHEARSAL else TorchCuda
    copy, pinned, register = runtime.copy, runtime.pinned, runtime.register

    def copy_and_note(self: Any, stream: Any, memory: Any, pieces: Any, **which: Any) -> None:
        calls.pieces.append(len(pieces.sizes))
        copy(self, stream, memory, pieces, **which)

    def pin_and_note(self: Any, length: int) -> torch.Tensor:
        calls.pinned.append(length)
        return pinned(self, length)

    def register_and_note(self: Any, *arguments: Any, **which: Any) -> bool:
        done = register(self, *arguments, **which)
        calls.registered.append(done)
        return done

    monkeypatch.setattr(runtime, "copy", copy_and_note)
    monkeypatch.setattr(runtime, "pinned", pin_and_note)
    monkeypatch.setattr(runtime, "register", register_and_note)
    yield calls
    for copies in made.values():
        copies.close()
