"""The programming interface of the original, with a cluster by its URL alone."""

from infinistore import TYPE_TCP, ClientConfig, InfinityConnection
from infinistore.dropin.memory import address_and_size
from tests.cluster_client.clusters import Cluster


def test_a_connection_takes_the_url_of_a_cluster(three: Cluster) -> None:
    with InfinityConnection(ClientConfig(connection_type=TYPE_TCP, host_addr=three.url())) as connection:
        connection.connect()
        block = bytearray(b"a block of its own")
        for number in range(20):
            assert connection.check_exist(f"key {number}") is False
        address, size = address_and_size(block)
        for number in range(20):
            connection.tcp_write_cache(f"key {number}", address, size)
        value = connection.tcp_read_cache("key 7")
        assert value is not None
        assert bytes(value) == block
        assert connection.delete_keys([f"key {number}" for number in range(20)]) == 20
