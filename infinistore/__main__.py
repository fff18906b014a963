"""`python -m infinistore` is the command `infinistore`."""

from infinistore.cli import main

if __name__ == "__main__":
    main()
