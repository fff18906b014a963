"""The disks of an embedded store, and the thread that runs them.

The tier is used under the lock of the store, as the core is. The thread starts jobs,
takes their results, and wakes the calls that wait for them. What it promises, and what
it leaves to others, is as in a server (`infinistore/server/disk.py`).
"""

import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from random import Random, SystemRandom
from typing import Any

from infinistore.client.memory.views import Returns
from infinistore.client.options import Options
from infinistore.core.store import StoreCore
from infinistore.disk.guarded_tier import GuardedTier
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Wait
from infinistore.disk_io.store_disks import open_disks
from infinistore.errors import StoreUnavailable
from infinistore.host import start_thread
from infinistore.statistics import DiskTierStatistics

_LAST_WRITES_S = 10.0
"""How long a store that is closed writes what waits for its disks."""
_THREADS_END_S = 5.0


class EmbeddedDisks:
    """The disks of one store, whose core has a journal. Blocking to open and to close.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
        StoreUnavailable: this process gets no more threads.
    """

    def __init__(
        self,
        options: Options,
        core: StoreCore,
        returns: Returns[Any],
        clock: Callable[[], float],
        random: Random | None = None,
    ) -> None:
        random = random or SystemRandom()
        opened = open_disks(options.disks, random)
        settings = TierSettings(admission=options.disk_admission, wait_s=options.disk_wait_s)
        tier = DiskTier(core, clock=clock, settings=settings, random=random)
        self.tier = GuardedTier(tier)
        """To be used under the lock of the store."""
        self._opened = opened
        self._runner = opened.runner
        self._returns = returns
        self._clock = clock
        self._ending = False
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for volume in opened.volumes:
            tier.add(volume)
        self.tier.when_there_is_work(self._wake)
        self._thread = threading.Thread(target=self._run, name="infinistore-disks", daemon=True)
        try:
            start_thread(self._thread)
        except StoreUnavailable:
            self._runner.close(timeout_s=_THREADS_END_S)
            os.close(self._wake_fd)
            raise

    def waiting(self, wait: Wait) -> "Future[None]":
        """Return what is done when a wait is settled. Under the lock."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # whoever waits may go, and the result come all the same
        wait.when_settled(lambda: done.set_result(None))
        return done

    def statistics(self) -> DiskTierStatistics:
        """Return the figures of the tier and its disks. Under the lock."""
        return self._opened.statistics(self.tier)

    def close(self) -> None:
        """Write what waits for the disks, end all waiting, and unlock the disks.

        Nothing reads or writes the pool afterwards, unless a disk hangs: that memory
        stays mapped.
        """
        with self._returns.lock:
            finished = self.waiting(self.tier.close(self._clock() + _LAST_WRITES_S))
        finished.result()
        with self._returns.lock:
            self._ending = True
            self._wake()
        self._thread.join()
        self._runner.close(timeout_s=_THREADS_END_S)
        os.close(self._wake_fd)

    def let_go(self) -> None:
        """In a forked child, which lacks the threads: close the descriptor."""
        os.close(self._wake_fd)

    def _wake(self) -> None:
        """Have the thread look at the tier. Under the lock."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this thread
            with self._returns.lock:
                self.tier.fail(error)
        finally:
            with self._returns.lock:
                self._ending = True
                self.tier.stop()

    def _work(self) -> None:
        poll = select.poll()
        poll.register(self._runner.fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        tier, runner = self.tier, self._runner
        while not self._ending:
            results = runner.take()
            for result in results:  # one at a time: each may take a millisecond, and calls wait for the lock
                with self._returns.lock:
                    tier.done([result])
            with self._returns.lock:
                self._asleep = True
                jobs = tier.jobs()
                deadline = tier.next_deadline()
            self._returns.flush()
            runner.submit(jobs)
            timeout_ms = None if deadline is None else max(0.0, deadline - self._clock()) * 1000
            if any(fd == self._wake_fd for fd, _ in poll.poll(timeout_ms)):
                os.eventfd_read(self._wake_fd)
