"""What `check_tier` stores and asks for: frames and loads, at random, small enough to read."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from flowkv.core.errors import MissingDependencyError
from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.testing.tier_model import Frame
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import KINDS

try:
    from hypothesis import strategies as st
except ImportError:  # pragma: no cover
    raise MissingDependencyError("flowkv.testing", "testing", "pytest and hypothesis") from None

NAMES = st.integers(0, 11)


def key_of(name: int) -> bytes:
    """Key of the frame that the machine knows by a small number."""
    return hashlib.sha256(b"check_tier %d" % name).digest()


LAYOUTS = (b"\1" * 16, b"\2" * 16)


class Sketch(NamedTuple):
    """What a frame is made from; small, so that a failing example can be read."""

    kind: str
    codec: int
    lossier: int
    layout: bytes
    parent: int
    numbers: tuple[int, int, int, int]
    stripes: int
    stripe_bytes: int
    seed: int
    spoil: str = ""

    def frame(self) -> Frame:
        """Description and body: one odd stripe, or several of a granule."""
        step = self.stripe_bytes if self.stripes == 1 else GRANULE_BYTES
        group, tokens, world, heads = self.numbers
        info = FrameInfo(
            kind=self.kind,
            codec=self.codec,
            fidelity=min(self.codec + self.lossier, len(CODECS) - 1),
            layout=self.layout,
            parent=key_of(self.parent),
            namespace=bytes(32),
            group=group,
            tokens=tokens,
            stripe_bytes=step,
            tenant=key_of(group),
            rank=world - 1,
            world=world,
            head_stop=heads,
        )
        body = hashlib.shake_128(bytes([self.seed])).digest(step * self.stripes)
        return Frame(info._replace(**SPOILED[self.spoil]), body)


SPOILED: dict[str, dict[str, Any]] = {
    "": {},
    "kind": {"kind": "picture"},
    "parent": {"parent": b"short"},
    "rank": {"rank": 9, "world": 9},
    "stripes": {"stripe_bytes": 3 * GRANULE_BYTES + 1},
    "codec": {"codec": len(CODECS), "fidelity": len(CODECS)},
}
"""Descriptions that no frame can have; a store of one fails as "invalid"."""

SKETCHES = st.builds(
    Sketch,
    kind=st.sampled_from(KINDS),
    codec=st.integers(0, len(CODECS) - 1),
    lossier=st.integers(0, 2),
    layout=st.sampled_from(LAYOUTS),
    parent=NAMES,
    numbers=st.tuples(*(st.integers(low, 256) for low in (0, 0, 1, 0))),
    stripes=st.sampled_from((1, 1, 2, 3, 11)),
    stripe_bytes=st.integers(1, 3 * GRANULE_BYTES),
    seed=st.integers(0, 255),
    spoil=st.sampled_from(("",) * 15 + tuple(SPOILED)),
)


class Want(NamedTuple):
    """A load to make: an honest one asks for what the frame can give; `lie` says if not."""

    name: int
    layout: bytes
    fidelity: int
    lie: str
    first: int
    stripes: int
    target: str


WANTS = st.builds(
    Want,
    name=NAMES,
    layout=st.sampled_from(LAYOUTS),
    fidelity=st.integers(0, len(CODECS) - 1),
    lie=st.sampled_from(("",) * 5 + ("layout", "fidelity", "anything")),
    first=st.sampled_from((0, 0, 0, 1, 2, 10, 11, -1)),
    stripes=st.sampled_from((0, 0, 1, 1, 2, 11, -1)),
    target=st.sampled_from(("spare",) * 8 + ("exact",) * 4 + ("short", "readonly")),
)
