"""Entry points of a package that is installed for one test."""

from pathlib import Path

import pytest

__all__ = ["install_transports"]


def install_transports(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Put the metadata of a package with these transports on the path."""
    metadata = folder / "package_of_transports-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: package-of-transports\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[infinistore.transports]\n{lines}")
    monkeypatch.syspath_prepend(str(folder))
