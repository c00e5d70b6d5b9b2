"""`python -m jaxpaged` is the `jaxpaged` command."""

import sys

from jaxpaged.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
