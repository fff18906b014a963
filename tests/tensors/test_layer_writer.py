"""`LayerWriter`: what it stores, in which order, what it does when it is full, and
where its errors come out.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import infinistore
from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.client.extension import Batch, DeviceBatch
from infinistore.errors import DeadlineExceeded, OutOfMemory, StoreUnavailable, ValueTooLarge
from infinistore.tensors import LayerWriter, Ticket
from tests.bad_days.servers import running_server_process
from tests.bad_days.test_fork import in_child
from tests.tensors.conftest import GatedStore, threads_named
from tests.tensors.contents import as_bytes, random_bytes

LAYER_BYTES = 40_000


def write_layer(writer: LayerWriter, number: int, tensor: torch.Tensor | None = None) -> Ticket:
    """Write one layer of four blocks, of random bytes unless a tensor is given."""
    layer = random_bytes(LAYER_BYTES, seed=number) if tensor is None else tensor
    return writer.write(layer, [(f"L{number}/{i}", i * 10_000) for i in range(4)], 10_000)


def stored_layer(store: BlockingStore, number: int) -> bytes:
    return b"".join(store.get(f"L{number}/{i}") for i in range(4))


def layer_bytes(number: int) -> bytes:
    return as_bytes(random_bytes(LAYER_BYTES, seed=number))


def occupy(writer: LayerWriter, gated: GatedStore) -> Ticket:
    """Give the writer something that it is busy with until the gate opens."""
    ticket = writer.write(torch.zeros(8, dtype=torch.uint8), [("busy", 0)], 8)
    gated.entered.acquire()
    return ticket


def test_every_layer_is_stored(any_store: BlockingStore) -> None:
    with LayerWriter(any_store) as writer:
        tickets = [write_layer(writer, number) for number in range(12)]
        writer.flush()
        assert all(ticket.done and ticket.wait() for ticket in tickets)
        for number in range(12):
            assert stored_layer(any_store, number) == layer_bytes(number)
        statistics = writer.statistics()
        assert (statistics.stored_writes, statistics.stored_bytes) == (12, 12 * LAYER_BYTES)
        assert (statistics.pending_writes, statistics.pending_bytes, statistics.failed_writes) == (0, 0, 0)
        assert 1 <= statistics.puts <= 12


def test_a_layer_of_any_stride_is_stored(store: BlockingStore) -> None:
    cache = torch.randn(2, 8, 4, 6).to(torch.bfloat16).permute(1, 0, 3, 2)
    with LayerWriter(store) as writer:
        writer.write(cache, [("first", 0), ("last", 7 * 96)], 96)
    assert store.get("first") + store.get("last") == as_bytes(cache[0]) + as_bytes(cache[7])


def test_write_returns_before_anything_is_stored(gated: GatedStore) -> None:
    with LayerWriter(gated) as writer:
        ticket = write_layer(writer, 1)
        assert not ticket.done
        with pytest.raises(DeadlineExceeded, match=r"not done within 0\.001 s; its tensor is still in use"):
            ticket.wait(0.001)  # real time: the gate is closed
        with pytest.raises(DeadlineExceeded, match="1 of 1 are not done"):
            writer.flush(0.001)
        gated.gate.set()
        assert ticket.wait() is True
        assert stored_layer(gated.inner, 1) == layer_bytes(1)


def test_what_waits_goes_in_one_put(gated: GatedStore) -> None:
    with LayerWriter(gated) as writer:
        occupy(writer, gated)
        for number in range(10):
            write_layer(writer, number)
        gated.gate.set()
        writer.flush()
        assert gated.begun == writer.statistics().puts == 2
    assert all(stored_layer(gated.inner, number) == layer_bytes(number) for number in range(10))


def test_writes_that_end_at_different_times_go_in_different_puts(gated: GatedStore) -> None:
    layer = random_bytes(LAYER_BYTES, seed=1)
    with LayerWriter(gated, ttl_s=3600.0) as writer:
        occupy(writer, gated)
        times = {"a": None, "b": 1e-6, "c": 60.0, "d": 60.0}
        for key, ttl_s in times.items():
            writer.write(layer, [(key, 0)], LAYER_BYTES, ttl_s=ttl_s)
        gated.gate.set()
        writer.flush()
        assert gated.begun == 4
    assert gated.inner.exists_many(times) == [True, False, True, True]


def test_a_small_write_waits_for_others_until_somebody_waits_for_it(gated: GatedStore) -> None:
    gated.gate.set()
    with LayerWriter(gated, linger_s=3600) as writer:
        for puts, wait in ((1, lambda ticket: writer.flush()), (2, Ticket.wait)):
            write_layer(writer, 1)
            ticket = write_layer(writer, 2)
            assert gated.begun == puts - 1
            wait(ticket)
            assert gated.begun == puts
        write_layer(writer, 4)
    assert stored_layer(gated.inner, 4) == layer_bytes(4)


def test_enough_small_writes_do_not_wait(gated: GatedStore) -> None:
    with LayerWriter(gated, linger_s=3600) as writer:
        for number in range(5):
            writer.write(torch.zeros(1 << 20, dtype=torch.uint8), [(f"key {number}", 0)], 1 << 20)
        gated.entered.acquire()
        gated.gate.set()


def test_a_small_write_is_stored_without_anybody_waiting(gated: GatedStore) -> None:
    with LayerWriter(gated) as writer:
        write_layer(writer, 1)
        gated.entered.acquire()
        gated.gate.set()


def test_a_write_that_waits_for_room_does_not_wait_for_more(gated: GatedStore) -> None:
    gated.gate.set()
    with LayerWriter(gated, max_pending_bytes=LAYER_BYTES, linger_s=3600) as writer:
        for number in range(3):
            write_layer(writer, number)
    assert stored_layer(gated.inner, 2) == layer_bytes(2)


def test_a_key_that_is_written_twice_has_its_last_value(gated: GatedStore) -> None:
    with LayerWriter(gated) as writer:
        occupy(writer, gated)
        for value in range(5):
            writer.write(torch.full((8,), value, dtype=torch.uint8), [("key", 0)], 8)
        gated.gate.set()
    assert gated.inner.get("key") == bytes([4] * 8)


@given(writes=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 255)), max_size=30), data=st.data())
def test_the_store_ends_as_if_each_write_had_been_a_put(writes: list[tuple[str, int]], data: st.DataObject) -> None:
    expected: dict[str, bytes] = {}
    flush_after = data.draw(st.sets(st.integers(0, 29)))
    with (
        blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store,
        LayerWriter(store, max_pending_bytes=64) as writer,
    ):
        for number, (key, value) in enumerate(writes):
            writer.write(torch.full((16,), value, dtype=torch.uint8), [(key, 0), (f"{key}2", 8)], 8)
            expected[key] = expected[f"{key}2"] = bytes([value] * 8)
            if number in flush_after:
                writer.flush()
                assert {k: store.get(k) for k in store.keys()} == expected  # noqa: SIM118
        writer.flush()
        assert {k: store.get(k) for k in store.keys()} == expected  # noqa: SIM118


def test_leaving_the_block_stores_everything_and_ends_the_thread(any_store: BlockingStore) -> None:
    with LayerWriter(any_store) as writer:
        assert threads_named("LayerWriter") == 1
        for number in range(6):
            write_layer(writer, number)
    assert threads_named("LayerWriter") == 0
    assert all(stored_layer(any_store, number) == layer_bytes(number) for number in range(6))
    with pytest.raises(RuntimeError, match="was left"):
        write_layer(writer, 1)
    writer.close()


def test_leaving_it_by_an_exception_gives_up_what_was_not_begun(gated: GatedStore) -> None:
    writer = LayerWriter(gated)
    tickets = []

    def leave() -> None:
        with writer:
            tickets.append(occupy(writer, gated))
            tickets.append(write_layer(writer, 1))
            threading.Timer(0, gated.gate.set).start()
            raise LookupError

    with pytest.raises(LookupError):
        leave()
    assert tickets[0].done and tickets[1].done
    if tickets[1].failure is not None:  # else the gate was open before the block was left
        with pytest.raises(StoreUnavailable, match="left before this was done"):
            tickets[1].wait()
        assert gated.inner.keys("L1") == []


def test_without_with_there_is_nothing_to_write_to(store: BlockingStore) -> None:
    writer = LayerWriter(store)
    with pytest.raises(RuntimeError, match="use `with`"):
        write_layer(writer, 1)
    with writer:
        write_layer(writer, 1)
    with pytest.raises(RuntimeError, match="twice"), writer:
        pass


# Full


def test_when_it_is_full_a_write_waits_for_room(gated: GatedStore) -> None:
    with LayerWriter(gated, max_pending_bytes=LAYER_BYTES, deadline_s=0.001) as writer:  # real time: the gate is closed
        write_layer(writer, 1)
        gated.entered.acquire()
        with pytest.raises(
            DeadlineExceeded, match=r"no room for 39.1 KiB \(40,000 bytes\).*40,000.* of .*40,000.* are pending"
        ):
            write_layer(writer, 2)
        assert writer.statistics().pending_bytes == LAYER_BYTES
        gated.gate.set()
        writer.flush()
        write_layer(writer, 3)
    assert sorted(gated.inner.keys()) == [f"L{n}/{i}" for n in (1, 3) for i in range(4)]


def test_when_it_is_full_a_write_is_dropped_and_counted_if_told_to(gated: GatedStore) -> None:
    with LayerWriter(gated, max_pending_bytes=LAYER_BYTES + 8, when_full="drop") as writer:
        occupy(writer, gated)
        kept, dropped = write_layer(writer, 1), write_layer(writer, 2)
        assert (kept.dropped, dropped.dropped, dropped.done, dropped.wait()) == (False, True, True, False)
        gated.gate.set()
        writer.flush()
        assert kept.wait() is True
        statistics = writer.statistics()
        assert (statistics.dropped_writes, statistics.dropped_bytes) == (1, LAYER_BYTES)
        assert (statistics.stored_writes, statistics.failed_writes) == (2, 0)
        write_layer(writer, 3)
    assert gated.inner.keys("L2") == []
    assert stored_layer(gated.inner, 3) == layer_bytes(3)


@pytest.mark.parametrize("when_full", ["block", "drop"])
def test_more_at_a_time_than_it_can_ever_hold_is_refused(store: BlockingStore, when_full: Any) -> None:
    with LayerWriter(store, max_pending_bytes=LAYER_BYTES - 1, when_full=when_full) as writer:
        with pytest.raises(ValueError, match="max_pending_bytes"):
            write_layer(writer, 1)
        assert writer.statistics().dropped_writes == 0


# Errors


def test_an_error_comes_out_at_the_next_write_once_and_the_writer_goes_on(failing: GatedStore) -> None:
    with LayerWriter(failing) as writer:
        first = write_layer(writer, 1)
        while not first.done:
            pass
        with pytest.raises(StoreUnavailable, match="gone"):
            write_layer(writer, 2)
        failing.failure = None
        assert write_layer(writer, 3).wait()
        writer.flush()
        statistics = writer.statistics()
        assert (statistics.stored_writes, statistics.failed_writes) == (1, 1)
        assert statistics.pending_bytes == 0
    assert sorted({key[:2] for key in failing.inner.keys()}) == ["L3"]  # noqa: SIM118


def test_an_error_comes_out_at_flush(failing: GatedStore) -> None:
    with LayerWriter(failing) as writer:
        write_layer(writer, 1)
        with pytest.raises(StoreUnavailable, match="gone"):
            writer.flush()
        writer.flush()


def test_an_error_comes_out_when_the_block_is_left(failing: GatedStore) -> None:
    with pytest.raises(StoreUnavailable, match="gone"), LayerWriter(failing) as writer:
        write_layer(writer, 1)


def test_an_exception_of_the_block_is_not_hidden_by_one_of_the_writer(failing: GatedStore) -> None:
    def leave() -> None:
        with LayerWriter(failing) as writer:
            write_layer(writer, 1)
            raise LookupError

    with pytest.raises(LookupError):
        leave()


def test_an_error_that_a_ticket_told_is_not_told_again(failing: GatedStore) -> None:
    with LayerWriter(failing) as writer:
        with pytest.raises(StoreUnavailable, match="gone"):
            write_layer(writer, 1).wait()
        writer.flush()


def test_a_write_that_the_store_refuses_does_not_fail_those_beside_it(gated: GatedStore) -> None:
    large = torch.zeros(17 << 20, dtype=torch.uint8)
    with LayerWriter(gated) as writer:
        occupy(writer, gated)
        before = write_layer(writer, 1)
        refused = writer.write(large[: 14 << 20], [("large", 0)], 14 << 20)
        after = write_layer(writer, 2)
        gated.inner.put("fills", bytes(3 << 20))
        with gated.inner.embedded.lock:  # type: ignore[attr-defined]
            pinned = gated.inner.embedded.core.open_client("test")  # type: ignore[attr-defined]
            gated.inner.embedded.core.lease(pinned, ["fills"])  # type: ignore[attr-defined]
        gated.gate.set()
        assert before.wait() and after.wait()
        with pytest.raises(OutOfMemory):
            refused.wait()
        with pytest.raises(ValueTooLarge):
            writer.write(large, [("larger", 0)], len(large)).wait()
    assert stored_layer(gated.inner, 1) + stored_layer(gated.inner, 2) == layer_bytes(1) + layer_bytes(2)


@pytest.mark.process
def test_a_server_that_is_killed_midway_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    with running_server_process("--unix-socket", str(tmp_path / "store.sock")) as server:
        for scheme in ("shm", "tcp"):
            url = server.url.replace("tcp", scheme)
            with blocking.open_store(url, deadline_s=60) as store, LayerWriter(store) as writer:
                assert write_layer(writer, 1).wait()
                server.kill()
                for number in range(20):  # the engine goes on
                    with suppress(StoreUnavailable):
                        write_layer(writer, number)
                with pytest.raises(StoreUnavailable):
                    write_layer(writer, 21).wait()
                with suppress(StoreUnavailable):
                    writer.flush()
                statistics = writer.statistics()
                assert statistics.failed_writes >= 1
                assert (statistics.stored_writes, statistics.pending_bytes) == (1, 0)
                server.start()
            with blocking.open_store(url) as store, LayerWriter(store) as writer:
                assert write_layer(writer, 1).wait()


@pytest.mark.parametrize("nice", [0, 7])
def test_the_thread_stands_back_for_the_computation(store: BlockingStore, nice: int) -> None:
    class Noting(GatedStore):
        def put_batch(
            self, batch: Batch | DeviceBatch, replace: bool = True, *, ttl_s: float | None = None
        ) -> list[str]:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return []

    found: list[int] = []
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with LayerWriter(Noting(store), nice=nice) as writer:
        write_layer(writer, 1).wait()
    assert found == [max(nice, mine)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_wrong_arguments_are_refused_at_once(store: BlockingStore) -> None:
    with LayerWriter(store) as writer:
        with pytest.raises(ValueError, match="twice"):
            writer.write(torch.zeros(8), [("a", 0), ("a", 4)], 4)
        with pytest.raises(TypeError, match="PyTorch tensor"):
            writer.write([1], [("a", 0)], 4)  # type: ignore[arg-type]
        assert writer.statistics().pending_writes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pending_bytes": 0}, "max_pending_bytes must be a whole number above 0"),
        ({"max_pending_bytes": 1.5}, "max_pending_bytes must be a whole number above 0"),
        ({"when_full": "wait"}, "when_full must be 'block' or 'drop'"),
        ({"deadline_s": 0}, "deadline_s must be"),
        ({"nice": 20}, "nice must be"),
        ({"linger_s": -1}, "linger_s must be"),
        ({"linger_s": float("nan")}, "linger_s must be"),
    ],
)
def test_wrong_options_are_refused(store: BlockingStore, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerWriter(store, **options)


async def test_an_asynchronous_store_is_refused() -> None:
    async with infinistore.open_store(pool_bytes=1 << 20) as store:
        with pytest.raises(TypeError, match=r"infinistore\.blocking\.open_store"):
            LayerWriter(store)  # type: ignore[arg-type]


@pytest.mark.process
def test_a_forked_child_is_refused_at_once(store: BlockingStore) -> None:
    with LayerWriter(store) as writer:
        ticket = write_layer(writer, 1)

        def check() -> None:
            with pytest.raises(StoreUnavailable, match="fork"):
                write_layer(writer, 2)
            with pytest.raises(StoreUnavailable, match="fork"):
                writer.flush()
            writer.close()

        ticket.wait()
        in_child(check)
        assert write_layer(writer, 3).wait()


def test_a_tensor_is_let_go_when_it_is_stored(store: BlockingStore) -> None:
    with LayerWriter(store) as writer:
        ticket = write_layer(writer, 1)
        ticket.wait()
        assert ticket.transfer is None
