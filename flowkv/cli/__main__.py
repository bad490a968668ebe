"""`python -m flowkv.cli` is `flowkv`."""

import sys

from flowkv.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
