"""How the server's log looks: one line for each event, for a person on a terminal and as JSON for everything else.

The code logs an event in a few constant words, and what belongs to it as fields (`extra=`). What a client chose, such
as its name, cannot begin a new line or move a terminal's cursor. The traceback of a fault of ours is a field in JSON,
and follows the line on a terminal.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

__all__ = ["JsonFormatter", "TerminalFormatter", "set_up_logging"]

# What every record has; anything else came by `extra=`.
_NO_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, event, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TerminalFormatter(logging.Formatter):
    """Time (local), level, event, and the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback if there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = "".join(f"  {name}={_shown(value)}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower():7} {_shown(record.getMessage(), may_have_spaces=True)}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logging(level: str) -> None:
    """Log what has this level or more to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _NO_FIELDS}


def _shown(value: object, *, may_have_spaces: bool = False) -> str:
    text = str(value)
    plain = text.isprintable() and (may_have_spaces or (text and not set(text) & {" ", '"', "="}))
    return text if plain else json.dumps(text)
