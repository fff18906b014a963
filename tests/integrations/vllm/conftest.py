"""Stores and engines that several of these tests use."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infinistore import blocking
from tests.bad_days.servers import ServerProcess

if TYPE_CHECKING:
    from .made_engine import MadeEngine

Open = Callable[..., "MadeEngine"]


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    """An embedded one of 1 MiB."""
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        yield store


@pytest.fixture
def gone() -> Iterator[blocking.BlockingStore]:
    """A store that is not there."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        with blocking.open_store(f"infinistore://127.0.0.1:{deaf.getsockname()[1]}", lazy=True) as store:
            yield store


@pytest.fixture
def opened(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens engines; all end with the test."""
    from .made_engine import open_engine

    with ExitStack() as stack:

        def open_one(store: ServerProcess = server, **options: Any) -> "MadeEngine":
            return stack.enter_context(open_engine(store.url, tmp_path, monkeypatch, **options))

        yield open_one


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connector's warnings: vLLM's loggers keep what they get."""
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.infinistore"), "warning", lambda text, *given: lines.append(text % given)
    )
    return lines


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks are written only while it is set."""
    from infinistore.tensors.blocking_transfers import put_blocks  # late: it needs PyTorch

    may = threading.Event()

    def put_when_it_may(*arguments: Any) -> None:
        may.wait()
        put_blocks(*arguments)

    monkeypatch.setattr("infinistore.tensors.layers.put_blocks", put_when_it_may)
    yield may
    may.set()
