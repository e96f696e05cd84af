"""`python -m surefoot` is the command line."""

import sys

from surefoot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
