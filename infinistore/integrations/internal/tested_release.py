"""What an adapter says of an engine that lacks what the adapter imports."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

__all__ = ["tested_with"]


@contextmanager
def tested_with(engine: str, package: str, release: str) -> Iterator[None]:
    """Around imports from the package of an engine, of which this release was tested.

    Raises:
        ImportError: the package lacks something, or is missing; with a remedy.
    """
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        try:
            found = f"with {engine} {version(package)} ({error})"
        except PackageNotFoundError:
            found = f"without {engine}"
        raise type(error)(
            f"this adapter of InfiniStore does not work {found}; pip install '{package}=={release}' installs one that"
            " it was tested with",
            name=error.name,
        ) from error
