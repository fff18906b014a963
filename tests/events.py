"""What servers in this process note for their audit logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infinistore.server.security import AUDIT_LOGGER

__all__ = ["heard_events"]


@contextmanager
def heard_events() -> Iterator[list[dict[str, Any]]]:
    """Hear events by a handler, as an application does: those so far are listed."""
    heard: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.__dict__["audit"])

    handler = Handler()
    AUDIT_LOGGER.addHandler(handler)
    try:
        yield heard
    finally:
        AUDIT_LOGGER.removeHandler(handler)
