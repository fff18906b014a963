"""What tests of servers in clusters share."""

from tests.cluster_io.etcd import etcd

__all__ = ["etcd"]
