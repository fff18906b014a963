"""What a server needs to be a node, whatever its cluster's URL is."""

import pytest

from infinistore.config import load_server_config
from infinistore.errors import ConfigError
from tests.tables import for_each

ETCD = ["infinistore+etcd://a/c", "infinistores+etcd://a/c"]


@for_each(cluster=ETCD, host=["0.0.0.0", "::"])
def test_a_server_on_all_addresses_must_say_which_one_others_use(cluster: str, host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} is no address that others can connect to; add --advertise"):
        load_server_config({"cluster": cluster, "host": host, "insecure": "yes"}, environment={})
    load_server_config({"cluster": cluster, "host": host, "insecure": "yes", "advertise": "a"}, environment={})


@for_each(cluster=ETCD, advertise=["0.0.0.0", "0.0.0.0:7", "[::]:7"])
def test_nobody_advertises_all_addresses(cluster: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match=r"--advertise.* is no address that others can connect to; name this machine"):
        load_server_config({"cluster": cluster, "advertise": advertise}, environment={})


@for_each(cluster=ETCD)
def test_nodes_with_tenants_need_a_token_for_each_other(cluster: str) -> None:
    with pytest.raises(ConfigError, match="in a cluster need --peer-token-file"):
        load_server_config({"cluster": cluster, "tenants": "/tenants.yaml"}, environment={})
