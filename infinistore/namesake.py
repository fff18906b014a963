"""Refuses to be imported where the original InfiniStore is installed in the same place.

Both packages are imported as `infinistore`. pip installs both into one folder, where
the last one silently overwrites files of the other. Uninstalling either then breaks the
remaining one.
"""

import os.path

__all__: list[str] = []

# The original has this module, and this package has none of that name.
if os.path.exists(os.path.join(os.path.dirname(__file__), "lib.py")):
    raise ImportError(
        "the original InfiniStore (`infinistore` on PyPI) is installed in the same place as this one "
        "(`infinistore-trio`), and each has overwritten files of the other. Keep one: "
        "pip uninstall -y infinistore infinistore-trio; then install the one that you want again"
    )
