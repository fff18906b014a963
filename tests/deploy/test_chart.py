"""The Helm chart: rendered by Helm itself, for three sets of values, and checked
against Kubernetes' own schemas.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinistore.config import ServerConfig, load_server_config
from infinistore.integrations.vllm.settings import ConnectorSettings
from infinistore.sizes import parse_size

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "infinistore"
MANIFEST = DEPLOY / "kubernetes" / "vllm.yaml"
VALUES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
KUBERNETES = ("1.26", "1.33")
ETCD = "infinistore+etcd://etcd:2379/prod"

helm = pytest.importorskip("helm_python", reason="`make test-deploy` runs this")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make test-deploy` runs this")


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the chart makes, by kind."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name="kv", namespace="prod")
    found = [one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())
    return values


@pytest.fixture(params=VALUES)
def rendered(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return render(values_of(request.param))


def pod_of(rendered: dict[str, dict[str, Any]]) -> dict[str, Any]:
    servers = rendered.get("DaemonSet") or rendered["StatefulSet"]
    pod: dict[str, Any] = servers["spec"]["template"]["spec"]
    return pod


def config_of(rendered: dict[str, dict[str, Any]], folder: Path) -> ServerConfig:
    """The configuration as the server reads it."""
    file = folder / "infinistore.yaml"
    file.write_text(rendered["ConfigMap"]["data"]["infinistore.yaml"])
    (container,) = pod_of(rendered)["containers"]
    variables = {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    return load_server_config(file=file, environment=variables)


def mebibytes(quantity: str) -> int:
    return parse_size(quantity.replace("Gi", "GiB").replace("Mi", "MiB")) >> 20


def test_there_are_three_sets_of_values_for_both_modes() -> None:
    assert VALUES == ["node", "pool", "rdma"]
    assert {("DaemonSet" in render(values_of(name))) for name in VALUES} == {True, False}


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_what_the_chart_makes(rendered: dict[str, dict[str, Any]], version: str) -> None:
    assert len(rendered) >= 3
    for kind, one in rendered.items():
        if kind != "ServiceMonitor":  # a resource of Prometheus' operator
            kubernetes_validate.validate(one, version, strict=True)


def test_helm_finds_no_fault_with_the_chart() -> None:
    report = helm.lint(str(CHART))
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_the_server_understands_its_configuration(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    config = config_of(rendered, tmp_path)
    (container,) = pod_of(rendered)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"store": config.service_port, "management": config.manage_port}
    assert container["args"][:2] == ["serve", "--config"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for needed in filter(None, (container["args"][2], config.token_file, *(str(disk.folder) for disk in config.disks))):
        assert any(str(needed).startswith(f"{folder}/") for folder in mounted)
    if config.unix_socket != "off":
        assert str(Path(config.unix_socket).parent) in mounted
    assert pod_of(rendered)["terminationGracePeriodSeconds"] > config.drain_timeout_s


def test_the_memory_limit_has_room_for_the_pool(rendered: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    config = config_of(rendered, tmp_path)
    limits = pod_of(rendered)["containers"][0]["resources"]["limits"]
    pool = config.prealloc_bytes >> 20
    if config.huge_pages:
        assert mebibytes(limits["hugepages-2Mi"]) == pool
        pool, beside = 0, pool // 20
    else:
        beside = pool // 20
    assert mebibytes(limits["memory"]) >= pool + beside


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"insecure": True, "pool": {"sizeGiB": 10}, "resources": {"memoryLimitMiB": 10751}}, "at least 10752"),
        ({}, "set token.secret"),
        ({"tls": {"secret": "kv-tls"}}, "set token.secret"),
        ({"token": {"secret": "a"}, "tenants": {"secret": "b"}}, "set token.secret or tenants.secret"),
        ({"insecure": True, "tls": {"clientCertificates": True}}, "needs tls.secret"),
        ({"tenants": {"secret": "a"}, "cluster": ETCD}, "need tenants.peerToken.secret"),
        ({"tenants": {"secret": "a"}, "cluster": ETCD.replace("+", "s+", 1)}, "need tenants.peerToken.secret"),
        ({"tenants": {"secret": "a", "peerToken": {"secret": "b"}}}, "goes with tenants.secret and cluster"),
        ({"token": {"secret": "a"}, "tenants": {"peerToken": {"secret": "b"}}, "cluster": ETCD}, "goes with tenants"),
        ({"insecure": True, "mode": "both"}, "mode"),
        ({"insecure": True, "pool": {"sizeGB": 10}}, "sizeGB"),
        ({"insecure": True, "pool": {"sizeGiB": 0}}, "sizeGiB"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(helm.HelmError, match=problem):
        render(values)


# vLLM and the store in one file

QUICK = {"image": {"repository": "REGISTRY/infinistore", "tag": "latest"}, "token": {"secret": "infinistore-token"}}


def plain_labels(document: Any) -> Any:
    """Without the labels that Helm finds its own by."""
    if isinstance(document, list):
        return [plain_labels(one) for one in document]
    if not isinstance(document, dict):
        return document
    names = {"app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"}
    return {name: plain_labels(value) for name, value in document.items() if name not in names}


def test_the_store_beside_an_engine_is_what_the_chart_makes() -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    stores = {one["kind"]: one for one in documents if one["metadata"]["name"] == "infinistore"}
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(QUICK, name="infinistore", namespace="default")
    made = [one for name, text in texts.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    assert stores == {one["kind"]: plain_labels(one) for one in made}


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_an_engine_with_a_store(version: str) -> None:
    for document in yaml.safe_load_all(MANIFEST.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_engine_reaches_the_store_of_its_node_by_shared_memory() -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    (engine,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment")
    (store,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "DaemonSet")
    (container,) = engine["containers"]
    settings = json.loads(container["args"][-1])
    variables = {one["name"]: one for one in container["env"]}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INFINISTORE_URL", variables["INFINISTORE_URL"]["value"])
        url = ConnectorSettings.from_extra_config(settings.get("kv_connector_extra_config", {})).url
    (config,) = (yaml.safe_load(one["data"]["infinistore.yaml"]) for one in documents if one["kind"] == "ConfigMap")
    assert url == f"shm://{config['unix_socket']}"
    (folder,) = (one["hostPath"]["path"] for one in engine["volumes"] if one["name"] == "sockets")
    assert {"name": "sockets", "mountPath": str(Path(config["unix_socket"]).parent)} in container["volumeMounts"]
    assert folder in [one["hostPath"]["path"] for one in store["volumes"] if "hostPath" in one]
    assert engine["securityContext"]["supplementalGroups"] == [store["securityContext"]["runAsGroup"]]
    secret = variables["INFINISTORE_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": QUICK["token"]["secret"], "key": Path(config["token_file"]).name}


def test_servers_with_tls_are_probed_and_scraped_by_https_with_the_files_of_the_secret(tmp_path: Path) -> None:
    values = values_of("pool") | {"tls": {"secret": "kv-tls"}, "serviceMonitor": {"enabled": True}}
    rendered = render(values)
    config = config_of(rendered, tmp_path)
    assert str(config.tls_cert) == "/etc/infinistore-tls/tls.crt"
    assert str(config.tls_key) == "/etc/infinistore-tls/tls.key"
    assert str(config.tls_peer_ca) == "/etc/infinistore-tls/ca.crt"  # of the other nodes
    assert config.tls_client_ca is None
    pod = pod_of(rendered)
    (container,) = pod["containers"]
    assert {"name": "tls", "mountPath": "/etc/infinistore-tls", "readOnly": True} in container["volumeMounts"]
    assert {"name": "tls", "secret": {"secretName": "kv-tls", "defaultMode": 0o440}} in pod["volumes"]
    assert {container[name]["httpGet"]["scheme"] for name, _ in probes(container)} == {"HTTPS"}
    (endpoint,) = rendered["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "kv-infinistore.prod.svc",
        "ca": {"secret": {"name": "kv-tls", "key": "ca.crt"}},
    }


def test_clients_must_show_certificates_where_the_values_say_so(tmp_path: Path) -> None:
    values = {"token": {"secret": "kv-token"}, "tls": {"secret": "kv-tls", "clientCertificates": True}}
    config = config_of(render(values), tmp_path)
    assert str(config.tls_client_ca) == "/etc/infinistore-tls/ca.crt"
    assert config.tls_peer_ca is None  # no cluster


def test_the_file_of_tenants_replaces_the_token(tmp_path: Path) -> None:
    monitor = {"enabled": True, "token": {"secret": "prometheus-token"}}
    rendered = render({"tenants": {"secret": "kv-tenants"}, "serviceMonitor": monitor})
    assert str(config_of(rendered, tmp_path).tenants) == "/etc/infinistore-tenants/tenants.yaml"
    volumes = pod_of(rendered)["volumes"]
    assert {"name": "tenants", "secret": {"secretName": "kv-tenants", "defaultMode": 0o440}} in volumes
    (endpoint,) = rendered["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "prometheus-token", "key": "token"}}


def test_nodes_with_tenants_ask_each_other_with_the_token_in_a_secret_of_its_own(tmp_path: Path) -> None:
    tenants = {"secret": "kv-tenants", "peerToken": {"secret": "kv-nodes", "key": "nodes.token"}}
    rendered = render({"tenants": tenants, "cluster": ETCD})
    assert str(config_of(rendered, tmp_path).peer_token_file) == "/etc/infinistore-peer-token/nodes.token"
    pod = pod_of(rendered)
    (container,) = pod["containers"]
    mount = {"name": "peer-token", "mountPath": "/etc/infinistore-peer-token", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert {"name": "peer-token", "secret": {"secretName": "kv-nodes", "defaultMode": 0o440}} in pod["volumes"]


def test_nodes_with_tenants_need_no_token_where_their_certificate_stands_for_a_tenant(tmp_path: Path) -> None:
    rendered = render({"tenants": {"secret": "kv-tenants"}, "tls": {"secret": "kv-tls"}, "cluster": ETCD})
    assert config_of(rendered, tmp_path).peer_token_file is None


def test_a_limit_of_the_pool_and_5_percent_is_accepted() -> None:
    values = {"insecure": True, "pool": {"sizeGiB": 10}, "resources": {"memoryLimitMiB": 10752}}
    assert pod_of(render(values))["containers"][0]["resources"]["limits"] == {"memory": "10752Mi"}


def test_an_update_of_the_chart_restarts_no_server(rendered: dict[str, dict[str, Any]]) -> None:
    servers = rendered.get("DaemonSet") or rendered["StatefulSet"]
    assert servers["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_server_has_no_right_that_it_does_not_need(rendered: dict[str, dict[str, Any]]) -> None:
    pod = pod_of(rendered)
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    capabilities = container["securityContext"]["capabilities"]
    assert capabilities["drop"] == ["ALL"]
    assert capabilities.get("add", []) in ([], ["IPC_LOCK"])
    assert ("add" in capabilities) == ("rdma/hca_shared_devices_a" in container["resources"]["limits"])


def test_engines_on_a_node_reach_the_socket_in_a_folder_of_the_host(tmp_path: Path) -> None:
    rendered = render(values_of("node"))
    (folder,) = (volume["hostPath"] for volume in pod_of(rendered)["volumes"] if volume["name"] == "sockets")
    assert folder == {"path": "/run/infinistore", "type": "DirectoryOrCreate"}
    assert config_of(rendered, tmp_path).unix_socket_access == "group"


def test_only_clients_and_the_monitoring_reach_the_ports() -> None:
    node = render(values_of("node"))
    clients, monitoring = node["NetworkPolicy"]["spec"]["ingress"]
    assert clients["ports"] == [{"port": 22345, "endPort": 22348}]  # four shards
    assert [port["port"] for port in node["Service"]["spec"]["ports"]] == [22345, 22346, 22347, 22348, 18080]
    assert monitoring["ports"] == [{"port": 18080}]
    assert "NetworkPolicy" not in render(values_of("rdma"))


def test_prometheus_gives_the_job_the_name_that_the_alerts_are_about() -> None:
    rendered = render(values_of("node"))
    monitor, service = rendered["ServiceMonitor"], rendered["Service"]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "infinistore"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["authorization"] == {"credentials": {"name": "infinistore-token", "key": "token"}}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def probes(container: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield name, container[name]["httpGet"]["path"]


def test_probes_ask_what_a_server_answers_before_its_pool_is_there(rendered: dict[str, dict[str, Any]]) -> None:
    (container,) = pod_of(rendered)["containers"]
    assert dict(probes(container)) == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
