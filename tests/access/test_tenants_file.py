"""A tenants file that cannot be read: what is said names a remedy."""

from pathlib import Path

import pytest

from infinistore.errors import ConfigError
from infinistore.secret_files import read_text


def test_a_file_that_this_user_may_not_read_says_whom_it_should_belong_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who may read everything, runs tests, too
    with pytest.raises(ConfigError, match=r"Permission denied; let the user of the server read it, .*chown USER FILE"):
        read_text(tmp_path / "tenants.yaml")


def test_a_file_that_is_missing_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory; `infinistore tenant add ID` makes one"):
        read_text(tmp_path / "tenants.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory; give a file of text"):
        read_text(tmp_path)
