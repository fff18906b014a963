"""An engine that lacks what its adapter needs is told by its version, with a remedy."""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from infinistore.integrations import vllm
from infinistore.integrations.internal import tested_release

PROJECT = Path(__file__).resolve().parents[2]
ADAPTERS = {
    "vllm": ("vLLM", "vllm", "0.32.*", "vllm"),
    "lmcache": ("LMCache", "lmcache", "0.5.6", "lmcache.no-deps"),
    "lmcache_l2": ("LMCache", "lmcache", "0.5.6", "lmcache.no-deps"),
    "sglang": ("SGLang", "sglang", "0.5.23", "sglang.no-deps"),
}
"""The engine of each, its package and release, and the file with what tests install."""


def import_again(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an adapter's imports; other tests keep the module that they have."""
    if adapter == "vllm":
        monkeypatch.delitem(sys.modules, "infinistore.integrations.vllm.connector", raising=False)
        _ = vllm.InfiniStoreConnector
        return
    spec = importlib.util.find_spec(f"infinistore.integrations.{adapter}")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("installed", ["0.2.0", None])
def test_an_engine_that_an_adapter_cannot_import_is_one_error_with_a_remedy(
    adapter: str, installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="adapters import it first: make test")
    engine, package, release, _ = ADAPTERS[adapter]

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(tested_release, "version", version)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    says = f"without {engine}" if installed is None else rf"with {engine} 0\.2\.0 \(.*{package}"
    with pytest.raises(ImportError, match=says + rf".*; pip install '{package}=={re.escape(release)}' installs one"):
        import_again(adapter, monkeypatch)


def test_what_an_adapter_itself_lacks_is_told_as_it_is() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'other_package'"),
        tested_release.tested_with("vLLM", "vllm", "1.0"),
    ):
        importlib.import_module("other_package")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_pages_and_tests_are_about_the_same_release(adapter: str) -> None:
    engine, package, release, requirements = ADAPTERS[adapter]
    release = release.removesuffix("*")
    assert f"{engine} {release}" in (PROJECT / "docs" / f"{package}.md").read_text()
    wanted = (PROJECT / "requirements" / f"{requirements}.txt").read_text()
    assert f"{package}=={release}" in wanted or f"{engine} {release}" in wanted
