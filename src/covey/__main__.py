"""`python -m covey` is `covey`, for machines where the command is not on the PATH."""

import sys

from covey.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
