"""A token is the same from every source, whatever an editor or a mounted secret has
written around it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.client.options import make_options
from infinistore.cluster_io.probing import credentials
from infinistore.errors import ConfigError
from infinistore.secret_files import read_token

Source = Callable[[str, Path], str]


def written(text: str, folder: Path) -> Path:
    file = folder / "token"
    file.write_text(text, encoding="utf-8", newline="")
    return file


def of_variable(text: str, _: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFINISTORE_TOKEN", text)
        assert credentials({})[0] == make_options("infinistore+static://host", {})[1].token
        return make_options("tcp://host", {})[1].token


SOURCES: dict[str, Source] = {
    "INFINISTORE_TOKEN": of_variable,
    "token": lambda text, _: make_options("tcp://host", {"token": text})[1].token,
    "token_file": lambda text, folder: make_options(f"tcp://host?token_file={written(text, folder)}", {})[1].token,
    "--token-file": lambda text, folder: read_token(written(text, folder), setting="--token-file"),
}
WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
AROUND = st.text(" \t", max_size=3)
ENDS = st.sampled_from(["", "\n", "\r\n"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@given(token=WORDS, mark=st.sampled_from(["", "\ufeff"]), around=st.tuples(AROUND, AROUND), end=ENDS)
def test_what_stands_around_a_token_is_no_part_of_it(
    folder: Path, token: str, mark: str, around: tuple[str, str], end: str
) -> None:
    text = mark + around[0] + token + around[1] + end
    assert {name: source(text, folder) for name, source in SOURCES.items()} == dict.fromkeys(SOURCES, token)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("inner", [" ", "\t", "\u00a0", "\u200b", "\ufeff"])
def test_white_space_in_a_token_is_refused_with_the_name_of_its_source(name: str, inner: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="write one word") as raised:
        SOURCES[name](f"one{inner}two", folder)
    assert str(raised.value).startswith(f"{name}: ")
    assert "one" not in str(raised.value).removesuffix("write one word")


def test_a_password_may_have_spaces(folder: Path) -> None:
    assert read_token(written(" one two \n", folder), what="password") == "one two"
