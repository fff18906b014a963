"""A write or read that fails keeps nothing of the forward pass that asked for it: an
engine goes on for days without its store, and each step has gigabytes in its hands."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from infinistore.blocking import BlockingStore
from infinistore.errors import InfiniStoreException, OutOfMemory, StoreUnavailable
from infinistore.tensors import BlocksMissing, LayerLoader, LayerWriter, Ticket, read_blocks
from tests.bad_days.held import held_after
from tests.tensors.conftest import GatedStore

BLOCKS = [("a", 0), ("b", 8)]


@pytest.fixture(params=[StoreUnavailable("gone"), OutOfMemory("full"), RuntimeError("the device fell off")], ids=repr)
def failing(gated: GatedStore, request: pytest.FixtureRequest) -> GatedStore:
    gated.failure = request.param
    gated.gate.set()
    return gated


def test_a_step_whose_tickets_and_errors_are_kept_is_gone(failing: GatedStore) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)
    tickets: list[Ticket] = []
    with suppress(InfiniStoreException, RuntimeError), LayerWriter(failing) as writer:

        def write() -> None:
            with suppress(InfiniStoreException, RuntimeError):  # that of an earlier write
                writer.flush()
            tickets.append(writer.write(tensor, BLOCKS, 8))

        def wait() -> None:
            write()
            tickets[-1].wait()

        def wait_again() -> None:
            tickets[0].wait()

        def write_after_a_failure() -> None:
            write()
            while not tickets[-1].done:
                pass
            writer.write(tensor, BLOCKS, 8)

        calls: list[Callable[[], Any]] = [write, wait, wait_again, wait_again, write_after_a_failure, writer.flush]
        assert held_after(*calls * 2) == 0
        assert all(ticket.failure is not None for ticket in tickets)


def test_a_step_that_gave_up_its_writer_is_gone(failing: GatedStore) -> None:
    def leave() -> None:
        with LayerWriter(failing) as writer:
            writer.write(torch.zeros(16, dtype=torch.uint8), BLOCKS, 8)

    assert held_after(leave, leave) == 0


def test_a_step_that_waited_for_a_layer_is_gone(failing: GatedStore) -> None:
    with LayerLoader(failing) as loader:

        def load() -> None:
            loader.load("layer", torch.zeros(16, dtype=torch.uint8), BLOCKS, 8)
            loader.wait("layer")

        assert held_after(load, load) == 0


def test_a_step_that_misses_blocks_is_gone(store: BlockingStore) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8)

    def read() -> None:
        with pytest.raises(BlocksMissing):
            read_blocks(store, BLOCKS, 8, tensor)
        read_blocks(store, BLOCKS, 8, tensor)

    with LayerLoader(store) as loader:

        def load() -> None:
            loader.load("layer", tensor, BLOCKS, 8)
            loader.wait("layer")

        assert held_after(read, load, read, load) == 0
