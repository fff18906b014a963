"""What all tests share: how Hypothesis runs, and that Ctrl-C reaches the programs that they start.

A failing example prints the blob that replays it (`@reproduce_failure`). Examples have no deadline: on a shared machine
the clock says nothing about the code. They are derived from the test, so that one commit has one verdict, wherever it
is tested. To look for what they miss, HYPOTHESIS_PROFILE chooses: `explore` goes another way each run, and `thorough`
does so for longer.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("explore"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell's job in the background ignores it, and so would every program that is started here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
