"""Swapping of suspended sequences out of device memory; snapshots of recurrent states."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.cache.block_table import WINDOW_SLACK_TOKENS, Planner
from flowkv.cache.export import DTYPES, TensorForm, bytes_of
from flowkv.cache.index import LAYOUT, Block, Copy, Saved, SwappedCopy, frame_infos
from flowkv.cache.pool import download, upload
from flowkv.cache.restore import PrefixMatcher, RestoreJob
from flowkv.cache.sequence import READY, SUSPENDED, Sequence
from flowkv.core.errors import CapacityError, StateError, StoreError
from flowkv.core.files import MALFORMED
from flowkv.core.geometry import CODEC_SHIFT, GRANULE_BYTES
from flowkv.core.keys import within
from flowkv.observe.events import Hit
from flowkv.policy.pages import SavedState, StatePlacement

# Device memory of sequences, counted in pages: free, held, and what closing a sequence frees.

_TYPICAL_TOKENS, _SHARE, _CHANGE = 2048, 1 / 16, 1.25
"""Length assumed before any is known; weight of a new one in the mean; least factor of change."""


class Footprint:
    """Capacity of a cache's devices, in pages.

    A *page* stands for `page_size` tokens in all layer groups. Its bytes depend on its place in a
    sequence: pages behind a window take none, encoded ones few. The size used here is the mean over
    a sequence of the usual length, and the fullest device counts.

    Args:
        planner: Planner of the cache.

    Attributes:
        total: Pages that all devices could hold.
        page_bytes: Bytes of a page, on all devices.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._store = planner, planner.store
        self._mean = self._gauged = 0.0
        self._gauge(_TYPICAL_TOKENS)

    def observe_length(self, tokens: int) -> None:
        """Take the expected length of a sequence into the mean, and resize the page on change."""
        self._mean += (tokens - self._mean) * (_SHARE if self._mean else 1.0)
        if not 1 / _CHANGE < self._mean / self._gauged < _CHANGE:
            self._gauge(self._mean)

    def _gauge(self, tokens: float) -> None:
        size = self._planner.page_size
        pages = max(1, round(tokens / size))
        typical = self.granules(pages * size)
        self._gauged = tokens
        self._unit = {device: max(1.0, granules / pages) for device, granules in typical.items()}
        capacity = {d: pool.capacity_granules for d, pool in self._store.pools.items()}
        self.total = min(int(capacity[d] / unit) for d, unit in self._unit.items())
        self.page_bytes = round(sum(self._unit.values())) * GRANULE_BYTES

    def granules(self, length: int) -> dict[str, int]:
        """Return the granules that a sequence of `length` tokens takes, by device."""
        found = dict.fromkeys(self._store.pools, 0)
        for (device, granules), pages in self._pages(length).items():
            found[device] += granules * pages
        return found

    def _pages(self, length: int) -> Counter[tuple[str, int]]:
        """Return the pages that a sequence takes, by device and size in granules."""
        planner, size = self._planner, self._planner.page_size
        found = Counter[tuple[str, int]]()
        for g, group in enumerate(planner.geometry.groups):
            window, forms, first = planner.window(g), self._store.forms[g], 0
            if window is not None:
                first = max(0, length - window - WINDOW_SLACK_TOKENS) // size
            for rung in forms.ladder.rungs:  # from the start of the sequence on
                border = max(first, forms.ladder.border(rung, length))
                found[group.device, forms.layouts[rung.codec].granules] += border - first
                first = border
            found[group.device, forms.raw.granules] += max(0, -(-length // size) - first)
        return found

    def room(self) -> int:
        """Return the pages that are free or only held by the index, in constant time."""
        store = self._store
        return min(int(store.allocator.room(device) / unit) for device, unit in self._unit.items())

    def longest(self, chunk: int) -> int:
        """Return the longest sequence that fits alone if computed in chunks, in tokens."""
        lengths = range(1 << 40)
        return bisect_left(lengths, True, 1, key=lambda n: not self._fits(n, chunk)) - 1

    def _fits(self, length: int, chunk: int) -> bool:
        """Return whether a sequence fits alone, with its last chunk raw and inside all windows."""
        done, size, store = max(0, length - chunk), self._planner.page_size, self._store
        pages, slabs = self._pages(done), dict.fromkeys(store.pools, 0)
        for g, group in enumerate(self._planner.geometry.groups):
            pages[group.device, store.forms[g].raw.granules] += -(-length // size) + -done // size
        for (device, granules), count in pages.items():  # each size has slabs of its own
            slabs[device] += -(-count // (store.pools[device].slab_granules // granules))
        return all(taken <= store.pools[device].slabs for device, taken in slabs.items())

    # ---- of one sequence

    def alone(self, seq: Sequence) -> int:
        """Return the pages that closing a sequence frees: those that no other sequence uses."""
        taken = dict.fromkeys(self._unit, 0)
        for g, blocks in enumerate(seq.blocks):
            line = self._planner.tables.pages[g][seq.row, : len(blocks)]
            taken[self._store.devices[g]] += self._size(g, line[self._alone(seq, g)])
        restoration = RestoreJob.of(seq)
        if restoration is not None and not restoration.settled:
            for page_load in restoration:
                if page_load.page >= 0 and not page_load.held:
                    granules = self._store.forms[page_load.group].layout(page_load.page).granules
                    taken[self._store.devices[page_load.group]] += granules
        return max(round(taken[device] / unit) for device, unit in self._unit.items())

    def _size(self, group: int, pages: NDArray[np.int32]) -> int:
        """Return the granules of a group's pages; -1 stands for no page."""
        forms = self._store.forms[group]
        if len(forms.layouts) == 1 and self._planner.window(group) is None:
            here = len(pages) if self._planner.overflow is None else int((pages >= 0).sum())
            return here * forms.raw.granules
        codecs = enumerate(np.bincount(pages[pages >= 0] >> CODEC_SHIFT).tolist())
        return sum(count * forms.layouts[codec].granules for codec, count in codecs if count)

    def _alone(self, seq: Sequence, group: int) -> slice | list[int]:
        """Return the numbers of the pages that no other sequence uses."""
        blocks, low = seq.blocks[group], seq.first_page[group]
        stop = len(blocks)
        if self._planner.window(group) is not None:  # others may have released the first pages
            return [n for n in range(low, stop) if (b := blocks[n]) is None or b.holds < 2]
        # A sequence that uses a page uses all pages before it.
        return slice(bisect_left(blocks, True, low, key=lambda b: b is None or b.holds < 2), stop)

    def held(self, seq: Sequence, pages: int) -> int:
        """Return how many leading pages of a prompt open sequences use now.

        Args:
            seq: A sequence with the prompt's tokens, which need not hold pages.
            pages: Full pages of the prompt.
        """

        def unused(page: int) -> bool:
            block = self._store.find(seq.key(0, page))
            return block is None or block.page < 0 or not block.holds

        return bisect_left(range(pages), True, key=unused)


# Suspending sequences, which frees their device pages, and resuming them.


def weigh(lines: Planner, seq: Sequence) -> int:
    """Return the most bytes of host memory that suspending a sequence can take."""
    total = 0
    for g, blocks in enumerate(seq.blocks):
        line = lines.tables.pages[g][seq.row, : len(blocks)].tolist()
        for page, block in zip(line, blocks, strict=True):
            if page >= 0 and (block is None or block.gone or block not in lines.store.swapped):
                total += lines.store.forms[g].layout(page).page_bytes
    return total


def suspend(lines: Planner, seq: Sequence) -> int:
    """Release a sequence's pages to the pools, after private ones are copied to host memory.

    Published pages stay in place until their memory is needed, and are copied then.
    Callers hold the KV lock.

    Returns:
        Most bytes of host memory that this can take.

    Raises:
        StateError: The sequence is closed, suspended or in a step.
    """
    lines.idle(seq)
    lines.whole(seq)
    n_bytes, pages = weigh(lines, seq), lines.tables.pages
    placed = [pages[g][seq.row, : len(blocks)].tolist() for g, blocks in enumerate(seq.blocks)]
    # All groups are copied first: if a copy fails, there is nothing to undo.
    copied = [_copies(lines, g, line, seq.blocks[g]) for g, line in enumerate(placed)]
    swapped = lines.store.swapped.add_user
    saved: Saved = [
        [copies.get(page) or (block and swapped(block)) for page, block in zip(*both, strict=True)]
        for copies, *both in zip(copied, placed, seq.blocks, strict=True)
    ]
    lines.vacate(seq)
    seq.suspended = saved
    lines.aside_bytes += n_bytes
    lines.tables.state[seq.row] = SUSPENDED
    return n_bytes


def _copies(
    lines: Planner, group: int, line: list[int], blocks: list[Block | None]
) -> dict[int, Copy]:
    """Copy the pages without a block, or with an erased one, to host memory."""
    by_codec: dict[int, list[int]] = {}
    for page, block in zip(line, blocks, strict=True):
        if page >= 0 and (block is None or block.gone):
            by_codec.setdefault(page >> CODEC_SHIFT, []).append(page)
    copies, pool = dict[int, Copy](), lines.store.pool(group)
    for codec, pages in by_codec.items():
        contents = download(pool, pages, lines.store.forms[group].layouts[codec].page_bytes)
        copies |= {p: Copy(codec, content) for p, content in zip(pages, contents, strict=True)}
    lines.copied_bytes += sum(copy.content.numel() for copy in copies.values())
    return copies


def resume(lines: Planner, seq: Sequence) -> None:
    """Restore a suspended sequence's pages: those still in place, and private copies of the rest.

    Callers hold the KV lock. On an error the sequence stays suspended, and holds no page.

    Raises:
        CapacityError: The pages do not fit now.
        StateError: The sequence is not suspended.
    """
    saved = seq.suspended
    if seq.closed or saved is None:
        raise StateError("the sequence is not suspended", "Resume suspended sequences only")
    known = [[_there(page) for page in pages] for pages in saved]
    held = [block for blocks in known for block in blocks if block is not None]
    lines.store.hold(*held)  # before room is made, which might take them
    fresh: dict[tuple[int, int], list[int]] = {}
    try:
        each = [(g, page) for g, pages in enumerate(saved) for page in pages]
        away = ((g, page) for g, page in each if page is not None and _there(page) is None)
        fresh = lines.allocate(Counter((g, page.codec) for g, page in away))
        placed = [_place(lines, g, pages, fresh) for g, pages in enumerate(saved)]
    except BaseException:  # the device may have no memory for a transfer, for instance
        for block in held:
            lines.store.drop(block)
        for (g, _), taken in fresh.items():
            lines.store.pool(g).release(*taken)
        raise
    for g, pages in enumerate(saved):
        seq.first_page[g] = next((n for n, page in enumerate(pages) if page), len(pages))
    lines.occupy(seq, placed)
    for g, blocks in enumerate(known):
        seq.blocks[g][:] = blocks
    discard(lines, seq)
    lines.tables.state[seq.row] = READY


def _there(page: Copy | SwappedCopy | None) -> Block | None:
    """Return the block of a saved page that is still on the device."""
    return page.block if isinstance(page, SwappedCopy) and page.content is None else None


def _place(
    lines: Planner,
    group: int,
    pages: list[Copy | SwappedCopy | None],
    fresh: dict[tuple[int, int], list[int]],
) -> list[int]:
    """Upload the saved contents of a group's pages; return the group's row of page ids."""
    line: list[int] = []
    free = {codec: iter(taken) for (g, codec), taken in fresh.items() if g == group}
    work: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
    for page in pages:
        block = _there(page)
        if page is None or block is not None:
            line.append(-1 if block is None else block.page)
            continue
        line.append(next(free[page.codec]))
        assert page.content is not None  # else its block is on the device
        targets, contents = work.setdefault(page.codec, ([], []))
        targets.append(line[-1])
        contents.append(page.content)
    for targets, contents in work.values():
        upload(lines.store.pool(group), targets, contents)
        lines.copied_bytes += sum(content.numel() for content in contents)
    return line


def discard(lines: Planner, seq: Sequence) -> None:
    """Drop the saved pages of a suspended sequence. Callers hold the KV lock."""
    last = lines.store.swapped.remove_user
    for g, pages in enumerate(seq.suspended or ()):
        layouts = lines.store.forms[g].layouts
        for page in pages:
            if page is not None and (isinstance(page, Copy) or last(page)):
                lines.aside_bytes -= layouts[page.codec].page_bytes
    seq.suspended = None


# Snapshots of recurrent layers: named tensors, numbers and partial pages as one checked blob.
#
#     blob = u32 length of the description | description (MessagePack) | tensor bytes ... | padding
#
# No pickle: every length is checked against the blob before it is used (DESIGN D11).


class _Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: tuple[TensorForm, ...]
    plain: dict[str, Any]


def encode_state(values: Mapping[str, Any]) -> bytes:
    """Encode named tensors and plain values (numbers, text, bytes, lists of them) into one blob.

    Raises:
        StoreError: A value is of another kind.
    """
    tensors, plain, bodies = [], {}, []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            tensors.append(TensorForm(name, dtype, tuple(value.shape)))
            bodies.append(bytes_of(name, value))
        else:
            plain[name] = value
    try:
        head = msgspec.msgpack.encode(_Description(tuple(tensors), plain))
    except TypeError as error:
        raise StoreError(f"a state cannot be kept ({error})", "Keep tensors and numbers") from None
    blob = len(head).to_bytes(4, "little") + head + b"".join(bodies)
    return blob + bytes(-len(blob) % GRANULE_BYTES)


def decode_state(blob: bytes | memoryview) -> dict[str, Any]:
    """Decode a blob of `encode_state` into its values, with tensors on the CPU.

    Raises:
        StoreError: The blob is damaged.
    """
    length = int.from_bytes(blob[:4], "little")
    try:
        description = msgspec.msgpack.decode(blob[4 : 4 + length], type=_Description)
    except MALFORMED as error:
        raise StoreError(f"a stored state is damaged ({error})", "Delete the store") from None
    values: dict[str, Any] = dict(description.plain)
    at = 4 + length
    for tensor in description.tensors:
        if not tensor.lies_within(at, len(blob)):
            raise StoreError(f"stored state {tensor.name!r} is damaged", "Delete the store")
        dtype, raw = DTYPES[tensor.dtype], bytearray(blob[at : at + tensor.tensor_bytes])
        room = torch.frombuffer(raw or bytearray(dtype.itemsize), dtype=dtype)
        flat = room[: tensor.tensor_bytes // dtype.itemsize]
        values[tensor.name] = flat.reshape(tensor.shape)
        at += tensor.tensor_bytes
    return values


# Storage and lookup of recurrent states, beside the pages of the same prefix (DESIGN D12).

_TAIL = "flowkv.tail."


class Snapshots:
    """Recurrent states of one cache. Callers hold the KV lock.

    A state belongs to an exact number of tokens. The full pages below it are ordinary blocks; the
    partial page at its end is stored inside it. Without any tier, a host tier of 1 GiB stores it.

    Args:
        restorer: Finds and attaches the pages.

    Attributes:
        placement: Rule of where states are saved, and which earlier ones they replace.
        stored: Whether a tier stored the last state; otherwise no prompt stops for one.
    """

    placement = StatePlacement()

    def __init__(self, restorer: PrefixMatcher) -> None:
        self.restorer, self.store, self.planner = restorer, restorer.store, restorer.planner
        self.stored = True

    # ---- keeping

    def plan_stops(
        self, seqs: Items[Sequence], base: int, end: int, cut: Callable[[int], int] = int
    ) -> list[int]:
        """Return where to save states while prompts are computed from their token `base` on.

        Args:
            seqs: Sequences that run together; they hold `base` tokens each.
            base: Tokens that a state was restored for; 0 for none.
            end: Last token that may be stopped at.
            cut: Returns the last page's end, at most a length, at which prompts can be cut.

        Returns:
            Lengths, ascending. The last one, or `base`, stays beside the state behind the answer,
            for another answer to the same prompt.
        """
        size = self.planner.page_size
        known = min(self.restorer.match(seq, end // size) for seq in seqs) * size
        found = self.placement.stops(base, known, end, page=size) if self.stored else []
        found = sorted({at for at in map(cut, found) if at > base})  # an image is not cut
        for seq in seqs:
            seq.stops, seq.placed = found, max(found, default=base)
        return found

    def replace_older(self, seq: Sequence) -> None:
        """Forget earlier states of a sequence's text that the newest one replaces.

        These are also states behind other answers to its earlier prompts, which the text has left,
        unless it has an answer of its own there. States with a lease, or of pinned prompts, stay:
        their user asked for them.
        """
        size = self.planner.page_size
        for page, block in enumerate(seq.blocks[0] if seq.prompted else ()):
            if block is not None:
                block.made = min(max((page + 1) * size - seq.prompted, 0), size)
        known = dict(self._candidates(seq, seq.length)[::-1])
        if seq.length not in known:
            return
        saved = [SavedState(length, self._branches(block)) for length, block in known.items()]
        token_bytes = sum(one.likely_bytes for one in self.store.forms) / size
        newest, placed = known[seq.length], known.get(seq.placed)
        ratio = newest.n_bytes / token_bytes
        old = [known[n] for n in self.placement.replaced(saved, seq.placed, state_tokens=ratio)]
        keys = {block.key for block in known.values()}
        begun = max((n for n in known if n < seq.prompted and n not in seq.stops), default=0)
        for (length, branches), block in zip(saved, known.values(), strict=True):
            key, asked = block.answer
            end = length + len(asked)
            passed = begun <= length and end < seq.prompted and branches < 2
            if passed and key not in keys and seq.tokens[length:end].tolist() == asked:
                old += filter(None, [self.store.index.find(key)])
        if placed is not None and placed is not newest:
            placed.answer = newest.key, seq.tokens[seq.placed : seq.prompted].tolist()
        self.store.forget(*[block for block in old if not self._asked_for(block)])

    def _asked_for(self, block: Block) -> bool:
        """Return whether a state has a lease, is in use, or ends within a pinned prompt."""
        above = self.store.index.find(block.parent)
        return bool(block.lease or block.kept or block.gone or (above and above.pinned))

    def _branches(self, block: Block) -> int:
        """Return the ways that known prompts go on right behind a state."""
        below = () if block.tail else self.store.index.children(block.parent)
        pages = [(one, self.planner.page_size - one.made) for one in below if one.kind == "page"]
        ways = [b.key if b.tokens is None else b.tokens[:n].tobytes() for b, n in pages if n]
        ways.sort()  # right before those that go on likewise
        return sum(not after.startswith(way) for way, after in pairwise([*ways, b""]))

    def save(self, seq: Sequence, values: Mapping[str, Any]) -> bool:
        """Store `values` as the state after exactly `seq.length` tokens; return whether it did."""
        self.planner.idle(seq)
        self.planner.publish(seq)
        size, length = self.planner.page_size, seq.length
        pages = length // size
        if min(seq.published) < pages or len(seq.tokens) < length or not length:
            return False
        parent, key = seq.parent_key(0, pages), self._key(seq, pages, length)
        known = self.store.index.find(key)
        if known is not None and known.fidelity <= self.store.stack.fidelity:
            return True
        self.store.stack.supersede(known)
        try:
            self.planner.thaw_tail(seq)
        except CapacityError:
            return False
        tails = self._tails(seq, pages, length)
        if not all(bool(tail.isfinite().all()) for tail in tails.values()):
            return False
        body = encode_state({**values, **tails})
        block = self.store.index.get_or_create(key, parent, 0, "state")
        block.tokens = seq.tokens[pages * size : length].copy()
        block.tenant, block.namespace, block.tail = seq.tenant, seq.namespace, len(block.tokens)
        block.fidelity, block.lease = seq.fidelity, seq.care.lease
        info = frame_infos([block], LAYOUT, block.tail, GRANULE_BYTES)[0]
        self.stored = self.store.writes.store_state(block, info, body)
        if not self.stored:
            self.store.stack.miss_out(self.store.stack.admission.lasting())
        self.store.writes.drain()
        return self.stored

    def _key(self, seq: Sequence, pages: int, length: int) -> bytes:
        first = pages * self.planner.page_size
        salts = within(seq.salts, first, length - first)
        return seq.chains[0].state(seq.parent_key(0, pages), seq.tokens[first:length], salts)

    def _tails(self, seq: Sequence, pages: int, length: int) -> dict[str, torch.Tensor]:
        """Copy K and V of the tokens behind the last full page, `[layers, heads, tokens, dim]`."""
        count, tails = length - pages * self.planner.page_size, dict[str, torch.Tensor]()
        for g in range(len(seq.blocks) if count else 0):
            page = int(self.planner.tables.pages[g][seq.row, pages])
            for name, view in zip("kv", self.store.views(g, page, count), strict=True):
                tails[f"{_TAIL}{g}.{name}"] = view.clone()
        return tails

    # ---- finding

    def restore(self, seq: Sequence, limit: int, attach: Callable[[int], int | None]) -> int:
        """Attach the longest prefix of at most `limit` tokens that has a state.

        `seq.state` is then the state, which is valid for all of its tokens only: pages that load
        meanwhile (`seq.restoration`) and do not arrive must be filled by `RestoreJob.fill`, else
        the prefix is dropped.

        Args:
            seq: A fresh sequence.
            limit: Most tokens.
            attach: Attaches the given number of known pages, also those being loaded; returns how
                many of their tokens were not on the device, or None if it failed.

        Returns:
            Tokens attached that do not load any more.
        """
        for length, block in self._candidates(seq, limit):
            pages = length // self.planner.page_size
            if self.restorer.match(seq, pages) < pages:
                continue
            values, tier = self._load(block)
            if values is None:
                continue
            loaded = attach(pages)
            if loaded is not None and self._attach_tail(seq, length, values):
                seq.fidelity = max(seq.fidelity, block.fidelity)
                self.store.touch([block])
                seq.state, tail = values, length - pages * self.planner.page_size
                hit = Hit(tier=tier, tokens=tail, n_bytes=block.n_bytes, tenant=seq.owner)
                self.store.bus.emit(hit)
                self.restorer.emit_hits(seq, length, loaded + tail, limit)
                return length - loaded if seq.restoration is not None else length
            if seq.restoration is not None:
                seq.restoration.abandon()
            self.planner.vacate(seq)
            self.planner.tables.lengths[seq.row] = 0
        self.restorer.emit_hits(seq, 0, 0, limit)
        return 0

    def known_states(self, seq: Sequence) -> list[Block]:
        """Return the known states within a prompt."""
        return [block for _, block in self._candidates(seq, len(seq.tokens))]

    def _candidates(self, seq: Sequence, limit: int) -> list[tuple[int, Block]]:
        size, found = self.planner.page_size, []
        for pages in range(min(limit, len(seq.tokens)) // size + 1):
            for block in self.store.index.children(seq.parent_key(0, pages)):
                length = pages * size + block.tail
                fits = block.kind == "state" and 0 < length <= limit
                if fits and self._key(seq, pages, length) == block.key:
                    found.append((length, block))
        return sorted(found, key=lambda pair: -pair[0])

    def _load(self, block: Block) -> tuple[dict[str, Any] | None, str]:
        """Load a state; return its values and the name of the tier, or (None, "")."""
        if (found := self.store.stack.load(block)) is not None:
            block.fidelity = found[1].fidelity  # copies on other tiers may differ
            try:
                return decode_state(found[2]), self.store.stack.tiers[found[0]].name
            except StoreError:
                self.store.forget(block)
        return None, ""

    def _attach_tail(self, seq: Sequence, length: int, values: dict[str, Any]) -> bool:
        """Put the tokens behind the last full page in place; return False if they do not fit."""
        pages, groups = length // self.planner.page_size, range(len(seq.blocks))
        tails = [[values.pop(f"{_TAIL}{g}.{name}", None) for name in "kv"] for g in groups]
        count = length - pages * self.planner.page_size
        if not count:
            return True
        try:
            taken = self.planner.allocate_raw([1 for _ in groups])
        except CapacityError:
            return False
        self.planner.occupy(seq, taken)
        for g, ((page,), tail) in enumerate(zip(taken, tails, strict=True)):
            for view, saved in zip(self.store.views(g, page, count), tail, strict=True):
                alike = isinstance(saved, torch.Tensor) and saved.dtype is view.dtype
                if not alike or saved.shape != view.shape:
                    return False
                view.copy_(saved)
        self.planner.tables.lengths[seq.row] = length
        return True
