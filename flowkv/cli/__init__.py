"""The `flowkv` command, with a verb for each task.

Results go to standard output, everything else to standard error; `--json` prints exactly one JSON
value. Exit status: 0 done, 1 a negative result (tokens differ, frames are damaged, a target is
missed) or an unexpected error, 2 wrong use or input, 130 interrupted.
"""

from flowkv.cli.command import main

__all__ = ["main"]
