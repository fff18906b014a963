"""What a user writes into kv_connector_extra_config."""

import json
import re
from pathlib import Path

import attrs
import pytest

from infinistore.errors import ConfigError
from infinistore.integrations import vllm
from infinistore.integrations.internal.settings import known_settings
from infinistore.integrations.vllm.blocks import layer_labels
from infinistore.integrations.vllm.settings import ConnectorSettings, RequestSettings

from .halves import make_names


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "--kv-transfer-config names no store; set url, or the variable INFINISTORE_URL"),
        ({"url": ""}, "names no store"),
        ({"url": 7}, "url must be a text, not 7"),
        ({"url": "tcp://h:1", "deadline": 3}, "unknown setting 'deadline'; did you mean deadline_s?"),
        ({"url": "tcp://h:1", "zzz": 3}, "unknown setting 'zzz'; known are url, namespace"),
        ({"url": "tcp://h:1", "deadline_s": 0}, "deadline_s must be a number of seconds above 0"),
        ({"url": "tcp://h:1", "hold_s": "5"}, "hold_s must be a number"),
        ({"url": "tcp://h:1", "load_threads": True}, "load_threads must be a whole number above 0, not True"),
        ({"url": "tcp://h:1", "max_pending_bytes": -1}, "max_pending_bytes must be a whole number"),
        ({"url": "tcp://h:1", "when_full": "wait"}, 'when_full must be "block" or "drop", not \'wait\''),
        ({"url": "tcp://h:1", "ttl_s": -5}, "ttl_s must be a number of seconds above 0, or null, not -5"),
        ({"url": "tcp://h:1", "pin_s": None}, "pin_s must be a number of seconds above 0"),
        ({"url": "tcp://h:1", "verify": False}, 'verify must be "always" or "never"'),
        ({"url": "tcp://h:1", "reset": True}, 'reset must be "delete" or "keep", not True'),
        ({"url": "tcp://h:1", "events_dump_blocks": 0}, "events_dump_blocks must be a whole number above 0"),
        ({"url": "tcp://h:1", "announce_url": 8000}, "announce_url must be the URL at which clients reach this engine"),
        ({"url": "tcp://h:1", "announce_url": "h:8000"}, 'such as "http://10.0.0.1:8000", of at most 200 characters'),
        ({"url": "tcp://h:1", "announce_url": "http://:8000"}, "announce_url must be"),
        ({"url": "tcp://h:1", "announce_url": "http://[h"}, "announce_url must be"),
        ({"url": "tcp://h:1", "announce_url": "http://h:99999"}, "announce_url must be"),
        ({"url": "tcp://h:1", "announce_url": "http://h/ a"}, "announce_url must be"),
        ({"url": "tcp://h:1", "announce_url": "http://h/?a=b"}, "announce_url must be"),
        ({"url": "tcp://h:1", "announce_url": "http://" + "h" * 200}, "announce_url must be"),
        ({"url": "tcp://h:1", "save_generated": "no"}, "save_generated must be true or false"),
        ({"url": "tcp://h:1", "namespace": "x\0y"}, "namespace must be a text"),
    ],
)
def test_what_cannot_be_used_is_told_by_its_name(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ConnectorSettings.from_extra_config(given)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("url", ["", "http://h", "https://h:8000/a/", "http://[::1]:8000"])
def test_an_engine_may_be_at_any_url_of_http(url: str) -> None:
    assert ConnectorSettings.from_extra_config({"url": "tcp://h:1", "announce_url": url}).announce_url == url


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"infinistore": []}, "kv_transfer_params: infinistore must be an object with settings, not []"),
        ({"infinistore": {"loads": True}}, "unknown setting 'loads'; did you mean load?"),
        ({"infinistore": {"load": 1}}, "load must be true or false, not 1"),
        ({"infinistore": {"save": "no"}}, "save must be true or false"),
        ({"infinistore": {"ttl_s": 0}}, "ttl_s must be a number of seconds above 0, or null, not 0"),
        ({"infinistore": {"pin_s": "600"}}, "pin_s must be a number of seconds above 0, or null"),
    ],
)
def test_what_a_request_cannot_ask_for_is_told_by_its_name(params: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RequestSettings.of(params)
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"infinistore": None}, {"infinistore": {}}, 7]
)
def test_a_request_that_asks_for_nothing_is_as_others(params: object) -> None:
    assert RequestSettings.of(params) == RequestSettings(load=True, save=True, ttl_s=None, pin_s=None)


def test_a_key_tells_namespace_model_block_shard_and_layer() -> None:
    names = make_names(shards=2, namespace="team")

    prefix = names.prefix.rpartition("/")[0]
    assert prefix == "vllm/team/llama"
    assert names.all_keys(["aa", "bb"])[:3] == [
        f"{names.prefix}/aa/0/0",
        f"{names.prefix}/aa/1/0",
        names.key("aa", 0, "1"),
    ]
    assert len(names.all_keys(["aa", "bb"])) == 2 * names.keys_per_block == 12
    assert names.some_keys(["aa", "bb"], most=100) == (names.all_keys(["aa", "bb"]), 6)
    assert names.some_keys(["aa", "bb"], most=1) == (
        [names.key("aa", 0, "0"), names.key("aa", 1, "2"), names.key("bb", 1, "0"), names.key("bb", 0, "2")],
        2,
    )


def test_layers_are_called_by_number_where_that_tells_them_apart() -> None:
    assert layer_labels(["layers.0.attn", "layers.10.attn"]) == {"layers.0.attn": "0", "layers.10.attn": "10"}
    assert layer_labels(["layers.0.a", "layers.0.b"]) == {"layers.0.a": "layers.0.a", "layers.0.b": "layers.0.b"}
    assert layer_labels(["only"]) == {"only": "only"}


@pytest.mark.parametrize("file", ["both.json", "prefill.json", "decode.json"])
def test_the_example_names_the_connector_and_has_settings_that_it_takes(file: str) -> None:
    config = json.loads((Path(__file__).parents[3] / "examples" / "vllm" / file).read_text())

    assert config["kv_connector"] in vllm.__all__
    assert config["kv_connector_module_path"] == vllm.__name__
    ConnectorSettings.from_extra_config(config["kv_connector_extra_config"])


def test_every_setting_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    settings = page.partition("## Settings")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", settings, flags=re.MULTILINE))

    documented = {field.name: field.default for field in attrs.fields(ConnectorSettings)}
    assert list(table) == known_settings(ConnectorSettings)
    ours = page.partition("## Per request")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", ours, flags=re.MULTILINE) == known_settings(RequestSettings)
    for name in ("deadline_s", "lookup_deadline_s", "hold_s", "load_threads"):
        assert float(table[name]) == documented[name]
