"""The command `python -m infinistore.server`, which started a server of the original:
`infinistore serve`.
"""

import sys

from infinistore.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
