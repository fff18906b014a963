"""The contract suite finds wrong movers. Each class here is the example with one
mistake.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from examples.loopback_mover import LoopbackMover, LoopbackSource
from infinistore.client.movers.base import GetPart, PutPart
from infinistore.client.movers.channel import Channel
from infinistore.mover_contract import ContractViolation, MoverContract
from infinistore.protocol import messages as m
from infinistore.protocol.codec import pack_u64
from infinistore.transports import Transport
from tests.installing import install


class WrongBytes(LoopbackMover):
    """The first byte of a block changes on its way."""

    async def get(self, part: GetPart) -> int:
        views: list[memoryview] = []

        def destination(sizes: Any, first: int) -> list[memoryview]:
            views[:] = part.destination(sizes, first)
            return views

        count = await super().get(part._replace(destination=destination))
        for view in views[:1]:
            view[0] ^= 1
        return count


class Leaking(LoopbackMover):
    """A put takes room that nobody gives back."""

    async def put(self, part: PutPart) -> list[str]:
        await self._channel.ask(m.Reserve(pack_u64(part.sizes)))
        return await super().put(part)


class Careless(LoopbackMover):
    """A read checks no checksums."""

    async def get(self, part: GetPart) -> int:
        return await super().get(part._replace(verify=False))


def transport(name: str, mover: type[LoopbackMover]) -> Transport:
    """The example's transport with a wrong mover for clients, under a name of
    its own.
    """

    class Source(LoopbackSource):
        async def open(self, channel: Channel, stream: Any) -> LoopbackMover:
            return mover(channel, (await super().open(channel, stream))._peer)

    return Transport(name, client_mover=Source)


WRONG_BYTES = transport("wrong_bytes", WrongBytes)
LEAKING = transport("leaking", Leaking)
CARELESS = transport("careless", Careless)


@pytest.mark.parametrize(
    ("name", "test", "rule"),
    [
        ("wrong_bytes", "test_a_batch_of_many_blocks_arrives", "a read returns what was written"),
        ("leaking", "test_a_batch_of_many_blocks_arrives", "leaves nothing reserved or leased"),
        ("careless", "test_corrupt_bytes_are_found", "a read finds bytes that are not those that were written"),
    ],
)
def test_a_wrong_mover_is_found(
    name: str, test: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = "tests.clients.test_wrong_movers"
    entries = {one: f"{here}:{one.upper()}" for one in ("wrong_bytes", "leaking", "careless")}
    entries["loopback"] = "examples.loopback_mover:LOOPBACK"
    install(tmp_path, monkeypatch, "infinistore.transports", entries)

    class Contract(MoverContract):
        transport = name
        shown_as = "loopback"
        settings = settings(max_examples=10)

    with pytest.raises(ContractViolation, match=rule):
        getattr(Contract(), test)()
