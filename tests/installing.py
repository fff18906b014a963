"""A package that is installed for one test."""

from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["install"]


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    entries: Mapping[str, str],
    *,
    module: str = "",
    source: str = "",
) -> None:
    """Put a package with these entry points on the path, and its `module`, if it has
    one of its own, with this source.
    """
    if module:
        (folder / f"{module}.py").write_text(source)
    metadata = folder / "other_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    monkeypatch.syspath_prepend(str(folder))
