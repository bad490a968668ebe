"""Frames to play with, and the few calls that every test of a tier makes."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence

from flowkv import Tier
from flowkv.tiers import Completion, FrameInfo, Load, Outcome, Store

LAYOUT = bytes(range(16))
OTHERS: list[tuple[str, object]] = [
    *(("kind", "state"), ("codec", 1), ("fidelity", 2), ("layout", bytes(16))),
    *(("parent", bytes(32)), ("namespace", bytes(32)), ("tenant", bytes(32)), ("group", 2)),
    *(("tokens", 63), ("rank", 2), ("world", 5), ("head_start", 1), ("head_stop", 3)),
]
"""Another value for each field of `info_of`."""


def key_of(name: object) -> bytes:
    return hashlib.sha256(f"frame {name}".encode()).digest()


def body_of(name: object, size: int = 8192) -> bytes:
    return random.Random(f"body {name}").randbytes(size)


def info_of(size: int, **changes: object) -> FrameInfo:
    info = FrameInfo(
        kind="page",
        codec=0,
        fidelity=0,
        layout=LAYOUT,
        parent=key_of("parent"),
        namespace=key_of("namespace"),
        group=1,
        tokens=64,
        stripe_bytes=size,
        tenant=key_of("tenant"),
        rank=1,
        world=4,
        head_start=2,
        head_stop=4,
    )
    return info._replace(**changes)  # type: ignore[arg-type]


def answers(tier: Tier, job: int, count: int, within_s: float = 60.0) -> list[Completion]:
    found: list[Completion] = []
    end = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} items were answered"
        found += tier.poll(0.05)
    assert {answer.job for answer in found} == {job}
    assert sorted(answer.item for answer in found) == list(range(count))
    return sorted(found, key=lambda answer: answer.item)


def put(
    tier: Tier, names: Sequence[object], size: int = 8192, **changes: object
) -> list[Completion]:
    """Stores the frames of these names, each one stripe."""
    items = [
        Store(key_of(name), info_of(size, **changes), memoryview(body_of(name, size)))
        for name in names
    ]
    return answers(tier, tier.submit_store(items), len(items))


def get(
    tier: Tier, names: Sequence[object], size: int = 8192, fidelity: int = 0
) -> list[Completion]:
    """Loads frames; a hit must have the right bytes."""
    targets = [bytearray(size) for _ in names]
    items = [
        Load(key_of(name), memoryview(target), LAYOUT, fidelity)
        for name, target in zip(names, targets, strict=True)
    ]
    done = answers(tier, tier.submit_load(items), len(items))
    for name, target, answer in zip(names, targets, done, strict=True):
        if answer.outcome is Outcome.HIT:
            assert target == body_of(name, size), "WRONG BYTES"
    return done


def stored(tier: Tier, names: Sequence[object], size: int = 8192, **changes: object) -> None:
    """Stores frames, all of which must succeed."""
    done = put(tier, names, size, **changes)
    assert [answer.outcome for answer in done] == [Outcome.STORED] * len(names), done


def leave(tier: Tier, names: Sequence[object], size: int = 8192) -> None:
    """Stores frames, and closes the tier over them."""
    stored(tier, names, size)
    tier.close()


def check_parts(tier: Tier, step: int, stripes: int, parts: Sequence[tuple[int, int]]) -> None:
    """Store one frame of many stripes, and load ranges of them; 0 stripes are all that follow."""
    body = random.Random("large").randbytes(step * stripes)
    wish = Store(key_of("large"), info_of(step), memoryview(body))
    assert answers(tier, tier.submit_store([wish]), 1)[0].outcome is Outcome.STORED
    for first, count in parts:
        target = bytearray(step * (count or stripes - first))
        load = Load(wish.key, memoryview(target), LAYOUT, 0, first, count)
        done = answers(tier, tier.submit_load([load]), 1)[0]
        assert done.outcome is Outcome.HIT and done.n_bytes == len(target)
        assert target == body[first * step :][: len(target)], "WRONG BYTES"


def outcomes(done: Sequence[Completion]) -> list[tuple[str, str]]:
    return [(answer.outcome.value, answer.reason) for answer in done]


def hits(tier: Tier, names: Sequence[object], size: int = 8192) -> int:
    return sum(answer.outcome is Outcome.HIT for answer in get(tier, names, size))
