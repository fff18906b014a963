"""What a user writes into the configuration of any engine."""

from typing import Any

import pytest

from infinistore.errors import ConfigError
from infinistore.integrations.internal.settings import StoreSettings
from infinistore.integrations.vllm.settings import ConnectorSettings
from tests.tables import for_each

URL = "tcp://localhost"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "extra_config names no store; set url, or the variable INFINISTORE_URL, to infinistore://"),
    ({"url": None}, "extra_config names no store"),
    ({"url": 7}, "extra_config: url must be a text, not 7"),
    ({"url": URL, "hold": 3}, "extra_config: unknown setting 'hold'; did you mean hold_s?"),
    ({"url": URL, "zzz": 3}, "known are url, key_prefix, deadline_s, hold_s"),
    ({"url": URL, "hold_s": -1}, "extra_config: hold_s must be a number of seconds above 0, not -1"),
    ({"url": URL, "deadline_s": "soon"}, "deadline_s must be a number of seconds above 0"),
    ({"url": URL, "ttl_s": 0}, "ttl_s must be a number of seconds above 0"),
    ({"url": URL, "pin_s": float("nan")}, "pin_s must be a number of seconds above 0"),
    ({"url": URL, "key_prefix": 5}, "key_prefix must be a text, not 5"),
]


@for_each(case=WRONG)
def test_what_cannot_be_used_is_refused_by_its_name(case: tuple[dict[str, Any], str]) -> None:
    given, complaint = case
    with pytest.raises(ConfigError) as raised:
        StoreSettings.from_mapping(given, where="extra_config", key_prefix="")
    assert complaint in str(raised.value)


@for_each(given=[{}, {"url": ""}, {"url": None}, {"url": URL}])
def test_the_url_is_that_of_the_settings_or_else_of_the_environment(given: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INFINISTORE_URL", "tcp://other")
        settings = StoreSettings.from_mapping(given, where="extra_config", key_prefix="")
        connector = ConnectorSettings.from_extra_config(given)
    assert settings.url == connector.url == (given.get("url") or "tcp://other")


@pytest.mark.parametrize(
    ("given", "deadline_s"),
    [({"url": URL}, 5.0), ({"url": f"{URL}?deadline_s=7"}, None), ({"url": URL, "deadline_s": 2}, 2)],
)
def test_a_call_has_the_deadline_of_the_settings_or_the_url_or_five_seconds(
    given: dict[str, Any], deadline_s: float | None
) -> None:
    options = StoreSettings.from_mapping(given, where="extra_config", key_prefix="").options
    assert options.get("deadline_s") == deadline_s


def test_weights_that_are_not_known_need_a_prefix_of_the_users_own() -> None:
    usual = StoreSettings.from_mapping({"url": URL}, where="extra_config", key_prefix="usual/")
    assert usual.prefix_of("llama", "1234", default="usual/") == "usual/1234/"
    with pytest.raises(ConfigError, match="what the weights of llama are"):
        usual.prefix_of("llama", "", default="usual/")
    own = StoreSettings.from_mapping({"url": URL, "key_prefix": "own/"}, where="extra_config", key_prefix="usual/")
    assert own.prefix_of("llama", "", default="usual/") == "own/"
