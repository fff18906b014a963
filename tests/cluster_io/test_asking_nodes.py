"""Nodes that vanished from etcd are asked whether they are there, in virtual time."""

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from infinistore.cluster.etcd.session import Probe
from infinistore.cluster.locate import EtcdPlace
from infinistore.cluster.membership import Node
from infinistore.cluster_io.etcd import EtcdConnections, FlowRunner

NODE = Node("a", "infinistore://a:22345", instance="1")
OTHER = Node("b", "infinistore://b:22345", instance="2")
Answer = Callable[[], Awaitable[str]]


async def lost() -> str:
    await trio.sleep_forever()
    return ""


async def refused() -> str:
    await trio.lowlevel.checkpoint()
    return ""


async def slow() -> str:
    await trio.sleep(0.4)
    return NODE.instance


async def there() -> str:
    await trio.lowlevel.checkpoint()
    return NODE.instance


async def replaced() -> str:
    await trio.lowlevel.checkpoint()
    return "another run"


async def probed(*answers: Answer) -> tuple[frozenset[str], int, float]:
    """Ask a node, and another that is gone. Return who answered, how often the first
    one was asked, and how long that took.
    """
    asked: list[Answer] = []

    async def ask(node: Node) -> str:
        if node is OTHER:
            return await refused()
        asked.append(answers[len(asked)])
        return await asked[-1]()

    async def flow() -> frozenset[str]:
        return await Probe((NODE, OTHER), 0.5)

    began = trio.current_time()
    connections = EtcdConnections(EtcdPlace(endpoints=(("etcd", 2379),), cluster="c"))
    found = await FlowRunner(connections, ask_instance=ask).run(flow())
    return found, len(asked), trio.current_time() - began


@pytest.mark.parametrize(
    ("answers", "is_there", "seconds"),
    [
        ((there,), True, 0.0),
        ((slow, lost), True, 0.4),
        ((lost, there), True, 0.2),
        ((lost, slow), False, 0.5),
        ((lost, lost), False, 0.5),
        ((refused,), False, 0.0),
        ((replaced,), False, 0.0),
        ((lost, replaced), False, 0.2),
    ],
)
async def test_one_lost_packet_does_not_make_a_node_seem_gone(
    answers: tuple[Answer, ...], is_there: bool, seconds: float, autojump_clock: MockClock
) -> None:
    """The first packet of a connection is sent again only after a second."""
    found, asked, took_s = await probed(*answers)
    assert (found, asked) == (frozenset({NODE.id} if is_there else ()), len(answers))
    assert took_s == pytest.approx(seconds)
