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
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import torch

from flowkv.core import compiling
from flowkv.core.errors import StateError
from flowkv.core.geometry import LayerGroup
from flowkv.core.layout import PageLayout, page_layout
from flowkv.observe.events import LayerSent
from flowkv.runtime.batch import Step
from flowkv.runtime.index import Block
from flowkv.runtime.publisher import finite
from flowkv.runtime.sequence import Sequence
from flowkv.tiers.base import FrameInfo

if TYPE_CHECKING:
    from flowkv.runtime.cache import KV

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
        kv: The cache whose steps are followed.

    Attributes:
        stripes: Layers of pages sent.

    Raises:
        StateError: No tier of the stack can be read by others, or another sender is active.
    """

    def __init__(self, kv: KV) -> None:
        with kv.lock:
            self._kv, self._planner = kv, kv._bound()
            self._store, self.stripes = self._planner.store, 0
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
        with self._kv.lock:
            for group, spec in enumerate(self._planner.geometry.groups):
                for page_no in range(seq.known // self._planner.page_size):
                    key = seq.key(group, page_no)
                    for number in range(len(spec.layers)):
                        block = self._sent.pop(stripe_key(key, number), None)
                        if block is not None:
                            self._store.forget(block)

    def close(self) -> None:
        """Sends nothing more, and takes back what was sent. Safe to call again."""
        with self._kv.lock:
            if self._planner.sender is not self:
                return
            self._planner.sender = None
            for block, _, _ in self._waiting:
                self._store.unkeep(block)
            self._store.flush(self._kv.config.load_deadline_s)
            for block in self._sent.values():
                self._store.forget(block)
            self._waiting.clear()
            self._sent.clear()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all that was sent can be read; False if that took too long."""
        end_s = compiling.now_s() + timeout_s
        while self._waiting and compiling.now_s() < end_s:
            with self._kv.lock:
                self._store.drain(_LONGEST_PAUSE_S)
                self._pump()
        return self._kv.flush(max(0.0, end_s - compiling.now_s())) and not self._waiting

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def appended(self, step: Step, layer: int) -> None:
        """Sends what a layer of a step has filled; see `Step.appended`."""
        with self._kv.lock:
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
        info = FrameInfo(
            kind="memo",
            codec=0,
            fidelity=seq.fidelity,
            layout=stripe_layout(geometry.groups[group], geometry.page_size).fingerprint(),
            parent=key,
            namespace=seq.namespace,
            group=group,
            tokens=geometry.page_size,
            stripe_bytes=body.nbytes,
            tenant=seq.tenant,
        )
        self._store.keep(block)  # no policy may take it before it is anywhere
        self._sent[name] = block
        self._waiting.append((block, info, body))
