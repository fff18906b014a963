"""What all tests share: how Hypothesis runs.

A failing example prints the blob that replays it (`@reproduce_failure`). Examples have no deadline: on a shared machine
the clock says nothing about the code. HYPOTHESIS_PROFILE chooses: `default` explores, another way each run; `ci` (taken
where CI is set) derives its examples from the test, so that one commit has one verdict; `thorough` explores longer.
"""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))
