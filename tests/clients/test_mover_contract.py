"""Every mover keeps the contract that other packages hold theirs to: the built-in ones,
and the example.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from infinistore.mover_contract import MoverContract
from tests.installing import install
from tests.transports.fake_rdma import fabric_in_use


@pytest.mark.usefixtures("no_pauses")
class OurContract(MoverContract):
    settings = settings(max_examples=25)


class TestInline(OurContract):
    transport = "inline"
    shown_as = "tcp"


class TestShm(OurContract):
    transport = "shm"
    options: ClassVar[dict[str, Any]] = {"inline_bytes": 0}


class TestRdma(OurContract):
    transport = "rdma"
    options: ClassVar[dict[str, Any]] = {"inline_bytes": 0, "device": "fake1", "staging_bytes": 256 * 1024}

    def surroundings(self) -> AbstractContextManager[object]:
        return fabric_in_use()


class TestLoopback(OurContract):
    """The example, with nothing but its name given."""

    transport = "loopback"

    @pytest.fixture(autouse=True)
    def _installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        entries = {"loopback": "examples.loopback_mover:LOOPBACK"}
        install(tmp_path, monkeypatch, "infinistore.transports", entries)
