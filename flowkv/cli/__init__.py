"""The `flowkv` command, with a verb for each task.

Results go to standard output, everything else to standard error; `--json` prints exactly one JSON
value. Exit status: 0 done, 1 a negative result (tokens differ, frames are damaged, a target is
missed) or an unexpected error, 2 wrong use or input, 130 interrupted.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `flowkv`, and return its exit status.

    Args:
        arguments: Words behind `flowkv`; default those of the process.
    """
    try:
        from flowkv.cli.command import make_parser, run

        return run(make_parser(), arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
