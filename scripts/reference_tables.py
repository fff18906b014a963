"""Generate the tables of settings, metrics and exit codes in docs/ from the code."""

from pathlib import Path

from marks import between_marks

__all__ = ["reference_tables"]


def reference_tables(project: Path) -> dict[str, str]:
    """Return the pages with their tables renewed, by path from the top folder.

    Raises:
        ValueError: a page lacks the marks of its table.
    """
    from infinistore.cli.failures import EXIT_CODES
    from infinistore.config import server_settings
    from infinistore.server.management import metrics
    from infinistore.settings import markdown_table

    codes = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    tables = {
        ("docs/configuration.md", "settings"): markdown_table(server_settings()),
        ("docs/reference/metrics.md", "metrics"): metrics.markdown_table(),
        ("docs/command-line.md", "exit codes"): "\n".join(["| Code | When |", "|---|---|", *codes]),
    }
    return {
        path: between_marks((project / path).read_text(), name, table, path) for (path, name), table in tables.items()
    }
