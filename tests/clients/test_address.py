"""Where a store is, and the options that a URL or a caller may give."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import infinistore
from infinistore import aio, blocking
from infinistore.client.options import SCHEMES, Options, make_options, option_settings, parse_url, url_settings
from infinistore.client.store_options import StoreOptions
from infinistore.errors import ConfigError
from infinistore.settings import Setting

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("infinistore://host", ("infinistore", "host", 22345, "")),
        ("infinistore://host:1", ("infinistore", "host", 1, "")),
        ("tcp://host:65535/", ("tcp", "host", 65535, "")),
        ("tcp://127.0.0.1", ("tcp", "127.0.0.1", 22345, "")),
        ("tcp://[::1]:7", ("tcp", "::1", 7, "")),
        ("unix:///run/store.sock", ("unix", "", 0, "/run/store.sock")),
        ("unix:///a%20b/c", ("unix", "", 0, "/a b/c")),
    ],
)
def test_urls_of_stores(url: str, expected: tuple[str, str, int, str]) -> None:
    address = parse_url(url)
    assert (address.scheme, address.host, address.port, address.path) == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "infinistore://"),
        ("host:22345", "infinistore://host:22345"),
        ("tpc://host", "did you mean tcp"),
        ("unixx:///path", "did you mean unix"),
        ("http://host", "known are infinistore, infinistores, tcp, unix"),
        ("tcp://", "names no host"),
        ("tcp://:22345", "names no host"),
        ("tcp://host:port", "no URL of a store"),
        ("tcp://host:99999", "no URL of a store"),
        ("tcp://host:-1", "no URL of a store"),
        ("tcp://[::1", "no URL of a store"),
        ("tcp://host/path", "more than host, port and options"),
        ("tcp://user:secret@host", "no password before its host: give a token as ?token_file"),
        ("redis://user:secret@host", "unknown scheme 'redis' in 'redis://...@host'"),
        ("tcp://::1:22345", "write an IPv6 address in brackets, as [::1]:22345"),
        ("unix://path/to/socket", "three slashes"),
        ("unix://", "three slashes"),
        ("tcp://host?dedline_s=5", "did you mean deadline_s"),
        ("tcp://host?token=secret", "token_file"),
        ("tcp://host?nothing", "cannot be read"),
        (
            "tcp://host?deadline_s=soon",
            "deadline_s=soon in tcp://host?deadline_s=soon must be a number of seconds above 0",
        ),
        ("tcp://host?deadline_s=-1", "deadline_s"),
        ("tcp://host?deadline_s=nan", "deadline_s"),
        ("tcp://host?deadline_s=1e300", "deadline_s"),
        ("tcp://host?max_connections=1.5", "must be a whole number, 1 or more"),
        ("tcp://host?max_connections=0", "max_connections"),
        ("tcp://host?copy_threads=two", "must be a whole number, 1 or more"),
        ("tcp://host?copy_threads=0", "copy_threads"),
        ("tcp://host?known_blocks=-1", "known_blocks"),
        ("tcp://host?known_blocks=all", "must be a whole number, 0 or more"),
        ("tcp://host?verify=sometimes", "verify"),
        ("tcp://host?token_file=/nowhere/token", "token_file"),
    ],
)
def test_a_url_that_is_none_is_refused_with_what_comes_near(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_options(url, {})
    assert says in str(raised.value)
    assert "secret@" not in str(raised.value)


@given(
    st.text(max_size=40) | st.text(alphabet="tcpunix:/[]@?&=%#.-0123456789", max_size=40).map(lambda t: "tcp://" + t)
)
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    try:
        address = parse_url(text)
    except ConfigError:
        return
    assert address.host or address.path


def test_an_address_is_shown_as_its_url_without_options() -> None:
    for url in ("infinistore://host:1", "tcp://[::1]:7", "unix:///run/store.sock"):
        assert str(parse_url(url)) == url
    assert str(parse_url("tcp://host:1?token_file=/secret")) == "tcp://host:1"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dedline_s": 5}, "did you mean deadline_s"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"deadline_s": "5"}, "deadline_s"),
        ({"deadline_s": 1e20}, "deadline_s"),
        ({"verify": "maybe"}, "verify"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_connections": 2.0}, "max_connections"),
        ({"copy_threads": 0}, "copy_threads"),
        ({"copy_threads": 1.5}, "copy_threads"),
        ({"known_blocks": -1}, "known_blocks"),
        ({"known_blocks": 0.5}, "known_blocks"),
        ({"pool_bytes": 0}, "pool_bytes"),
        ({"token": 5}, "token"),
        ({"token": "t" * 2000}, "token"),
        ({"name": 5}, "name"),
        ({"name": "n" * 2000}, "name"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_options(None if "pool_bytes" in given else "tcp://host", given)  # type: ignore[arg-type]
    assert says in str(raised.value)


@pytest.mark.parametrize("name", ["pool_bytes", "minimal_allocate_bytes", "allocator", "huge_pages", "numa_node"])
def test_options_of_the_embedded_store_mean_nothing_to_a_server(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_options("tcp://host", {name: 1})  # type: ignore[misc]


def test_the_callers_token_is_stronger_than_the_files_and_that_than_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("of-the-file\nsecond line")
    with_file = f"tcp://host?token_file={file}"
    monkeypatch.delenv("INFINISTORE_TOKEN", raising=False)
    assert make_options("tcp://host", {})[1].token == ""
    monkeypatch.setenv("INFINISTORE_TOKEN", "of-the-environment")
    assert make_options("tcp://host", {})[1].token == "of-the-environment"
    assert make_options(with_file, {})[1].token == "of-the-file"
    assert make_options(with_file, {"token": "given"})[1].token == "given"
    assert make_options("tcp://host", {"token": ""})[1].token == ""


def test_a_given_option_is_stronger_than_that_of_the_url() -> None:
    url = "tcp://host?deadline_s=5&max_connections=3&copy_threads=4&known_blocks=9&verify=never&name=me"
    _, options = make_options(url, {"deadline_s": 7})
    assert (options.deadline_s, options.max_connections) == (7, 3)
    assert (options.copy_threads, options.known_blocks) == (4, 9)
    assert (options.verify, options.name) == ("never", "me")


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(make_options("tcp://host", {"token": "secret"}))
    with pytest.raises(ConfigError, match="token: the value must have at most 1024 bytes") as raised:
        make_options("tcp://host", {"token": "secret" * 200})
    assert "secret" not in str(raised.value)


def test_each_option_is_an_argument_in_a_docstring_and_the_page_lists_all_of_them() -> None:
    page = (PROJECT / "docs" / "opening-a-store.md").read_text()
    for setting in {*option_settings(), *url_settings()}:
        assert f"| `{setting.key}` |" in page
    for opened in (infinistore.open_store, aio.open_store, blocking.open_store):
        for setting in option_settings():
            assert f"\n    {setting.key}: " in inspect.cleandoc(opened.__doc__ or "")
        for scheme in SCHEMES:
            assert f"`{scheme}://" in (opened.__doc__ or "")
    assert set(StoreOptions.__annotations__) == {setting.key for setting in option_settings()}


@pytest.mark.parametrize("setting", option_settings(), ids=lambda setting: setting.key)
def test_a_default_is_what_the_descriptions_say(setting: Setting) -> None:
    value = getattr(Options(), setting.key)
    if setting.key == "name":
        assert setting.default_text == "HOST:PID"
    elif value is None:
        assert " " in setting.default_text or setting.default_text == "none"  # what takes its place
    elif value in ("", ()):
        assert setting.default_text in ("none", "the best one")
    else:
        expected = f"{value:g}" if isinstance(value, float) else str(value)
        assert setting.default_text.partition(" ")[0] == expected
