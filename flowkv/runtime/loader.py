"""Brings blocks from tiers onto their device, verified, each held for the sequence that asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch

from flowkv.runtime.index import UNKNOWN, Block
from flowkv.runtime.pool import PagePool
from flowkv.runtime.store import Store
from flowkv.tiers.base import Load, Outcome


class Fetched(NamedTuple):
    """What came from one tier.

    Attributes:
        pages: Pages of the layer group that got most.
        n_bytes: Bytes of all groups.
        seconds: Time it took.
    """

    pages: int
    n_bytes: int
    seconds: float


def fetch(store: Store, blocks: Iterable[Block]) -> dict[str, Fetched]:
    """Loads blocks that are not on their device, and holds each that arrived.

    Args:
        store: Where they are known.
        blocks: Blocks without a device page.

    Returns:
        What came, by tier name.
    """
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.group, []).append(block)
    moved: dict[str, Fetched] = {}
    for group, wanted in groups.items():
        for number, tier in enumerate(store.tiers):
            missing = [b for b in wanted if b.page < 0 and b.tiers >> number & 1]
            if missing and store.answers(number):
                started = time.perf_counter()
                pages, n_bytes = _take(store, missing, group, number)
                before = moved.get(tier.name, Fetched(0, 0, 0.0))
                moved[tier.name] = Fetched(
                    max(before.pages, pages),
                    before.n_bytes + n_bytes,
                    before.seconds + time.perf_counter() - started,
                )
                store.loaded_bytes[tier.name] = store.loaded_bytes.get(tier.name, 0) + n_bytes
    return moved


def _take(store: Store, blocks: list[Block], group: int, number: int) -> tuple[int, int]:
    """Pages and bytes of a group that came from one tier, codec by codec."""
    pages = n_bytes = 0
    for block in blocks:
        if not store.codecs_on(block, number):
            store.unlist(block, number)
    for codec in store.forms[group].likely:
        these = [
            block
            for block in blocks
            if block.page < 0 and block.tiers >> number & 1
            if codec in store.codecs_on(block, number)
        ]
        if these:
            arrived = _fetch(store, these, group, number, codec)
            pages += arrived
            n_bytes += arrived * store.page_bytes(group, codec)
    return pages, n_bytes


def _fetch(store: Store, blocks: list[Block], group: int, number: int, codec: int) -> int:
    pages = store.try_allocate(group, len(blocks), codec)
    if pages is None:
        return 0
    pool, layout = store.pool(group), store.forms[group].layouts[codec]
    buffers = _buffers(pool, pages, layout.page_bytes)
    items = [
        Load(block.key, buffer.numpy().data, layout.fingerprint(), store.fidelity)
        for block, buffer in zip(blocks, buffers, strict=True)
    ]
    # A page whose load is overdue is lent until the tier has let go of it (DESIGN D10).
    answers, overdue = store.mover.load(number, items, partial(_late, store, group, pages))
    arrived = 0
    for item, (block, page, answer) in enumerate(zip(blocks, pages, answers, strict=True)):
        if answer.outcome is Outcome.HIT and answer.info is not None:
            if pool.device.type != "cpu":
                pool.page_bytes(page, layout.page_bytes).copy_(buffers[item])
            block.fidelity = answer.info.fidelity
            block.enter(number, codec)
            store.publish(block, page)
            store.hold(block)
            arrived += 1
            continue
        if item in overdue:
            store.lend(group, page)
        pool.release(page)
        guessed = block.codec_on(number) == UNKNOWN and codec != store.forms[group].likely[-1]
        if not (guessed and answer.reason == "layout"):  # else it may have the next codec
            store.not_served(block, number, answer)
    return arrived


def _late(store: Store, group: int, pages: list[int], item: int) -> None:
    store.give_back(group, pages[item])


def _buffers(pool: PagePool, pages: list[int], n_bytes: int) -> list[torch.Tensor]:
    """Where the tier puts the bytes: the pages themselves, or pinned memory beside a GPU."""
    if pool.device.type == "cpu":
        return [pool.page_bytes(page, n_bytes) for page in pages]
    return list(torch.empty(len(pages), n_bytes, dtype=torch.uint8, pin_memory=True))
