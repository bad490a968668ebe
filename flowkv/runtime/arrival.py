"""Pages that another process computes: taken into a sequence as their layers arrive.

See `runtime.handover` for the other end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flowkv.core import compiling
from flowkv.observe.events import LayerArrived
from flowkv.runtime.batch import Step
from flowkv.runtime.handover import stripe_key, stripe_layout
from flowkv.runtime.restoration import Late
from flowkv.runtime.sequence import Sequence
from flowkv.tiers.base import FrameInfo, Load, Outcome

if TYPE_CHECKING:
    from flowkv.runtime.cache import KV

_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.002
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
        kv: The cache.
        seq: A sequence in no step, whose `length` is a whole number of pages.
        pages: How many pages it will have.
        patience_s: Longest wait for a layer while nothing at all arrives.

    Raises:
        CapacityError: The pages do not fit.
    """

    def __init__(self, kv: KV, seq: Sequence, pages: int, patience_s: float) -> None:
        self._kv, self._seq, self._patience_s = kv, seq, patience_s
        with kv.lock:
            self._planner = planner = seq.planner
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
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def settle(self) -> None:
        """Keeps the pages that are complete, from the first one on, and makes them known."""
        with self._kv.lock:
            if self._left:
                complete = min(stripe.page_no for stripe in self._left)
                self._planner.shorten(self._seq, complete)
            self._planner.publish(self._seq)
            self._left.clear()

    def _take(self) -> int:
        """Loads what is there by now; returns how many stripes came."""
        with self._kv.lock:
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


def take_over(
    kv: KV,
    seq: Sequence,
    forward: Callable[[Step], Any],
    *,
    patience_s: float,
    chunk: int,
) -> Any:
    """See `KV.take_over`."""
    output, pages = None, (len(seq.tokens) - 1) // kv.page_size
    if pages * kv.page_size > seq.length and not seq.length % kv.page_size:
        arrival = Arrival(kv, seq, pages, patience_s)
        rest: Items[int] = seq.tokens[pages * kv.page_size :].tolist()
        try:
            with kv.step([seq], [rest]) as step:
                step.awaits = arrival.wait
                output = forward(step)
        except Late:
            pass
        finally:
            arrival.settle()
    for step in kv.prefill([seq], chunk=chunk):
        output = forward(step)
    return output
