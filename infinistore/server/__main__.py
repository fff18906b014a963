"""`python -m infinistore.server` is the command `infinistore serve`: how a server of the original was started."""

import sys

from infinistore.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
