"""The documents on the pages, in JSON, YAML and TOML: what reads them takes them."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infinistore import allocators
from infinistore.access.tenants_file import parse_tenants
from infinistore.cli.files import MAGIC, parse_manifest
from infinistore.cluster.documents import read_file
from infinistore.config import load_server_config
from infinistore.integrations.vllm.scheduler import read_prompts
from infinistore.integrations.vllm.settings import ConnectorSettings, RequestSettings
from infinistore.scheduling import POLICY_ENTRY_POINT_GROUP
from infinistore.transports.registry import ENTRY_POINT_GROUP as TRANSPORTS
from tests.documentation.blocks import PROJECT, Block, blocks


def server_settings(text: str, folder: Path) -> None:
    (folder / "server.yaml").write_text(text)
    assert load_server_config(file=str(folder / "server.yaml"), environment={}).prealloc_bytes == 64 << 30


def manifest(text: str, _: Path) -> None:
    written = MAGIC + text.replace("16 hexadecimal digits", "0" * 16).encode()
    assert parse_manifest("key", written) is not None


def nodes(text: str, _: Path) -> None:
    assert [node.id for node in read_file(text, 1).nodes] == ["a", "b"]


def tenants(text: str, _: Path) -> None:
    assert "alice" in parse_tenants(text).tenants


def entry_point(text: str, _: Path) -> None:
    (group,) = tomllib.loads(text)["project"]["entry-points"]
    assert group in (allocators.ENTRY_POINT_GROUP, TRANSPORTS, POLICY_ENTRY_POINT_GROUP)


def part_of_an_example(text: str, _: Path) -> None:
    """Which tests/integrations gives to the engine."""
    assert [path for path in (PROJECT / "examples").rglob("*.yaml") if text in path.read_text()] != []


def survivor(text: str, _: Path) -> None:
    (listed,) = tomllib.loads(text)["survivor"]
    others = tomllib.loads(next((PROJECT / "tests" / "mutants").rglob("survivors/*.toml")).read_text())["survivor"]
    assert listed.keys() == others[0].keys()


def connector(text: str, _: Path) -> None:
    found = list(connector_settings(json.loads(text)))
    assert found
    for settings in found:
        ConnectorSettings.from_extra_config(settings)


def prompts(text: str, folder: Path) -> None:
    (folder / "prompts.json").write_text(text)
    assert read_prompts(str(folder / "prompts.json"), lambda words: [len(words)]) == [[47], [151644, 8948, 198]]


def request(text: str, _: Path) -> None:
    assert RequestSettings.of(json.loads(text)["kv_transfer_params"]) == RequestSettings(save=False)


def scrape(text: str, _: Path) -> None:
    """As the job of deploy/container, which a test compares with the alerts."""
    (job,) = yaml.safe_load(text)["scrape_configs"]
    (other,) = yaml.safe_load((PROJECT / "deploy" / "container" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["job_name"] == other["job_name"]
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{load_server_config(environment={}).manage_port}"]


def pod_of_a_server(text: str, _: Path) -> None:
    """tests/packaging/test_documentation.py gives its settings to a server."""
    assert [document["kind"] for document in yaml.safe_load_all(text)] == ["Secret", "Pod"]


READERS = {
    ("docs/add-a-mover.md", "loopback"): entry_point,
    ("docs/add-an-allocator.md", "buddy"): entry_point,
    ("docs/cluster.md", "nodes"): nodes,
    ("docs/command-line.md", "xxh3"): manifest,
    ("docs/configuration.md", "service_port"): server_settings,
    ("docs/lmcache.md", "remote_storage_plugins"): part_of_an_example,
    ("docs/lmcache.md", "remote_url"): part_of_an_example,
    ("docs/kubernetes.md", "kind: Pod"): pod_of_a_server,
    ("docs/operations.md", "scrape_configs"): scrape,
    ("docs/scheduling.md", "fewest-requests"): entry_point,
    ("docs/tenants.md", "operator"): tenants,
    ("docs/tenants.md", "groups:"): tenants,
    ("docs/testing.md", "survivor"): survivor,
    ("docs/vllm-scale.md", "MultiConnector"): connector,
    ("docs/vllm-scale.md", "events_dump_endpoint"): connector,
    ("docs/vllm-scale.md", '"shards": 4'): connector,
    ("docs/vllm.md", "<|im_start|>"): prompts,
    ("docs/vllm.md", "kv_transfer_params"): request,
}
"""What reads a document: its page, and what only it has there."""
DOCUMENTS = blocks("json", "yaml", "toml")


def name(block: Block) -> str:
    return block.name


def test_a_row_is_about_one_document() -> None:
    for page, text in READERS:
        assert len([one for one in DOCUMENTS if one.page_name == page and text in one.code]) == 1, (page, text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_a_document_is_what_its_reader_takes(document: Block, tmp_path: Path) -> None:
    (reader,) = [
        reader for (page, text), reader in READERS.items() if page == document.page_name and text in document.code
    ]
    reader(document.code, tmp_path)


def connector_settings(document: Any) -> Iterator[dict[str, Any]]:
    """The settings of each of our connectors in a configuration of vLLM."""
    if isinstance(document, dict):
        if "url" in (settings := document.get("kv_connector_extra_config", {})):
            yield settings
        for inner in document.values():
            yield from connector_settings(inner)
    elif isinstance(document, list):
        for inner in document:
            yield from connector_settings(inner)


@pytest.mark.parametrize("block", [one for one in blocks("sh") if "InfiniStoreConnector" in one.code], ids=name)
def test_the_connector_of_a_command_has_settings_that_it_knows(block: Block, tmp_path: Path) -> None:
    for text in block.code.split("--kv-transfer-config '")[1:]:
        connector(text.partition("'")[0], tmp_path)
