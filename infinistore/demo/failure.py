"""Expected failures, and how to extract them from the groups of Trio's nurseries."""

from infinistore.errors import InfiniStoreException

__all__ = ["DemoError", "expected_error"]


class DemoError(Exception):
    """The demonstration cannot continue, or a byte was wrong. The message is
    one line.
    """


def expected_error(group: BaseExceptionGroup[BaseException]) -> DemoError | InfiniStoreException | None:
    """Return the first expected error in `group`, to be reported in one line.

    None if the group contains another error, which is a bug.
    """
    expected, unexpected = group.split((DemoError, InfiniStoreException))
    if expected is None or unexpected is not None:
        return None
    error = _first(expected)
    assert isinstance(error, DemoError | InfiniStoreException)
    return error


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
