"""Purges a cluster that registers in etcd."""

import secrets
from random import Random

import trio

from infinistore.cluster.etcd.gateway import EtcdMisbehaved, EtcdRefused
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.operators import Purged, purge_cluster
from infinistore.cluster.etcd.session import EtcdUnavailable
from infinistore.cluster.locate import EtcdPlace
from infinistore.cluster_io.etcd import AskInstance, EtcdConnections, FlowRunner
from infinistore.cluster_io.memberships import make_session
from infinistore.errors import StoreUnavailable

__all__ = ["purge_registered"]


async def purge_registered(place: EtcdPlace, timeout_s: float, ask_instance: AskInstance) -> Purged:
    """Write to etcd that the cluster is purged, and wait until its nodes have done it,
    but not longer than `timeout_s`. `ask_instance` asks a node who it is.

    Raises:
        ConfigError: etcd knows no such cluster, or a file that `place` names cannot be
            used.
        StoreUnavailable: etcd does not answer, or refuses.
    """
    runner = FlowRunner(EtcdConnections(place), ask_instance=ask_instance)
    session = make_session(place, Random())
    try:
        flow = purge_cluster(session, Layout(place.cluster), secrets.token_hex(16), trio.current_time, timeout_s)
        return await runner.run(flow)
    except (EtcdUnavailable, EtcdMisbehaved, EtcdRefused) as error:
        raise StoreUnavailable(f"the cluster may not be purged; etcd: {error}") from None
