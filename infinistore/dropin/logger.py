"""`Logger`: the original's way to log, on top of `logging`.

Messages go to the logger `infinistore`. As with every library, where they end up is for the program to say
(`logging.basicConfig`); until it does, Python shows warnings and errors, on stderr.
"""

import logging

from infinistore.errors import ConfigError

__all__ = ["LOG_LEVELS", "Logger"]

LOG_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_log = logging.getLogger("infinistore")


class Logger:
    """Logs anything that can be turned into text."""

    @staticmethod
    def info(msg: object) -> None:
        """Log what somebody may want to know."""
        _log.info("%s", msg)

    @staticmethod
    def debug(msg: object) -> None:
        """Log what helps to find a fault."""
        _log.debug("%s", msg)

    @staticmethod
    def error(msg: object) -> None:
        """Log what went wrong."""
        _log.error("%s", msg)

    @staticmethod
    def warn(msg: object) -> None:
        """Log what may go wrong."""
        _log.warning("%s", msg)

    @staticmethod
    def set_log_level(level: str) -> None:
        """Log this and what is worse: "error", "warning", "info" or "debug".

        Raises:
            ConfigError: another word.
        """
        if level not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
        _log.setLevel(LOG_LEVELS[level])
