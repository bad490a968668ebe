"""`python -m bench`: measures what is promised."""

from __future__ import annotations

from collections.abc import Sequence

import bench.blend
import bench.cold
import bench.edits
import bench.embedding
import bench.engines.command
import bench.longtasks
import bench.memo
import bench.mlperf
import bench.overflow
import bench.policy.command
import bench.policy.restarts
import bench.real
import bench.restore.command
import bench.serve.command
import bench.sparsify
import bench.states
import bench.weights
from flowkv.cli.arguments import Parser, adder
from flowkv.cli.command import run


def parser() -> Parser:
    """The parser of the command's arguments."""
    made = Parser(
        prog="python -m bench",
        description="Measures what is promised.",
        epilog="python -m bench VERB --help tells more.",
    )
    verb = adder(made.add_subparsers(title="verbs", metavar="VERB", required=True))
    bench.real.add_verbs(verb)
    bench.embedding.add_verbs(verb)
    bench.weights.add_verbs(verb)
    bench.overflow.add_verbs(verb)
    bench.policy.restarts.add_verbs(verb)
    bench.memo.add_verbs(verb)
    bench.mlperf.add_verbs(verb)
    bench.blend.add_verbs(verb)
    bench.edits.add_verbs(verb)
    bench.cold.add_verbs(verb)
    bench.longtasks.add_verbs(verb)
    bench.sparsify.add_verbs(verb)
    bench.states.add_verbs(verb)
    for measured in (bench.engines, bench.policy, bench.restore, bench.serve):
        measured.command.add_verbs(verb)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m bench`; returns its exit status."""
    return run(parser(), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
