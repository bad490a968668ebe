"""`flowkv sim`: what is simulated, never measured."""

from __future__ import annotations

from typing import Any

from flowkv.cli import character, hierarchy, replays
from flowkv.cli.arguments import adder


def add_verbs(verbs: Any) -> None:
    """Adds the verb, with verbs of its own, to what `add_subparsers` gave."""
    sim = verbs.add_parser(
        "sim",
        help="simulate caches, on traces and on a memory hierarchy",
        description="Simulates caches; nothing here is a measurement.",
        epilog="flowkv sim VERB --help tells more.",
    )
    verb = adder(sim.add_subparsers(title="verbs", metavar="VERB", required=True))
    replays.add_verbs(verb)
    character.add_verbs(verb)
    hierarchy.add_verbs(verb)
