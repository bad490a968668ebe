"""A prefill process hands pages to a decode process, layer by layer, through any tier of the stack.

The sender stores one frame for each layer of each page, as soon as that layer has written the last
token of the page: long before the page is known, which is when all layers have. The receiver loads
what has arrived into pages of a sequence, and its own forward of layer i (over what follows those
pages) waits for layer i of them only. A stripe that does not come in time is not waited for again:
the pages that are complete become known, and the rest is computed.

A stripe's frame is a "memo" named by SHA-256 of the page's key and the layer, with the layout of a
page of that layer alone, so that it is verified, and divided among ranks, like any page. Nothing
but the tier goes between the two processes, and neither knows of the other.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import msgspec
import torch

from flowkv.cache.block_table import Planner
from flowkv.cache.index import Block
from flowkv.cache.restore import Late
from flowkv.cache.seal import finite
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core import compiling
from flowkv.core.errors import StateError
from flowkv.core.geometry import LayerGroup
from flowkv.core.layout import PageLayout, page_layout
from flowkv.observe.events import LayerArrived, LayerSent
from flowkv.tiers.base import FrameInfo, Load, Outcome

_TAG = b"flowkv.stripe/1\0"
_LONGEST_PAUSE_S = 0.002


def stripe_key(page: bytes, layer: int) -> bytes:
    """Name of one layer of a page; `layer` counts within the group."""
    return hashlib.sha256(_TAG + page + layer.to_bytes(4, "little")).digest()


def stripe_layout(group: LayerGroup, page_size: int) -> PageLayout:
    """Layout of one layer of a raw page."""
    return page_layout(msgspec.structs.replace(group, layers=group.layers[:1]), page_size)


class Sender:
    """Sends each layer of a page once it is full: `with kv.hand_over(): ...` around the prefill.

    What is sent stays on the tier until `release` or `close`, beside the pages themselves, which
    are written down as always; do that when the receivers have what they need. Whoever comes later
    finds whole pages. Pages that may not be published are not sent, nor those that a tier has.

    Args:
        planner: Whose steps are followed.
        deadline_s: Longest wait for stores when it ends.
        flush: See `KV.flush`.

    Attributes:
        stripes: Layers of pages sent.

    Raises:
        StateError: No tier of the stack can be read by others, or another sender is active.
    """

    def __init__(self, planner: Planner, deadline_s: float, flush: Callable[[float], bool]) -> None:
        with planner.guard:
            self._planner, self._deadline_s, self._flush = planner, deadline_s, flush
            self._store, self.stripes = planner.store, 0
            tiers = enumerate(self._store.tiers)
            together = (number for number, tier in tiers if tier.writable and tier.shared)
            self._number = next(together, self._store.lasting())
            if self._number < 0 or self._planner.sender is not None:
                raise StateError(
                    "pages can be handed over by one sender, through a tier that others read",
                    'Add one to the stack, such as "host:NAME:8GiB" or "disk:./kv", and close '
                    "other senders of this cache",
                )
            self._sent: dict[bytes, Block] = {}
            self._waiting: deque[tuple[Block, FrameInfo, memoryview]] = deque()
            self._planner.sender = self

    def release(self, seq: Sequence) -> None:
        """Takes back what was sent of a sequence's pages: the receivers have it."""
        with self._planner.guard:
            for group, spec in enumerate(self._planner.geometry.groups):
                for page_no in range(seq.known // self._planner.page_size):
                    key = seq.key(group, page_no)
                    for number in range(len(spec.layers)):
                        block = self._sent.pop(stripe_key(key, number), None)
                        if block is not None:
                            self._store.forget(block)

    def close(self) -> None:
        """Sends nothing more, and takes back what was sent. Safe to call again."""
        with self._planner.guard:
            if self._planner.sender is not self:
                return
            self._planner.sender = None
            for block, _, _ in self._waiting:
                self._store.unkeep(block)
            self._store.flush(self._deadline_s)
            for block in self._sent.values():
                self._store.forget(block)
            self._waiting.clear()
            self._sent.clear()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all that was sent can be read; False if that took too long."""
        end_s = compiling.now_s() + timeout_s
        while self._waiting and compiling.now_s() < end_s:
            with self._planner.guard:
                self._store.drain(_LONGEST_PAUSE_S)
                self._pump()
        return self._flush(max(0.0, end_s - compiling.now_s())) and not self._waiting

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def appended(self, step: Step, layer: int) -> None:
        """Sends what a layer of a step has filled; see `Step.appended`."""
        with self._planner.guard:
            for seq, count in zip(step.seqs, step.counts.tolist(), strict=True):
                if count and self._planner.publisher.allowed(seq):
                    self._send(seq, layer, count)
            self._pump()
            self._store.drain()

    def _pump(self) -> None:
        """Gives the tier what it has room for; the rest waits for the next layer, or `flush`."""
        while self._waiting:
            block, info, body = self._waiting[0]
            if not self._store.takes(self._number, body.nbytes):
                return
            self._waiting.popleft()
            if not block.gone:
                self._store.save(block, self._number, info, body)
            self._store.unkeep(block)
            self._store.settle(block)

    def _send(self, seq: Sequence, layer: int, count: int) -> None:
        size, (group, number) = self._planner.page_size, self._planner.locate(layer)
        full = min(seq.length + count, seq.known) // size
        sent = n_bytes = 0
        for page_no in range(seq.length // size, full):
            key = seq.key(group, page_no)
            known = [self._store.index.find(name) for name in (key, stripe_key(key, number))]
            if any(block is not None and block.somewhere for block in known):
                continue  # the whole page, or this stripe, can be found already
            page = int(self._planner.tables.pages[group][seq.row, page_no])
            body = self._stripe(group, number, page)
            if body is not None:
                self._queue(seq, key, (group, number), body)
                sent, n_bytes = sent + 1, n_bytes + body.nbytes
        if sent:
            self.stripes += sent
            self._store.bus.emit(LayerSent(layer=layer, pages=sent, n_bytes=n_bytes))

    def _stripe(self, group: int, number: int, page: int) -> memoryview | None:
        """A copy of one layer of a page, without what lies behind it; None if it is not finite."""
        layout = self._store.forms[group].raw
        raw = self._store.pool(group).page_bytes(page, layout.page_bytes)
        stripe = raw.view(layout.layers, -1)[number, : layout.stripe_bytes]
        if not finite(stripe.view(getattr(torch, layout.dtype))):
            return None
        body = raw.new_zeros(layout.stripe_stride_bytes, device="cpu")
        body[: layout.stripe_bytes] = stripe
        return body.numpy().data

    def _queue(self, seq: Sequence, key: bytes, place: tuple[int, int], body: memoryview) -> None:
        group, number = place
        name, geometry = stripe_key(key, number), self._planner.geometry
        block = self._store.index.publish(name, key, group, "memo")
        block.tenant, block.namespace, block.n_bytes = seq.tenant, seq.namespace, body.nbytes
        block.fidelity = seq.fidelity
        layout = stripe_layout(geometry.groups[group], geometry.page_size).fingerprint()
        info = block.info(layout, tokens=geometry.page_size, stripe_bytes=body.nbytes)
        self._store.keep(block)  # no policy may take it before it is anywhere
        self._sent[name] = block
        self._waiting.append((block, info, body))


# Pages that another process computes: taken into a sequence as their layers arrive.
#
# The receiving end of `Sender`.

_PAUSE_S, _ARRIVAL_LONGEST_PAUSE_S = 0.0002, 0.002
_MOST_ASKED = 1024


class _Stripe(NamedTuple):
    """One layer of one page that is to come."""

    layer: int
    group: int
    number: int
    page_no: int


class _Source(NamedTuple):
    """Where a stripe may be read: in a frame of its own, or in that of its page."""

    key: bytes
    layout: bytes
    first: int

    def wish(self, target: memoryview, fidelity: int) -> Load:
        return Load(self.key, target, self.layout, fidelity, self.first, 1)


class Arrival:
    """Pages of a sequence that another process sends, on their way.

    Args:
        seq: A sequence in no step, whose `length` is a whole number of pages.
        pages: How many pages it will have.
        patience_s: Longest wait for a layer while nothing at all arrives.

    Raises:
        CapacityError: The pages do not fit.
    """

    def __init__(self, seq: Sequence, pages: int, patience_s: float) -> None:
        self._seq, self._patience_s = seq, patience_s
        self._planner = planner = Planner.of(seq)
        with planner.guard:
            self._store, size = planner.store, planner.page_size
            self._first, self._pages = seq.length // size, pages
            self._layouts = [stripe_layout(group, size) for group in planner.geometry.groups]
            fresh = planner.allocate_raw([pages - self._first] * len(self._layouts))
            planner.occupy(seq, fresh)
            planner.tables.lengths[seq.row] = pages * size
            stripes = [
                _Stripe(layer, g, number, page_no)
                for g, group in enumerate(planner.geometry.groups)
                for page_no in range(self._first, pages)
                for number, layer in enumerate(group.layers)
            ]
            self._left = {s: seq.key(s.group, s.page_no) for s in sorted(stripes)}
            self._lost: set[_Stripe] = set()
            self._unfit: set[_Source] = set()

    def wait(self, layer: int) -> None:
        """Waits until a layer of all pages is there; takes what else arrives meanwhile.

        Raises:
            Late: It did not come in time.
        """
        pause_s, end_s = _PAUSE_S, compiling.now_s() + self._patience_s
        while any(stripe.layer == layer for stripe in self._left):
            if self._take():
                pause_s, end_s = _PAUSE_S, compiling.now_s() + self._patience_s
                continue
            lost = any(stripe.layer == layer for stripe in self._lost)
            if lost or compiling.now_s() > end_s:
                raise Late(layer)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _ARRIVAL_LONGEST_PAUSE_S)

    def settle(self) -> None:
        """Keeps the pages that are complete, from the first one on, and makes them known."""
        with self._planner.guard:
            if self._left:
                complete = min(stripe.page_no for stripe in self._left)
                self._planner.shorten(self._seq, complete)
            self._planner.publish(self._seq)
            self._left.clear()

    def _take(self) -> int:
        """Loads what is there by now; returns how many stripes came."""
        with self._planner.guard:
            here = (stripe for stripe in self._left if stripe not in self._lost)
            wanted = list(islice(here, _MOST_ASKED))  # layer by layer
            found: dict[_Stripe, tuple[int, _Source]] = {}
            for number, tier in enumerate(self._store.tiers):
                if tier.shared and self._store.answers(number):
                    for of_page in (False, True):  # the stripe alone, else out of the whole page
                        asked = [
                            (stripe, source)
                            for stripe in wanted
                            if stripe not in found
                            for source in [self._source(stripe, of_page)]
                            if source not in self._unfit
                        ]
                        there = tier.contains([source.key for _, source in asked])
                        for (stripe, source), is_there in zip(asked, there, strict=True):
                            if is_there:
                                found[stripe] = number, source
            return self._load(found) if found else 0

    def _source(self, stripe: _Stripe, of_page: bool) -> _Source:
        page = self._left[stripe]
        if of_page:
            layout = self._store.forms[stripe.group].raw.fingerprint()
            return _Source(page, layout, stripe.number)
        layout = self._layouts[stripe.group].fingerprint()
        return _Source(stripe_key(page, stripe.number), layout, 0)

    def _load(self, found: dict[_Stripe, tuple[int, _Source]]) -> int:
        begun, stripes = time.perf_counter(), list(found)
        pages = [self._page(stripe) for stripe in stripes]
        buffers = [self._buffer(stripe) for stripe in stripes]
        wishes = [
            (number, source.wish(buffer.numpy().data, self._store.fidelity))
            for (number, source), buffer in zip(found.values(), buffers, strict=True)
        ]

        def late(index: int) -> None:
            self._store.give_back(stripes[index].group, pages[index])

        answers, lent = self._store.mover.load(wishes, late)
        came: dict[int, int] = {}
        for index, (stripe, answer) in enumerate(zip(stripes, answers, strict=True)):
            number, source = found[stripe]
            if index in lent:  # the tier may still write there
                self._store.lend(stripe.group, pages[index])
                self._lost.add(stripe)
            elif answer.outcome is Outcome.HIT and answer.info is not None:
                self._placed(stripe, buffers[index], answer.info)
                del self._left[stripe]
                self._store.count_loaded(number, answer.n_bytes)
                came[stripe.layer] = came.get(stripe.layer, 0) + 1
            elif answer.reason:  # encoded, damaged, or not to be had: not asked for again
                self._unfit.add(source)
        self._tell(came, time.perf_counter() - begun)
        return sum(came.values())

    def _tell(self, came: dict[int, int], seconds: float) -> None:
        for layer, count in came.items():
            n_bytes = count * self._layouts[self._planner.locate(layer)[0]].page_bytes
            self._store.bus.emit(
                LayerArrived(layer=layer, pages=count, n_bytes=n_bytes, seconds=seconds)
            )

    def _buffer(self, stripe: _Stripe) -> torch.Tensor:
        """Where a tier puts a stripe: its place in the page, or pinned memory beside a GPU."""
        if self._store.pool(stripe.group).device.type == "cpu":
            return self._place(stripe)
        size = self._layouts[stripe.group].page_bytes
        return self._place(stripe).new_empty(size, pin_memory=True, device="cpu")

    def _place(self, stripe: _Stripe) -> torch.Tensor:
        pool, layout = self._store.pool(stripe.group), self._store.forms[stripe.group].raw
        page = pool.page_bytes(self._page(stripe), layout.page_bytes)
        return page.view(layout.layers, -1)[stripe.number]

    def _page(self, stripe: _Stripe) -> int:
        return int(self._planner.tables.pages[stripe.group][self._seq.row, stripe.page_no])

    def _placed(self, stripe: _Stripe, buffer: torch.Tensor, info: FrameInfo) -> None:
        if self._store.pool(stripe.group).device.type != "cpu":
            self._place(stripe).copy_(buffer)
        self._seq.fidelity = max(self._seq.fidelity, info.fidelity)
