"""Run a command on a machine that is disturbed, to see that it does not mind.

    python -m tests.disturbed --busy 16 -- make test
    python -m tests.disturbed --stop 3 --seed 7 -- make test WORKERS=8

`--busy` keeps so many processes in a loop beside it. `--stop` stops one of the
processes that the command has started (SIGSTOP), chosen at random, for so many seconds,
again and again. All ends with the command, whose exit code is returned. `make test`
takes TEST_ORDER=7, too, which runs the tests in another order.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

from tests.limits import descendants, fields_of

LOOP = "import os\nwhile os.getppid() == {parent}: sum(range(100_000))"


def terminal_of(pid: int) -> int:
    """Return the number of the terminal that a process is at; 0 without one."""
    with suppress(OSError):  # it has just ended
        return fields_of(pid)[3]
    return 0


def stop_now_and_then(pid: int, for_s: float, chance: random.Random, ended: threading.Event) -> None:
    """Stop one of the descendants at a time until the end."""
    ours = terminal_of(os.getpid())
    while not ended.wait(chance.uniform(0, for_s)):
        # One at a terminal of its own is stopped by its test, as long as that says.
        if not (found := [one for one in descendants(pid) if terminal_of(one) in (0, ours)]):
            continue
        victim = chance.choice(found)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP)
            ended.wait(for_s)
            os.kill(victim, signal.SIGCONT)


def main() -> int:
    """Return the exit code of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes in a loop beside it")
    parser.add_argument("--stop", type=float, default=0, metavar="SECONDS", help="for how long a process is stopped")
    parser.add_argument("--seed", type=int, default=1, help="chooses which, and when")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    began = time.monotonic()  # real time: it is told at the end
    with ExitStack() as stack:
        for _ in range(options.busy):
            loop = subprocess.Popen([sys.executable, "-c", LOOP.format(parent=os.getpid())])
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        running = stack.enter_context(subprocess.Popen(options.command))
        if options.stop:
            ended = threading.Event()
            chance = random.Random(options.seed)
            stopper = threading.Thread(target=stop_now_and_then, args=(running.pid, options.stop, chance, ended))
            stopper.start()
            stack.callback(stopper.join)
            stack.callback(ended.set)
        with suppress(KeyboardInterrupt):
            running.wait()
        code = running.wait()
    print(f"ended with {code} after {time.monotonic() - began:.0f} s")  # real time: it is told
    return code


if __name__ == "__main__":
    sys.exit(main())
