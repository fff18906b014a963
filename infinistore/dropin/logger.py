"""`Logger`: the original's logger, on top of `logging`.

Messages go to the logger `infinistore`. The program configures their destination
(`logging.basicConfig`); until then, Python prints warnings and errors to stderr.
"""

import logging

from infinistore.errors import ConfigError

__all__ = ["LOG_LEVELS", "Logger"]

LOG_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_log = logging.getLogger("infinistore")


class Logger:
    """Logs any object as text."""

    @staticmethod
    def info(msg: object) -> None:
        """Log at level INFO."""
        _log.info("%s", msg)

    @staticmethod
    def debug(msg: object) -> None:
        """Log at level DEBUG."""
        _log.debug("%s", msg)

    @staticmethod
    def error(msg: object) -> None:
        """Log at level ERROR."""
        _log.error("%s", msg)

    @staticmethod
    def warn(msg: object) -> None:
        """Log at level WARNING."""
        _log.warning("%s", msg)

    @staticmethod
    def set_log_level(level: str) -> None:
        """Set the lowest level to log: "error", "warning", "info" or "debug".

        Raises:
            ConfigError: an unknown level.
        """
        if level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
        _log.setLevel(LOG_LEVELS[level])
