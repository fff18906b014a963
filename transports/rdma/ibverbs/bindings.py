"""pyverbs, loaded when it is needed.

Two releases are in use, 44 (Debian 12) and 59. They differ in where the enumerations
are, and in whether a completion channel tells its descriptor. `load_pyverbs` hides the
first difference, and `VerbsDevice` the second.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import attrs

from infinistore.transports.rdma.verbs import NoRdma

__all__ = ["Pyverbs", "load_pyverbs"]

_REMEDY = (
    "install pyverbs for this Python (Debian, for the system's Python: apt-get install python3-pyverbs, and link"
    " /usr/lib/python3/dist-packages/pyverbs into the virtual environment's site-packages)"
)
_loading = threading.Lock()


def _after_fork_in_child() -> None:
    # It may have been held by a thread that the child does not have.
    global _loading  # noqa: PLW0603
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@attrs.frozen
class Pyverbs:
    """The parts of pyverbs that are used, wherever this release has them."""

    enums: Any
    error: type[Exception]
    device: Any
    pd: Any
    cq: Any
    qp: Any
    mr: Any
    wr: Any
    addr: Any


def load_pyverbs(load: Callable[[str], Any] = import_module) -> Pyverbs:
    """Import pyverbs.

    Raises:
        NoRdma: it is not installed, or does not fit this Python or this machine.
    """
    with _loading, _without_log_settings():
        try:
            load("pyverbs")
            parts = [load(f"pyverbs.{name}") for name in ("device", "pd", "cq", "qp", "mr", "wr", "addr")]
            error = load("pyverbs.pyverbs_error").PyverbsError
            try:
                enums = load("pyverbs.enums")
            except ImportError:  # from some release after 44 on
                enums = load("pyverbs.libibverbs_enums")
        except ImportError as problem:
            raise NoRdma(f"pyverbs cannot be imported ({problem})", _REMEDY) from None
    return Pyverbs(enums, error, *parts)


@contextmanager
def _without_log_settings() -> Iterator[None]:
    """Take back what importing pyverbs does to the root logger: it calls
    `logging.basicConfig`.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
