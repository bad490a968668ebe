"""Run the `flowkv` command as `python -m flowkv.cli`."""

import sys

from flowkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
