"""A process that ends with pages on their way to a far tier, or in the middle of an engine.

Run as `python -m tests.cache.leaving WORLD WAY`, where what the world needs is in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from flowkv import KV, Engine
from tests.cache.toy import make_kv, published, simple
from tests.engine import nano
from tests.inside import ObjectTier

torch.set_num_threads(1)
PAGES = 6
held: list[Any] = []  # as the globals of a program do


def cache(world: str) -> KV:
    """A cache over a place that outlives this process."""
    place = os.environ["PLACE"]
    if world == "s3":
        options = json.loads(os.environ["S3"])
        return make_kv(simple(), tiers=[ObjectTier(place, options=options)])
    return make_kv(simple(), tiers=[place])


def engine() -> None:
    """An engine in the middle of a request, and one that was never driven."""
    kv = nano.make_kv(pages=64, disk=f"{os.environ['PLACE']}:16MiB")
    model = nano.Nano()
    served = Engine(model, kv, max_rows=2)
    answer = served.submit(list(range(40)), max_new_tokens=400)
    next(iter(answer))
    held.extend((kv, served, answer, Engine(nano.Nano(), kv)))


def main(world: str, way: str) -> None:
    if world == "engine":
        engine()
    else:
        held.append(kv := cache(world))
        published(kv, list(range(PAGES * 8)))
    if way == "exits":
        sys.exit(3)
    if way == "raises":
        raise ValueError("of the user's own")


if __name__ == "__main__":
    main(*sys.argv[1:])
