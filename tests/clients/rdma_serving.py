"""Servers with devices made of memory copies, for the tests of stores that use RDMA."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import trio

from infinistore.client.movers import rdma
from infinistore.cluster.locate import StaticPlace, parse_cluster_url
from infinistore.cluster.membership import StaticMembership
from infinistore.cluster.placement import Placement
from infinistore.transports.rdma.verbs import DeviceLimits
from tests.server.running import RunningServer, make_config, running_server, until
from tests.transports.fake_rdma import Fabric, fabric_in_use

__all__ = ["VALUE", "best_url", "cancel_on_the_way", "rdma_url", "serving", "serving_two", "until_work_is_held"]

VALUE = bytes(range(256)) * 64


@asynccontextmanager
async def serving(
    limits: DeviceLimits | None = None, **settings: Any
) -> AsyncGenerator[tuple[Fabric, RunningServer], None]:
    """One server. RDMA that failed is left alone until the test is over."""
    with fabric_in_use(limits) as fabric, mock.patch.object(rdma, "FIRST_PAUSE_S", 3600.0):
        async with running_server(make_config(**settings)) as server:
            yield fabric, server


@asynccontextmanager
async def serving_two(
    keys: Sequence[str], **settings: Any
) -> AsyncGenerator[tuple[Fabric, Sequence[RunningServer], str, tuple[list[str], list[str]]], None]:
    """Two servers, the URL of their cluster, and which of these keys each owns."""
    async with serving(**settings) as (fabric, one), running_server(make_config(**settings)) as other:
        servers = sorted((one, other), key=lambda server: f"127.0.0.1:{server.server.addresses.port}")
        addresses = ",".join(f"127.0.0.1:{server.server.addresses.port}" for server in servers)
        url = f"infinistore+static://{addresses}?inline_bytes=0&device=fake1"
        place = parse_cluster_url(url).place
        assert isinstance(place, StaticPlace)
        owners = Placement(StaticMembership(place.nodes).view).owners(keys)
        first = [key for key, owner in zip(keys, owners, strict=True) if owner == 0]
        yield fabric, servers, url, (first, [key for key in keys if key not in first])


def rdma_url(server: RunningServer) -> str:
    return f"rdma://127.0.0.1:{server.server.addresses.port}?inline_bytes=0&device=fake1"


def best_url(server: RunningServer) -> str:
    """RDMA if it can be had."""
    return rdma_url(server).replace("rdma://", "infinistore://")


async def until_work_is_held(fabric: Fabric) -> None:
    await until(lambda: fabric.work)


async def cancel_on_the_way(fabric: Fabric, call: Callable[..., Awaitable[object]], *arguments: Any) -> None:
    """Cancel a call whose transfer the fabric holds."""
    fabric.held = True
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, *arguments)
            await until_work_is_held(fabric)
            scope.cancel()
