"""The format of the server's log: one line per event, as text or as JSON.

By default, a terminal gets text, everything else JSON. An event is a few constant
words; its details are fields (`extra=`). Values chosen by a client, such as its name,
cannot start a new line or move a terminal's cursor. The traceback of an internal error
is a field in JSON, and follows the line of text.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# What every record has; anything else came by `extra=`.
_NO_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, event, and its fields."""

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
        """Return the line, followed by a traceback if there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        fields = "".join(f"  {name}={_shown(value)}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower():7} {_shown(record.getMessage(), may_have_spaces=True)}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class NoteFormatter(logging.Formatter):
    """A warning as commands print it, which have no log: a note with its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f"; {name}: {value}" for name, value in _fields(record).items())
        return f"infinistore: {record.getMessage()}{fields}"


def set_up_logging(level: str, log_format: str, *, shard: int | None = None) -> None:
    """Log to standard error from a level on, as auto, text or json. Each line of a
    shard names it.
    """
    handler = logging.StreamHandler(sys.stderr)
    if shard is not None:
        handler.addFilter(_OfShard(shard))
    as_text = sys.stderr.isatty() if log_format == "auto" else log_format == "text"
    handler.setFormatter(TerminalFormatter() if as_text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _OfShard(logging.Filter):
    """Gives each record the number of a shard."""

    def __init__(self, shard: int) -> None:
        super().__init__()
        self._shard = shard

    def filter(self, record: logging.LogRecord) -> bool:
        record.shard = self._shard
        return True


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _NO_FIELDS}


def _shown(value: object, *, may_have_spaces: bool = False) -> str:
    text = str(value)
    plain = text.isprintable() and (may_have_spaces or (text and not set(text) & {" ", '"', "="}))
    return text if plain else json.dumps(text)
