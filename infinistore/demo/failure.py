"""What can be expected to go wrong, and how it comes out of Trio's nurseries, which wrap what their tasks raise."""

from infinistore.errors import InfiniStoreException

__all__ = ["DemoError", "expected_error"]


class DemoError(Exception):
    """The demonstration cannot go on, or a byte was wrong. The message is one line for the reader."""


def expected_error(group: BaseExceptionGroup[BaseException]) -> DemoError | InfiniStoreException:
    """Return the first error in `group`, to be raised in its place and told to the reader in one line.

    If there is any other kind of error in it, that is a mistake in the program: the group itself is raised.
    """
    expected, unexpected = group.split((DemoError, InfiniStoreException))
    if expected is None or unexpected is not None:
        raise group
    error: BaseException = expected
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, DemoError | InfiniStoreException)
    return error
