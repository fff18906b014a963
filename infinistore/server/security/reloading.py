"""What a server reads again without a restart, and the signal that asks for it."""

import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import trio

from infinistore.service_manager import ServiceManager

__all__ = ["Reload", "Reloads", "reload_on_signal"]

_log = logging.getLogger("infinistore.server")

Reload: TypeAlias = Callable[[], Awaitable[str]]
"""Reads files again, and logs what came of it. If a file cannot be used, what was read
before stays, and the problem is returned; else it is empty.
"""


class Reloads:
    """All that a server reads again, in the order in which it was added."""

    def __init__(self) -> None:
        self._all: list[Reload] = []

    def add(self, reload: Reload) -> None:
        """Let this be read again, too, from the next time on."""
        self._all.append(reload)

    @property
    def empty(self) -> bool:
        """Whether there is nothing."""
        return not self._all

    async def run(self) -> list[str]:
        """Read everything again, and return the problems. One that fails does not keep
        the others from it.
        """
        if not self._all:
            _log.info("there is nothing to read again")
        return [problem for reload in list(self._all) if (problem := await reload())]


async def reload_on_signal(
    reloads: Reloads,
    service_manager: ServiceManager | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Read everything again at each SIGHUP, until cancelled. `service_manager` is told.

    Also a server that has nothing to read takes the signal: it would end of it.
    """
    manager = service_manager or ServiceManager()
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            with manager.reloading():
                await reloads.run()
