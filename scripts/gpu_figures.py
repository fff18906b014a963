"""The tables of what ran on a machine with a GPU, from the report that was kept."""

import sys
from pathlib import Path

from marks import between_marks

__all__ = ["PAGE", "REPORT", "gpu_figures"]

PAGE = "docs/reference/performance.md"
REPORT = "bench/gpu_report.json"
"""A copy of build/gpu/report.json; it is not there before the first run."""


def gpu_figures(project: Path) -> dict[str, str]:
    """Return the page with the tables."""
    sys.path.append(str(project / "bench"))
    from gpu_report import Report, markdown

    tests = [str(file.relative_to(project)) for file in sorted((project / "tests" / "gpu").glob("test_*.py"))]
    text = markdown(Report(project / REPORT).parts, tests)
    return {PAGE: between_marks((project / PAGE).read_text(), "gpu figures", text, PAGE)}
