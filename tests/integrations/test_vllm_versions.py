"""A vLLM that lacks what the connector needs is told by its version, with a remedy."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from infinistore.integrations import vllm

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("installed", "says"), [("0.28.0", r"with vLLM 0\.28\.0 \(.*vllm"), (None, "without vLLM")], ids=["old", "none"]
)
def test_a_vllm_that_the_connector_cannot_import_is_one_error_with_a_remedy(
    installed: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(vllm, "version", version)
    for name in [name for name in sys.modules if name.startswith("infinistore.integrations.vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm.distributed", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=says + r".*; pip install 'vllm==0\.32\.\*'"):
        _ = vllm.InfiniStoreConnector


def test_the_page_and_the_tests_are_about_the_same_vllm() -> None:
    for page in ("docs/vllm.md", "requirements/vllm.txt"):
        assert f"vLLM {vllm.TESTED_VLLM}." in (PROJECT / page).read_text()
