"""Keeps and finds states of recurrent layers beside the pages of the same prefix (DESIGN D12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from flowkv.core.errors import CapacityError, StoreError
from flowkv.core.keys import within
from flowkv.core.layout import GRANULE_BYTES
from flowkv.observe.events import Hit
from flowkv.runtime.index import Block
from flowkv.runtime.publisher import finite
from flowkv.runtime.restore import Restorer
from flowkv.runtime.sequence import Sequence
from flowkv.runtime.states import LAYOUT, decode_state, encode_state
from flowkv.tiers.base import FrameInfo

_TAIL = "flowkv.tail."


class Snapshots:
    """States of one cache. Callers hold the KV lock.

    A state belongs to an exact number of tokens. The full pages below it are ordinary blocks; the
    partial page at its end travels inside it. Without any tier, a host tier of 1 GiB keeps them.

    Args:
        restorer: Finds and attaches the pages.
    """

    def __init__(self, restorer: Restorer) -> None:
        self.restorer, self.store, self.planner = restorer, restorer.store, restorer.planner

    # ---- keeping

    def save(self, seq: Sequence, values: Mapping[str, Any]) -> bool:
        """Keeps `values` as the state after exactly `seq.length` tokens; False if it cannot."""
        self.planner.idle(seq)
        self.planner.publish(seq)
        size, length = self.planner.page_size, seq.length
        pages = length // size
        if min(seq.published) < pages or len(seq.tokens) < length or not length:
            return False
        parent, key = seq.parent_key(0, pages), self._key(seq, pages, length)
        known = self.store.index.find(key)
        if known is not None and known.fidelity <= self.store.fidelity:
            return True
        if known is not None:
            self.store.supersede(known)
        try:
            self.planner.thaw_tail(seq)
        except CapacityError:
            return False
        tails = self._tails(seq, pages, length)
        if not all(finite(tail) for tail in tails.values()):
            return False
        body = encode_state({**values, **tails})
        block = self.store.index.publish(key, parent, 0, "state")
        block.tokens = seq.tokens[pages * size : length].copy()
        block.tenant, block.namespace, block.tail = seq.tenant, seq.namespace, len(block.tokens)
        block.fidelity, block.lease = seq.fidelity, seq.care.lease
        info = FrameInfo(
            kind="state",
            codec=0,
            fidelity=block.fidelity,
            layout=LAYOUT,
            parent=parent,
            namespace=seq.namespace,
            group=0,
            tokens=block.tail,
            stripe_bytes=GRANULE_BYTES,
            tenant=seq.tenant,
        )
        saved = self.store.save_state(block, info, body)
        self.store.drain()
        return saved

    def _key(self, seq: Sequence, pages: int, length: int) -> bytes:
        first = pages * self.planner.page_size
        salts = within(seq.salts, first, length - first)
        return seq.chains[0].state(seq.parent_key(0, pages), seq.tokens[first:length], salts)

    def _tails(self, seq: Sequence, pages: int, length: int) -> dict[str, torch.Tensor]:
        """K and V of the tokens behind the last full page, `[layers, heads, 2, tokens, dim]`."""
        count = length - pages * self.planner.page_size
        if not count:
            return {}
        tails = {}
        for g in range(len(seq.blocks)):
            page = int(self.planner.tables.pages[g][seq.row, pages])
            for name, view in zip("kv", self._views(g, page), strict=True):
                tails[f"{_TAIL}{g}.{name}"] = view[:, :, :count]
        return tails

    def _views(self, group: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a raw page, `[layers, heads, page_size, dim]`."""
        layout = self.store.forms[group].raw
        raw = self.store.pool(group).page_bytes(page, layout.page_bytes)
        stripes = raw.view(layout.layers, -1)[:, : layout.stripe_bytes]
        shape, dtype = (layout.layers, layout.kv_heads), getattr(torch, layout.dtype)
        runs = stripes.view(*shape, layout.run_bytes)
        if layout.latent:
            latents = runs.view(dtype).view(*shape, layout.page_size, layout.head_dim)
            return latents, latents[..., : layout.value_dim]
        k, v = runs[..., : layout.v_offset_bytes], runs[..., layout.v_offset_bytes :]
        return (
            k.view(dtype).view(*shape, layout.page_size, layout.head_dim),
            v.view(dtype).view(*shape, layout.page_size, layout.value_dim),
        )

    # ---- finding

    def restore(self, seq: Sequence, limit: int) -> int:
        """Attaches the longest prefix of at most `limit` tokens that has a state.

        Returns:
            Tokens attached; `seq.state` holds the state if there are any.
        """
        loaded = 0

        def attach(pages: int) -> bool:
            nonlocal loaded
            tokens, loaded = self.restorer.attach(seq, pages)
            return tokens == pages * self.planner.page_size

        reused, tail = self._restore(seq, limit, attach)
        self.restorer.report(seq, reused, loaded + tail if reused else 0, limit)
        return reused

    def begin(self, seq: Sequence, limit: int, attach: Callable[[int], bool]) -> int:
        """As `restore`, without a wait for pages that are not on the device.

        `seq.restoration` is settled then. A state fits all of its tokens: what does not come has
        to be put in place by `Restoration.fill`, or none is left.

        Args:
            seq: A fresh sequence.
            limit: Most tokens.
            attach: Attaches so many known pages, also those on their way; whether it did.

        Returns:
            Tokens that were on the device, or came with the state.
        """
        reused, tail = self._restore(seq, limit, attach)
        coming = seq.restoration
        loading = coming.tokens - coming.front if coming is not None else 0
        self.restorer.report(seq, reused, loading + tail, limit)
        return reused - loading

    def _restore(self, seq: Sequence, limit: int, attach: Callable[[int], bool]) -> tuple[int, int]:
        """Tries one state after the other; returns the tokens attached, and those in its tail."""
        self.store.expire()
        for length, block in self._candidates(seq, limit):
            pages = length // self.planner.page_size
            if self.restorer.match(seq, pages) < pages:
                continue
            values, tier = self._load(block)
            if values is None:
                continue
            if attach(pages) and self._attach_tail(seq, length, values):
                seq.fidelity = max(seq.fidelity, block.fidelity)
                self.store.touch([block])
                seq.state, tail = values, length - pages * self.planner.page_size
                hit = Hit(tier=tier, tokens=tail, n_bytes=block.n_bytes, tenant=seq.owner)
                self.store.bus.emit(hit)
                return length, tail
            if seq.restoration is not None:
                seq.restoration.abandon()
            self.planner.vacate(seq)
            self.planner.tables.lengths[seq.row] = 0
        return 0, 0

    def known(self, seq: Sequence) -> list[Block]:
        """Known states within a prompt."""
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
        """What a state holds, and the name of the tier that gave it."""
        for number, tier in enumerate(self.store.tiers):
            if block.tiers >> number & 1:
                found = self.store.read(block, number)
                if found is not None:
                    block.fidelity = found[0].fidelity  # copies, and who wrote them, may differ
                    try:
                        return decode_state(found[1]), tier.name
                    except StoreError:
                        self.store.forget(block)
                        return None, ""
        return None, ""

    def _attach_tail(self, seq: Sequence, length: int, values: dict[str, Any]) -> bool:
        """Puts the tokens behind the last full page in place; False if that cannot be."""
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
            for view, saved in zip(self._views(g, page), tail, strict=True):
                target = view[:, :, :count]
                alike = isinstance(saved, torch.Tensor) and saved.dtype is target.dtype
                if not alike or saved.shape != target.shape:
                    return False
                target.copy_(saved)
        self.planner.tables.lengths[seq.row] = length
        return True
