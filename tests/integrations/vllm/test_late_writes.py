"""What a worker writes while the cache is reset, with a store but without vLLM."""

import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infinistore import blocking
from infinistore.errors import DiskFailed, StoreUnavailable
from infinistore.integrations.vllm.blocks import Blocks, Save, Step
from infinistore.integrations.vllm.resets import Deletion, LateWrites
from infinistore.integrations.vllm.worker import WorkerSide

from .halves import ByHand, make_cache, make_names, make_record, make_worker, save

OLD = Step(saves=[Save("w", Blocks(["aa", "bb"], [3, 0]))])
NAMES = make_names(shards=2)
NEW = Step(saves=[Save("n", Blocks(["cc"], [1]))], resets=1)


@pytest.fixture
def worker(store: blocking.BlockingStore) -> Iterator[WorkerSide]:
    worker = make_worker(store, make_cache(1), NAMES, shards=range(2))
    yield worker
    worker.close()


def until_past(worker: WorkerSide, resets: int) -> int:
    """Do steps until the worker says that it is past a reset."""
    while True:
        worker.begin(Step(resets=resets))
        worker.poll(())
        if past := worker.late_writes.take_past():
            return past


def test_what_was_being_written_during_a_reset_is_deleted_when_it_is_stored(
    store: blocking.BlockingStore, worker: WorkerSide, may_write: threading.Event
) -> None:
    save(worker, OLD)
    store.put("vllm/somebody/else", b"bytes")
    worker.begin(Step(resets=1))
    assert worker.late_writes.take_past() == 0

    may_write.set()
    assert until_past(worker, 1) == 1

    assert store.keys() == ["vllm/somebody/else"]
    assert worker.late_writes.take_past() == 0  # it is told once


def test_what_was_just_stored_may_have_been_so_after_the_reset_and_is_deleted(
    store: blocking.BlockingStore, worker: WorkerSide
) -> None:
    save(worker, OLD)
    worker.writer.flush()
    save(worker, Step())
    assert until_past(worker, 1) == 1
    assert store.keys() == []

    save(worker, NEW)
    worker.writer.flush()
    assert sorted(store.keys()) == sorted(NAMES.all_keys(["cc"]))


def test_what_was_stored_many_steps_ago_is_not_deleted_again(store: blocking.BlockingStore, worker: WorkerSide) -> None:
    save(worker, OLD)
    worker.writer.flush()
    for _ in range(40):
        save(worker, Step())
    assert until_past(worker, 1) == 1
    assert len(store.keys()) == 12  # another engine may have stored them


def test_a_worker_that_has_written_nothing_is_past_a_reset_at_once(worker: WorkerSide) -> None:
    save(worker, Step(resets=1))
    assert worker.late_writes.take_past() == 1


def test_of_several_resets_only_the_last_counts(
    store: blocking.BlockingStore, worker: WorkerSide, may_write: threading.Event
) -> None:
    save(worker, OLD)
    for resets in (1, 2):
        worker.begin(Step(resets=resets))
        assert worker.late_writes.take_past() == 0
    may_write.set()
    assert until_past(worker, 3) == 3
    assert store.keys() == []


def test_a_deletion_that_fails_is_tried_again_and_the_worker_is_not_past_the_reset(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = ByHand()
    late = LateWrites(
        *(store, make_record(), lambda block_hash, _, label: f"{block_hash}/{label}"),
        background=background,
        clock=lambda: background.now,
    )
    store.put_many({"aa/0": b"bytes", "bb/0": b"bytes"})
    ticket: Any = SimpleNamespace(done=True, dropped=False)
    dropped: Any = SimpleNamespace(done=True, dropped=True)
    late.wrote(ticket, ["aa"], 0, "0")
    late.wrote(dropped, ["bb"], 0, "0")
    late.begin(1)

    def fail(keys: object) -> int:
        raise StoreUnavailable("away")

    with monkeypatch.context() as away:
        away.setattr(store, "delete", fail)
        assert late.take_past() == 0
        background.run()
    assert late.take_past() == 0  # it has failed
    background.run(0.9)
    assert late.take_past() == 0  # not yet again
    background.run(0.1)
    assert late.take_past() == 0
    background.run()
    assert late.take_past() == 1
    assert store.keys() == ["bb/0"]


def test_a_worker_is_past_a_reset_although_a_disk_may_bring_blocks_back(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    background = ByHand()
    late = LateWrites(
        *(store, make_record(), lambda block_hash, _, label: f"{block_hash}/{label}"), background=background
    )
    hashes = [str(number) for number in range(10_001)]  # more than are deleted at once
    delete = store.delete

    def fail(keys: list[str]) -> int:
        delete(keys)
        raise DiskFailed("off")

    monkeypatch.setattr(store, "delete", fail)
    for resets in (1, 2):
        store.put_many({"0/0": b"bytes", "10000/0": b"bytes"})
        late.wrote(cast("Any", SimpleNamespace(done=True, dropped=False)), hashes, 0, "0")
        late.begin(resets)
        assert late.take_past() == 0
        background.run()
        assert late.take_past() == resets
        assert store.keys() == []
    assert [record.getMessage().count("DiskFailed: off") for record in caplog.records] == [1]


def test_all_is_deleted_again_shortly_after(store: blocking.BlockingStore) -> None:
    background = ByHand()
    deletion = Deletion(store, "vllm/a/", lambda: False, background)
    store.put_many({"vllm/a/1": b"bytes", "vllm/b/1": b"bytes"})
    assert deletion.delete()
    assert store.keys() == ["vllm/b/1"]
    for pause_s in (0.25, 2.0):
        store.put("vllm/a/2", b"bytes")  # late
        background.run(pause_s)
        assert store.keys() == ["vllm/b/1"]
    assert background.pauses == [0.25, 2.0]
    store.put("vllm/a/2", b"bytes")
    deletion.close()  # another engine's: this one has done its part
    assert len(store.keys()) == 2


@pytest.mark.parametrize("is_needless", [False, True])
def test_if_it_is_closed_before_it_deletes_at_once(store: blocking.BlockingStore, is_needless: bool) -> None:
    background = ByHand()
    deletion = Deletion(store, "vllm/a/", lambda: is_needless, background)
    assert deletion.delete()
    background.run(0.2)
    assert deletion.delete()
    background.run(0.1)  # the first has been superseded
    store.put("vllm/a/1", b"bytes")
    deletion.close()
    assert store.keys() == ["vllm/a/1"] * is_needless


def test_a_reset_during_the_last_repetition_for_the_one_before_is_not_forgotten(store: blocking.BlockingStore) -> None:
    background, resets = ByHand(), 1

    def is_needless() -> bool:
        nonlocal resets
        if background.now == 2.25 and resets == 1:  # in another thread
            resets = 2
            assert deletion.delete()
        return False

    deletion = Deletion(store, "vllm/a/", is_needless, background)
    assert deletion.delete()
    background.run(2.25)
    assert resets == 2
    store.put("vllm/a/1", b"bytes")
    deletion.close()
    assert store.keys() == []


def test_a_deletion_that_fails_says_what_to_do(
    gone: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's loggers keep what they get, if it is imported.
    monkeypatch.setattr("infinistore.integrations.vllm.resets.LOG", logging.getLogger("of.a.test"))
    deletion = Deletion(gone, "vllm/a/", lambda: False, ByHand())
    assert not deletion.delete()
    deletion.close()
    assert "vllm/a/ may be left" in caplog.text
    assert "resume_generation" in caplog.text
    assert "clear_cache=False" in caplog.text
    assert len(caplog.records) == 1
