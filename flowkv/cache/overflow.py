"""Sequences longer than their device: attention reads pages below it through two staging buffers.

Attention over resident pages and over staged ones gives partials that merge exactly
(`kernels.merge`). All full pages are needed once a step and layer, in the same order: a cyclic
scan. Keeping any fixed set of pages on the device saves its share of the loads, keeping the most
recently used set saves nothing. So each page stays where it is, on the device or below.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from flowkv import kernels
from flowkv.cache.index import UNKNOWN, Block
from flowkv.cache.mover import TransferRequest, files, rest
from flowkv.cache.pinned import Copies, CudaMark
from flowkv.cache.sequence import READY, Guard, Sequence, Tables
from flowkv.cache.store import PageStore
from flowkv.compiled import compiling
from flowkv.core.errors import ConfigError, StoreError
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES, GRANULE_MASK, PageLayout, page_layout
from flowkv.core.memory import own_memory
from flowkv.kernels.operands import GPUS, Pages, Ragged, sent
from flowkv.tiers.base import Load, Outcome, TierAnswer

LEAST_BYTES, MOST_BYTES, _SHARE = 1 << 20, 1 << 23, 8
"""Bytes of a stage: at least, at most, and the divisor of the pool in between."""
_KINDS = frozenset(("full", "latent"))
"""Layers that attend to the whole sequence; others drop the pages behind their window."""
_SPARE_PAGES = 64
"""Room to leave for encoded copies of pages at the end of a step, in pages."""
_PAUSE_S = 0.01


class Tile(NamedTuple):
    """Pages that pass through a stage together, one layer after the other.

    Attributes:
        batch: The rows of the step over the stage.
        name: Blocks, each once with its page id within a stage, which identify the tile.
    """

    batch: Ragged
    name: tuple[tuple[Block, int], ...]


class Stage:
    """Staging buffer for the stripes of one tile and layer. Callers hold the KV lock to load.

    Args:
        n_bytes: Size of the buffer.
        copies: Copier of its device if that is not the CPU: stripes are loaded to pinned memory
            first.

    Attributes:
        view: Memory that tiers write to.
        arena: Memory that kernels read: the same, or memory of the device.
    """

    def __init__(self, n_bytes: int, copies: Copies | None) -> None:
        self.n_bytes, self._copies = n_bytes, copies
        if copies is not None:
            self.arena = copies.pages.new_empty(n_bytes)
        self.renew()

    def renew(self) -> None:
        """Replace the memory: a tier may still write to the old one."""
        if self._copies is None:
            self.view = own_memory(self.n_bytes)
            self.arena = torch.frombuffer(self.view, dtype=torch.uint8)
        else:
            (self._row,) = self._copies.stage(1, self.n_bytes)
            self.view = self._row.numpy().data
        self._sent: CudaMark | None = None
        self.reuse()

    def send(self) -> None:
        """Copy the loaded stripes to the device, ahead of the kernels launched from now on."""
        if self._copies is not None:
            self._sent = self._copies.send(self._row, self.arena)

    def order(self) -> None:
        """Make later work on the caller's stream begin after the copy to the device."""
        if self._copies is not None and self._sent is not None:
            self._copies.streams.after(self._sent)

    def reuse(self) -> None:
        """Clear the state for other stripes; the caller sets `name` after submitting the loads."""
        if self._sent is not None:  # wait for the copy to the device, which still reads the memory
            self._sent.wait()
        self.name: tuple[object, ...] = ()
        self.sources: dict[int, int] = {}  # number of the tier that loads each place
        self.requests: list[tuple[int, TransferRequest]] = []  # loads, with the tier's number
        self.answers: dict[int, TierAnswer] = {}
        self.arrived, self.fidelity = False, 0

    def answered(
        self, answers: dict[int, TierAnswer], places: Items[int], found: Items[TierAnswer]
    ) -> None:
        """Record a tier's answers, unless they are for the memory before `renew`."""
        if answers is self.answers:
            answers.update(zip(places, found, strict=True))

    def missing(self, tile: Tile) -> list[int]:
        """Return the places of a tile with stripes that are not loaded."""
        answers = self.answers
        return [
            place
            for place in range(len(tile.name))
            if place not in answers or answers[place].outcome is not Outcome.HIT
        ]

    def read_bytes(self) -> Counter[int]:
        """Return the bytes loaded, by number of the tier."""
        found = Counter[int]()
        for place, answer in self.answers.items():
            found[self.sources[place]] += answer.n_bytes
        return found

    @property
    def pending(self) -> bool:
        """Return whether a tier may still write to the stage."""
        return any(not request.ended for _, request in self.requests)


class Scan:
    """Attention of one step and layer group with some pages below the device.

    Args:
        overflow: Loads these pages.
        group: The layer group.
        seqs: The rows.
        batch: The rows for the kernels.
    """

    def __init__(
        self, overflow: Overflow, group: int, seqs: Items[Sequence], batch: Ragged
    ) -> None:
        self._overflow, self._group, self._seqs = overflow, group, seqs
        size = overflow.store.geometry.page_size
        lines, below = [], list[tuple[int, int, Block]]()
        after = batch.lengths.tolist()
        for row, (seq, length) in enumerate(zip(seqs, after, strict=True)):
            line = overflow.tables.pages[group][seq.row, : -(-length // size)]
            lines.append(line[line >= 0])
            for page_no in np.flatnonzero(line < 0).tolist():
                block = seq.blocks[group][page_no]
                assert block is not None
                below.append((page_no, row, block))
        away = np.bincount([row for _, row, _ in below], minlength=len(lines)) * size
        self._here = _rows_over(batch, lines, np.asarray(after, np.int64) - away)
        # Sorted by page number, so that rows that share pages find them in the same tile.
        self._tiles = list(self._cut(sorted(below, key=lambda one: one[:2]), batch))

    def _cut(self, below: Items[tuple[int, int, Block]], batch: Ragged) -> Iterator[Tile]:
        overflow, group, count = self._overflow, self._group, len(batch.rows)
        most = overflow._pair(group)[0].n_bytes // GRANULE_BYTES
        places, used = dict[Block, int](), 0
        lines: list[list[int]] = [[] for _ in range(count)]

        def tile() -> Tile:
            size = overflow.store.geometry.page_size
            arrays = [np.array(line, np.int32) for line in lines]
            rows = _rows_over(batch, arrays, np.array([len(line) * size for line in lines]))
            return Tile(rows, tuple(places.items()))

        for _, row, block in below:
            if block not in places:
                codec = overflow.codec(block)
                granules = overflow.stripe_bytes(group, codec) // GRANULE_BYTES
                if used + granules > most:
                    yield tile()
                    places, used = {}, 0
                    lines = [[] for _ in range(count)]
                places[block] = codec << CODEC_SHIFT | used
                used += granules
            lines[row].append(places[block])
        if places:
            yield tile()

    def attend(
        self,
        place: int,
        q: torch.Tensor,
        scale: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend over all pages of the rows, on the device and below.

        Args:
            place: The layer's number within the group.
            q: Packed queries `[N, Hq, D]`.
            scale: Scale of the logits.
            softcap: As for `kernels.paged_attention`.
            sinks: As for `kernels.paged_attention`.

        Returns:
            `[N, Hq, Dv]` in the dtype of `q`.

        Raises:
            StoreError: A page cannot be loaded any more.
        """
        overflow, group = self._overflow, self._group
        wide = torch.promote_types(q.dtype, torch.float32)
        how: dict[str, Any] = dict(scale=scale, softcap=softcap, return_lse=True)
        forms, pool = overflow.store.forms[group], overflow.store.pool(group)
        with overflow.turn:
            overflow.start_load(group, self._tiles[0], place)
            pages = Pages(pool.arena, forms.raw, place, forms.sealed)
            o, lse = kernels.paged_attention(q, pages, self._here, sinks=sinks, **how)
            whole = o.to(wide), lse
            for number, tile in enumerate(self._tiles):
                stage = overflow.ready(group, tile, place)
                for seq in self._seqs:  # new K and V are as lossy as the pages they depend on
                    seq.fidelity = max(seq.fidelity, stage.fidelity)
                other = overflow.start_load(group, *self._after(number + 1, place), beside=stage)
                pages = overflow.staged(group, stage)
                o, lse = kernels.paged_attention(q, pages, tile.batch, causal=False, **how)
                whole = kernels.merge((whole, (o.to(wide), lse)))
                # The stage is free again: both stages load at a time, so the link is never idle.
                overflow.start_load(group, *self._after(number + 2, place), beside=other)
        out: torch.Tensor = whole[0].to(q.dtype)
        return out

    def _after(self, number: int, place: int) -> tuple[Tile, int]:
        """Return the tile and layer that a tile number means: beyond the last, the next layer's."""
        layers = len(self._overflow.store.geometry.groups[self._group].layers)
        further, number = divmod(number, len(self._tiles))
        return self._tiles[number], (place + further) % layers


def _rows_over(batch: Ragged, lines: Items[np.ndarray], lengths: np.ndarray) -> Ragged:
    """Return a step's rows with the same new tokens over other pages.

    Args:
        batch: The rows of the step.
        lines: Page ids of each row.
        lengths: Tokens in these pages, of each row.
    """
    table = np.full((len(lines), max(1, *map(len, lines), 1)), -1, np.int32)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    device = batch.table.device
    put = [sent(torch.from_numpy(x), device) for x in (table, lengths.astype(np.int32))]
    rows = torch.arange(len(lines), dtype=torch.int32, device=device)
    return batch._replace(
        table=put[0], rows=rows, lengths=put[1], most_length=int(lengths.max(initial=0))
    )


class Overflow:
    """Pages of open sequences below the device, and the stages through which attention reads them.

    Args:
        store: Blocks, pools and tiers.
        tables: Block tables of all sequences.
        guard: The KV lock.

    Attributes:
        away: Pages of open sequences below their device.
        turn: Lock of one layer's attention: there is one pair of stages for each device.
        read_bytes: Bytes loaded through stages.
        retired: Stage memories left to an overdue tier.

    Raises:
        ConfigError: A layer group is not supported, or no tier below the device can hold pages.
    """

    def __init__(self, store: PageStore, tables: Tables, guard: Guard) -> None:
        self.store, self.tables, self._guard = store, tables, guard
        self.away = self.read_bytes = self.retired = 0
        self.turn = threading.Lock()
        self._known: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._stages: dict[str, tuple[Stage, Stage]] = {}
        self._layouts: dict[tuple[int, int], PageLayout] = {}
        odd = {group.kind for group in store.geometry.groups} - _KINDS - {"sliding"}
        if odd:
            raise ConfigError(
                f"overflow=True and {min(odd)!r} layers",
                "Leave overflow out: full, sliding and latent layers alone go on past their pool",
            )
        if not any(map(self._serves, range(len(store.stack.tiers)))):
            raise ConfigError(
                "overflow=True without a place that can hold pages",
                'Add private host memory, such as host="8GiB", or a writable disk tier',
            )

    def _serves(self, number: int) -> bool:
        tier = self.store.stack.tiers[number]
        # The codec of a page that another process wrote is unknown until the page is loaded.
        return tier.writable and not tier.shared and tier.kind in ("host", "disk")

    # ---- pages leave the device

    def chunk(self, rows: int) -> int:
        """Return the most tokens that a step should add to each of `rows` rows, to fit the pool."""
        store, wanted = self.store, dict.fromkeys(self.store.pools, 0)
        for group, forms in zip(store.geometry.groups, store.forms, strict=True):
            wanted[group.device] += forms.raw.granules
        pages = min(pool.capacity_granules // wanted[d] for d, pool in store.pools.items())
        return max(1, pages // (4 * rows)) * store.geometry.page_size

    def make_room(self, seqs: Iterable[Sequence], counts: Mapping[tuple[int, int], int]) -> None:
        """Move pages below the device until `counts` others fit, if possible. KV lock held.

        Args:
            seqs: Sequences that need the room.
            counts: Pages of each (group, codec index).
        """
        self._known.update(seqs)
        wanted = dict(counts)
        for (g, _), count in counts.items():
            rungs = self.store.forms[g].ladder.rungs
            if rungs:
                wanted[g, rungs[-1].codec] = min(count, _SPARE_PAGES)
        while (short := self.store.allocator.lacking(wanted)) and self._leave(short):
            pass

    def shed(self) -> bool:
        """Move a slab of pages below each device; return whether any moved. KV lock held."""
        return self._leave({d: pool.slab_granules for d, pool in self.store.pools.items()})

    def _leave(self, short: Mapping[str, int]) -> bool:
        """Move pages below the devices, the last of a sequence first; return whether any moved.

        Args:
            short: Granules to free on each device.
        """
        store, refused = self.store, set[Block]()  # what tiers refuse: full, or the model unproven
        while chosen := self._choose(short, refused):
            below = store.writes.put_below(list(chosen), self._serves)
            for block in below:
                for seq, page_no in chosen[block]:
                    store.keep(block)
                    store.drop(block)
                    self.tables.pages[block.group][seq.row, page_no] = -1
                    seq.away += 1
                    self.away += 1
                store.device_places[store.devices[block.group]].remove(block)
                store.free_pages([block], "overflow")
            self.tables.mark_changed()
            if below:
                return True
            refused |= chosen.keys()
        return False

    def _choose(
        self, short: Mapping[str, int], without: Container[Block]
    ) -> dict[Block, list[tuple[Sequence, int]]]:
        """Choose pages of `short` granules per device; return their holders and page numbers."""
        left, chosen = dict(short), dict[Block, list[tuple[Sequence, int]]]()
        for final in (True, False):  # pages that are still to be encoded go last
            for seq in sorted(self._known, key=lambda one: -one.length):
                for g, page_no, block in self._candidates(seq, final=final):
                    device = self.store.devices[g]
                    if left.get(device, 0) <= 0 or block in chosen or block in without:
                        continue
                    if users := self._users(block, g, page_no):
                        chosen[block] = [(user, page_no) for user in users]
                        left[device] -= self.store.forms[g].layout(block.page).granules
            if chosen:
                break
        return chosen

    def _candidates(self, seq: Sequence, *, final: bool) -> Iterator[tuple[int, int, Block]]:
        if seq.closed or self.tables.state[seq.row] != READY or seq.restoration is not None:
            return
        full = seq.length // self.store.geometry.page_size
        for g in filter(self.sees_all, range(len(seq.blocks))):
            line, codecs = self.tables.pages[g][seq.row, :full], self.store.forms[g].ladder.rungs
            for page_no in np.flatnonzero(line >= 0)[::-1].tolist():
                block = seq.blocks[g][page_no]
                if block is None or block.gone or block.page in self.store.pool(g).lent:
                    continue
                stays = block.page >> CODEC_SHIFT > 0 or not codecs or not block.sealable
                if stays is final:
                    yield g, page_no, block

    def _users(self, block: Block, group: int, page_no: int) -> list[Sequence]:
        """Return all sequences that hold a page; none if one is in a step, or not known here.

        Nor if one was cut within the page, and writes its next token there.
        """
        found = [
            seq
            for seq in self._known
            if seq.length // self.store.geometry.page_size > page_no
            and seq.blocks[group][page_no] is block
            and self.tables.pages[group][seq.row, page_no] >= 0
            and self.tables.state[seq.row] == READY
        ]
        return found if len(found) == block.holds else []

    def sees_all(self, group: int) -> bool:
        """Return whether pages of a group may be moved below the device."""
        return self.store.geometry.groups[group].kind in _KINDS

    def let_go(self, seq: Sequence, block: Block) -> None:
        """Release a sequence's page below the device. KV lock held."""
        seq.away -= 1
        self.away -= 1
        self.store.unkeep(block)
        self.store.stack.settle(block)
        if not self.away:  # no page is below the device any more: free the stages
            self._stages.clear()

    def share(self, seq: Sequence, block: Block) -> None:
        """Share a page below the device with one more sequence. KV lock held."""
        self._known.add(seq)
        seq.away += 1
        self.away += 1
        self.store.keep(block)

    def adopt(self, seq: Sequence, pages: int) -> None:
        """Attach known pages in place, on or below the device, if it has no room for all of them.

        KV lock held.

        Args:
            seq: A sequence of whole pages.
            pages: Known pages of its prompt.
        """
        store, groups = self.store, range(len(seq.blocks))
        size = store.geometry.page_size
        first, length = divmod(seq.length, size)
        slides = not all(map(self.sees_all, groups))
        if slides or length or not store.allocator.lacking({(g, 0): pages - first for g in groups}):
            return
        self._known.add(seq)
        self.tables.reserve(pages)
        for page_no in range(first, pages):
            blocks = [store.find(seq.key(g, page_no)) for g in groups]
            known = [b for b in blocks if b is not None and (b.page >= 0 or self._is_there(b))]
            if len(known) < len(blocks):
                break
            for g, block in enumerate(known):
                self.tables.pages[g][seq.row, page_no] = block.page
                store.hold(block) if block.page >= 0 else self.share(seq, block)
                seq.blocks[g].append(block)
                seq.published[g] = page_no + 1
                seq.fidelity = max(seq.fidelity, block.fidelity)
            self.tables.lengths[seq.row] += size
        self.tables.mark_changed()

    def _is_there(self, block: Block) -> bool:
        number = self.source(block)
        return number >= 0 and self.store.stack.tiers[number].contains([block.key])[0]

    # ---- attention over pages below the device

    def _pair(self, group: int) -> tuple[Stage, Stage]:
        """Return the two stages of a group's device, which are of one size."""
        store, device = self.store, self.store.devices[group]
        if device not in self._stages:
            here = [g for g in range(len(store.forms)) if store.devices[g] == device]
            least = max(LEAST_BYTES, *(store.forms[g].raw.stripe_stride_bytes for g in here))
            share = store.pools[device].capacity_bytes() // _SHARE
            most = max(least, min(MOST_BYTES, share) // GRANULE_BYTES * GRANULE_BYTES)
            copies = store.pools[device].copies
            with self._guard:
                self._stages[device] = Stage(most, copies), Stage(most, copies)
        return self._stages[device]

    def staging_bytes(self) -> int:
        """Return the bytes of all stages, on their devices."""
        return sum(stage.n_bytes for pair in self._stages.values() for stage in pair)

    def counters(self) -> dict[str, int]:
        """Return the statistics for `KV.stats`."""
        return {
            "pages_below": self.away,
            "read_bytes": self.read_bytes,
            "staging_bytes": self.staging_bytes(),
            "retired": self.retired,
        }

    def _layout(self, group: int, codec: int) -> PageLayout:
        """Return the layout of a page of one layer, which is a stripe."""
        if (group, codec) not in self._layouts:
            spec, forms = self.store.geometry.groups[group], self.store.forms[group]
            one = msgspec.structs.replace(spec, layers=spec.layers[:1])
            layout = page_layout(one, forms.raw.page_size, forms.layouts[codec].codec)
            self._layouts[group, codec] = layout
        return self._layouts[group, codec]

    def stripe_bytes(self, group: int, codec: int) -> int:
        """Return the bytes of one layer of a page."""
        return self._layout(group, codec).stripe_stride_bytes

    def staged(self, group: int, stage: Stage) -> Pages:
        """Return the contents of a stage as pages of one layer."""
        raw, *sealed = (self._layout(group, codec) for codec in self.store.forms[group].layouts)
        if stage.arena.device.type in GPUS:  # the arena may be freed on another stream
            stage.arena.record_stream(torch.cuda.current_stream(stage.arena.device))
        return Pages(stage.arena, raw, 0, tuple(sealed))

    def _open(self) -> list[int]:
        """Return the numbers of the tiers that can be read from now, nearest first."""
        lanes = enumerate(self.store.stack.mover.lanes)
        return [number for number, lane in lanes if self._serves(number) and lane.answering]

    def source(self, block: Block, among: Iterable[int] | None = None) -> int:
        """Return the number of the nearest of some tiers (default: all) with a page, or -1."""
        held = block.tiers
        for number in self._open() if among is None else among:
            if held >> number & 1:
                return number
        return -1

    def codec(self, block: Block) -> int:
        """Return the codec index of a page's copy below the device."""
        number = self.source(block)
        codec = block.codec_on(number) if number >= 0 else 0
        return codec if codec != UNKNOWN else self.store.forms[block.group].ladder.idle

    def start_load(self, group: int, tile: Tile, place: int, beside: Stage | None = None) -> Stage:
        """Start loading one layer of a tile into a stage, unless it is loading; return the stage.

        Args:
            group: The layer group.
            tile: The pages.
            place: The layer's number within the group.
            beside: The stage that is being read, or is read next, and must stay.
        """
        name, pair = (group, place, tile.name), self._pair(group)
        forgotten = any(block.gone for block, _ in tile.name)  # also pages found wrong
        for stage in pair if not forgotten else ():
            if stage.name == name:
                return stage
        stage = pair[1] if pair[0] is beside else pair[0]
        self._settle(stage)
        stage.reuse()
        with self._guard:
            self._load(stage, tile, range(len(tile.name)), place, self._open())
            stage.name = name
            self.store.stack.mover.wait(self._tiers(stage), 0.0)
        return stage

    def _load(
        self, stage: Stage, tile: Tile, places: Items[int], place: int, among: Items[int]
    ) -> None:
        """Submit loads of stripes into their places of a stage, from the tiers `among`."""
        group = tile.name[0][0].group
        forms, loads = self.store.forms[group], dict[int, tuple[list[int], list[Load]]]()
        sizes = {codec: self.stripe_bytes(group, codec) for codec in forms.layouts}
        view, layouts, fidelity = stage.view, forms.fingerprints, self.store.stack.fidelity
        try:
            for at in places:
                block, page = tile.name[at]
                codec, first = page >> CODEC_SHIFT, (page & GRANULE_MASK) * GRANULE_BYTES
                number = self.source(block, among)
                if number >= 0 and block.codec_on(number) not in (codec, UNKNOWN):
                    number = self.source(block, [n for n in among if block.codec_on(n) == codec])
                stage.sources[at] = number
                if number < 0:
                    stage.answers[at] = TierAnswer(0, 0, block.key, Outcome.MISS, "absent")
                    continue
                target = view[first : first + sizes[codec]]
                load = Load(block.key, target, layouts[codec], fidelity, place, 1)
                numbers, items = loads.setdefault(number, ([], []))
                numbers.append(at)
                items.append(load)
            for number, (numbers, items) in loads.items():
                done = partial(stage.answered, stage.answers, numbers)
                request = self.store.stack.mover.ask_all(number, items, done, stage)
                stage.requests.append((number, request))
        except BaseException:  # loads already submitted may still write: leave them the old memory
            stage.renew()
            raise

    @staticmethod
    def _tiers(stage: Stage) -> list[int]:
        return sorted({number for number, request in stage.requests if not request.ended})

    def _settle(self, stage: Stage) -> None:
        """Wait until no tier writes to a stage any more; an overdue tier keeps the old memory."""
        if not stage.pending:
            return
        mover, started_s = self.store.stack.mover, compiling.now_s()
        limit_s = max(mover.lanes[n].patience_s(one.n_bytes) for n, one in stage.requests)
        while stage.pending:
            with self._guard:
                tiers = self._tiers(stage)
                came = mover.wait(tiers, 0.0)
                if not came and compiling.now_s() - started_s > limit_s:
                    self._give_up(stage)
                    return
                waiting = files([mover.lanes[n].tier for n in tiers])
            if not came:
                rest(waiting, _PAUSE_S)

    def _give_up(self, stage: Stage) -> None:
        mover, lent = self.store.stack.mover, False
        late = [(number, one) for number, one in stage.requests if not one.ended]
        for number, request in late:
            lent |= mover.lanes[number].give_up(request)
        owed = {number for number, _ in late}
        sources, answers = stage.sources, dict(stage.answers)
        if lent:  # stripes loaded so far are in the old memory, not in the new one
            answers = {at: one for at, one in answers.items() if one.outcome is not Outcome.HIT}
            stage.renew()
            self.retired += 1
        for at, number in sources.items():
            if number in owed and at not in answers:
                answers[at] = TierAnswer(0, 0, b"", Outcome.FAILED, "deadline passed")
        stage.sources, stage.answers, stage.requests = sources, answers, []

    def ready(self, group: int, tile: Tile, place: int) -> Stage:
        """Return the stage with one layer of a tile, loaded and verified.

        Raises:
            StoreError: A page cannot be loaded any more.
        """
        stage = self.start_load(group, tile, place)
        if stage.arrived:
            stage.order()  # another thread's stream may have begun the copy
            return stage
        name = stage.name
        self._settle(stage)
        with self._guard:
            tried: dict[int, set[int]] = {}
            while missing := stage.missing(tile):
                stage.name = ()
                self._again(stage, tile, missing, place, tried)
            for number, n_bytes in stage.read_bytes().items():
                self.store.stack.mover.lanes[number].loaded_bytes += n_bytes
                self.read_bytes += n_bytes
            fidelities = (one.info.fidelity for one in stage.answers.values() if one.info)
            stage.fidelity = max(fidelities, default=0)
            stage.send()
        stage.arrived, stage.name = True, name
        return stage

    def _again(
        self, stage: Stage, tile: Tile, missing: Items[int], place: int, tried: dict[int, set[int]]
    ) -> None:
        """Load missing stripes from tiers not tried yet.

        Raises:
            StoreError: No tier is left that has a page.
        """
        for at in missing:
            answer, number, block = stage.answers.pop(at, None), stage.sources[at], tile.name[at][0]
            gone = number < 0
            if answer is not None and not gone:
                self.store.stack.not_served(block, number, answer)
                tried.setdefault(at, set()).add(number)
            if not gone:
                among = [n for n in self._open() if n not in tried.get(at, ())]
                self._load(stage, tile, [at], place, among)
                gone = stage.sources[at] < 0
            if not gone:
                continue
            self._settle(stage)
            reason = answer.reason if answer is not None else ""
            raise StoreError(
                "a page of a sequence that is longer than its device cannot be read any more "
                f"({reason or 'absent'})",
                "Generate again: missing pages are then computed anew",
            )
        self._settle(stage)
