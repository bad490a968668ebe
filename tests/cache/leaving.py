"""Processes that end with pages on their way to a far tier, or in the middle of an engine.

Run as `python -m tests.cache.leaving WORLD`, where what the world needs is in the environment. Each
way to end is a child that ends as any Python process does; what it left is told as JSON: its exit
status and what it wrote to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch

from flowkv import KV, Engine
from tests.cache.toy import make_kv, published, simple
from tests.engine import nano
from tests.inside import ObjectTier

torch.set_num_threads(1)
PAGES = 6
WAYS = ("returns", "exits", "raises")
held: list[Any] = []  # as the globals of a program do


def cache(world: str, way: str) -> KV:
    """A cache over a place that outlives this process."""
    place = os.environ["PLACE"] + ("?prefix=" if world == "redis" else "/") + way
    if world == "s3":
        options = json.loads(os.environ["S3"])
        return make_kv(simple(), tiers=[ObjectTier(place, options=options)])
    return make_kv(simple(), tiers=[place])


def engine(way: str) -> None:
    """An engine in the middle of a request, and one that was never driven."""
    kv = nano.make_kv(pages=64, disk=f"{os.environ['PLACE']}/{way}:16MiB")
    model = nano.Nano()
    served = Engine(model, kv, max_rows=2)
    answer = served.submit(list(range(40)), max_new_tokens=400)
    next(iter(answer))
    held.extend((kv, served, answer, Engine(nano.Nano(), kv)))


def leave(world: str, way: str) -> None:
    if world == "engine":
        engine(way)
    else:
        held.append(kv := cache(world, way))
        published(kv, list(range(PAGES * 8)))
    if way == "exits":
        sys.exit(3)
    if way == "raises":
        raise ValueError("of the user's own")


def main(world: str) -> None:
    told: dict[str, tuple[int, str]] = {}
    for way in WAYS:
        with tempfile.TemporaryFile("w+") as stderr:
            child = os.fork()
            if child == 0:
                os.dup2(stderr.fileno(), 2)
                leave(world, way)
                return  # to the end of the interpreter
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            stderr.seek(0)
            told[way] = status, stderr.read()
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
