"""Run the command line as ``python -m contaccum``."""

import sys

from contaccum.cli import main

if __name__ == "__main__":
    sys.exit(main())
