"""Which KV heads a frame holds, what it is called for that, and how heads move between frames.

Under tensor parallelism each rank holds some of a layer's KV heads. A stripe is one contiguous run
per head (`core.layout`), each with everything its codec needs, so the stripes of heads [a, b) can
be made from those of any frames that cover them.

All ranks, and a model in one piece, name a page alike: by the chain key of the *whole* model. Below
that the name also says which heads: it is the chain key XOR-ed with a digest of the range, which a
listing can take back. All heads have the key itself, so that an ordinary cache and a single rank
share frames. What has no heads (states of recurrent layers) is named for one rank of one layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry
from flowkv.core.keys import KEY_BYTES, Shard
from flowkv.core.layout import CODECS, PageLayout, page_layout
from flowkv.tiers.base import FrameInfo

_TAG = b"flowkv.shard/1\0\0"


class Heads(NamedTuple):
    """A range of a layer's KV heads.

    Attributes:
        start: First one.
        stop: One past the last.
        total: Heads of the whole model; 0 for what has no heads: rank `start` of `stop` then.
    """

    start: int
    stop: int
    total: int


@lru_cache(maxsize=1 << 12)
def _mask(heads: Heads) -> int:
    if heads.stop - heads.start == (heads.total or 1) and not heads.start:
        return 0
    text = _TAG + b"".join(number.to_bytes(4, "little") for number in heads)
    return int.from_bytes(hashlib.sha256(text).digest(), "little")


def stored_key(key: bytes, heads: Heads) -> bytes:
    """What a page's heads are called below; of such a name, the page's key again."""
    if len(key) != KEY_BYTES:
        return key
    return (int.from_bytes(key, "little") ^ _mask(heads)).to_bytes(KEY_BYTES, "little")


class Form(NamedTuple):
    """What a layout fingerprint means to a rank.

    Attributes:
        group: Index of the layer group.
        codec: Index of the codec.
        mine: Heads of this rank.
        layout: Of this rank's pages, or of one layer of them (see `runtime.handover`).
    """

    group: int
    codec: int
    mine: Heads
    layout: PageLayout


class Division:
    """The heads of a model, as one rank sees them.

    Args:
        geometry: Of the whole model.
        shard: Which rank of how many this is. A head range, if one is given, must be what that rank
            holds of every group.

    Raises:
        ConfigError: The shard names other heads than the rank holds.
        GeometryError: There is no such rank, or heads cannot be divided evenly.
    """

    def __init__(self, geometry: Geometry, shard: Shard) -> None:
        self.geometry, self.shard = geometry, shard
        self.own = Heads(shard.rank, shard.world, 0)
        self._mine: list[Heads] = []
        self._forms: dict[bytes, list[Form]] = {}
        for number, group in enumerate(geometry.groups):
            held = group.heads(shard.rank, shard.world)
            if shard.head_stop and (shard.head_start, shard.head_stop) != (held.start, held.stop):
                raise ConfigError(
                    f"heads {shard.head_start} to {shard.head_stop} for rank {shard.rank}",
                    f"It holds {held.start} to {held.stop} of group {number}: leave the range out",
                )
            self._mine.append(Heads(held.start, held.stop, group.kv_heads))
            self._add(number)

    def _add(self, number: int) -> None:
        mine, layers = self._mine[number], len(self.geometry.groups[number].layers)
        for codec in range(len(CODECS)):
            for depth in sorted({1, layers}, reverse=True):
                layout = self._layout(number, mine, codec, depth)
                if layout is not None:
                    form = Form(number, codec, mine, layout)
                    self._forms.setdefault(layout.fingerprint(), []).append(form)

    def _layout(self, group: int, heads: Heads, codec: int, depth: int) -> PageLayout | None:
        """Layout of some heads of the first `depth` layers of a page: all of them, or one."""
        whole = self.geometry.groups[group]
        part = msgspec.structs.replace(
            whole, kv_heads=heads.stop - heads.start, layers=whole.layers[:depth]
        )
        try:
            return page_layout(part, self.geometry.page_size, CODECS[codec])
        except ConfigError:
            return None  # the codec needs larger pages or heads

    # ---- names

    def forms(self, layout: bytes) -> Sequence[Form]:
        """What pages of such a layout may be; none if it is no layout of this rank's pages."""
        return self._forms.get(layout, ())

    def covers(self, mine: Heads) -> list[list[Heads]]:
        """Ways to get some heads from frames of even layouts.

        First these heads themselves, then larger frames before smaller ones.
        """
        found = [[mine]]
        for each in range(mine.total, 0, -1):
            if mine.total % each == 0:
                parts = range(mine.start // each, -(-mine.stop // each))
                cover = [Heads(n * each, (n + 1) * each, mine.total) for n in parts]
                if cover != [mine]:
                    found.append(cover)
        return found

    def names(self, key: bytes) -> list[list[bytes]]:
        """Sets of frames each of which would do for a key; for what has no heads, one frame."""
        ways = [cover for mine in dict.fromkeys(self._mine) for cover in self.covers(mine)]
        return [[stored_key(key, heads) for heads in way] for way in (*ways, [self.own])]

    def every_name(self, key: bytes) -> list[bytes]:
        """Names of all frames that hold heads of a page, of any even layout."""
        found = [stored_key(key, self.own)]
        for total in {mine.total for mine in self._mine}:
            for cover in self.covers(Heads(0, total, total)):
                found += [stored_key(key, heads) for heads in cover]
        return list(dict.fromkeys(found))

    def heads_of(self, info: FrameInfo) -> Heads:
        """The heads that a frame holds by its own account; this rank's `own` if it has none."""
        heads = self._claimed(info)
        return heads if heads and self._depth(info, heads) else self.own

    def form_of(self, info: FrameInfo) -> Form | None:
        """What this rank makes of the page, or layer of one, that a frame holds heads of."""
        heads = self._claimed(info)
        depth = self._depth(info, heads) if heads else 0
        mine = self._mine[info.group] if depth else self.own
        layout = self._layout(info.group, mine, info.codec, depth) if depth else None
        return Form(info.group, info.codec, mine, layout) if layout else None

    def _claimed(self, info: FrameInfo) -> Heads | None:
        if info.group >= len(self._mine):
            return None
        total = self._mine[info.group].total
        heads = Heads(info.head_start, info.head_stop or total, total)
        return heads if heads.start < heads.stop <= total else None

    def _depth(self, info: FrameInfo, heads: Heads) -> int:
        """Layers of a frame of such heads; 0 if its layout is another."""
        for depth in sorted({1, len(self.geometry.groups[info.group].layers)}):
            layout = self._layout(info.group, heads, info.codec, depth)
            if layout is not None and layout.fingerprint() == info.layout:
                return depth
        return 0

    # ---- what frames say

    def mark(self, info: FrameInfo) -> tuple[Heads, FrameInfo]:
        """The heads of a page that this rank stores, and its description with them."""
        form = next((f for f in self.forms(info.layout) if f.group == info.group), None)
        if form is None or form.codec != info.codec:
            return self.own, info
        heads = form.mine
        if heads.stop - heads.start == heads.total:  # as a cache without ranks writes it
            return heads, info._replace(rank=0, world=1, head_start=0, head_stop=0)
        rank, world = self.shard.rank, self.shard.world
        return heads, info._replace(
            rank=rank, world=world, head_start=heads.start, head_stop=heads.stop
        )

    def joined(self, form: Form, infos: Sequence[FrameInfo]) -> FrameInfo:
        """What is said of this rank's page, made from such frames."""
        given = infos[0]._replace(
            layout=form.layout.fingerprint(),
            stripe_bytes=form.layout.stripe_stride_bytes,
            fidelity=max(info.fidelity for info in infos),
        )
        return self.mark(given)[1]

    # ---- bytes

    def part_layout(self, form: Form, heads: Heads) -> PageLayout:
        """The layout of other heads of the same pages, or layers of pages.

        Raises:
            ConfigError: Never: a codec that can hold this rank's heads can hold any.
        """
        layout = self._layout(form.group, heads, form.codec, form.layout.layers)
        if layout is None:
            raise ConfigError(f"{heads} of codec {form.codec}", "Report this as a bug")
        return layout

    def assemble(
        self, form: Form, parts: Iterable[tuple[Heads, memoryview]], target: memoryview
    ) -> None:
        """Puts the stripes of this rank's heads together.

        Args:
            form: Of this rank's page.
            parts: Heads and the same stripes of frames that cover them.
            target: Memory for these stripes; what pads them is blanked.
        """
        mine, layout = form.mine, form.layout
        sink = np.frombuffer(target, np.uint8).reshape(-1, layout.stripe_stride_bytes)
        sink[:, layout.stripe_bytes :] = 0
        for heads, memory in parts:
            source = np.frombuffer(memory, np.uint8).reshape(len(sink), -1)
            first, last = max(heads.start, mine.start), min(heads.stop, mine.stop)
            run = layout.run_bytes
            given = source[:, (first - heads.start) * run : (last - heads.start) * run]
            sink[:, (first - mine.start) * run : (last - mine.start) * run] = given
