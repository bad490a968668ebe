"""Brings blocks from tiers onto their device, verified, each held for the sequence that asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from flowkv.core import compiling
from flowkv.core.layout import granule_of
from flowkv.observe.events import Promoted
from flowkv.runtime.index import Block
from flowkv.runtime.pool import PagePool
from flowkv.runtime.store import Store
from flowkv.runtime.traffic import Source
from flowkv.tiers.base import Completion, Load, Outcome


class Fetched(NamedTuple):
    """What came from one tier.

    Attributes:
        pages: Pages of the layer group that got most.
        n_bytes: Bytes of all groups.
        seconds: Time it took.
        counted_s: The same as far as it says anything (`core.compiling`).
    """

    pages: int
    n_bytes: int
    seconds: float
    counted_s: float


class Landing(NamedTuple):
    """A device page that waits for a block's bytes.

    Attributes:
        block: Whose.
        source: Where from.
        page: Its id.
        buffer: Where the tier puts the bytes: the page itself, or memory beside a GPU.
        key: The block's key, which it may lose meanwhile.
    """

    block: Block
    source: Source
    page: int
    buffer: torch.Tensor
    key: bytes


def fetch(store: Store, blocks: Iterable[Block]) -> dict[str, Fetched]:
    """Loads blocks that are not on their device, and holds each that arrived.

    All tiers are asked at once, each for the blocks that it is the nearest place of; what one of
    them does not give is asked of the next.

    Args:
        store: Where they are known.
        blocks: Blocks without a device page.

    Returns:
        What came, by tier name.
    """
    waiting = [(block, store.sources(block)) for block in blocks]
    moved: dict[int, list[Landing]] = {}
    times: dict[int, list[tuple[float, float]]] = {}
    while waiting:
        started = time.perf_counter()
        arrived, waiting = _load(store, landings(store, waiting, store.try_allocate))
        for landing in arrived:
            moved.setdefault(landing.source.tier, []).append(landing)
        ended = time.perf_counter()
        took = ended - started, compiling.measured_s(started, ended)
        for tier in {landing.source.tier for landing in arrived}:
            times.setdefault(tier, []).append(took)
    return {store.tiers[n].name: _told(store, n, moved[n], times[n]) for n in sorted(moved)}


def landings(
    store: Store,
    waiting: Sequence[tuple[Block, Iterator[Source]]],
    allocate: Callable[[int, int, int], list[int] | None],
) -> list[tuple[Landing, Iterator[Source]]]:
    """Pages for the blocks that may be read from somewhere, group by group and codec by codec.

    Args:
        store: Where they are known.
        waiting: Blocks, and where each may be read from.
        allocate: `allocate(group, count, codec)`: private pages, or fewer than that.

    Returns:
        Where blocks will land, and where each may be read from if it does not.
    """
    wanted: dict[tuple[int, int], list[tuple[Block, Source, Iterator[Source]]]] = {}
    for block, path in waiting:
        source = next(path, None) if block.page < 0 else None
        if source is not None:
            wanted.setdefault((block.group, source.codec), []).append((block, source, path))
    prepared = []
    for (group, codec), those in wanted.items():
        pages = allocate(group, len(those), codec) or []
        buffers = _buffers(store.pool(group), pages, store.page_bytes(group, codec))
        for (block, source, path), page, buffer in zip(those, pages, buffers, strict=False):
            prepared.append((Landing(block, source, page, buffer, block.key), path))
    return prepared


def _load(
    store: Store, prepared: list[tuple[Landing, Iterator[Source]]]
) -> tuple[list[Landing], list[tuple[Block, Iterator[Source]]]]:
    """What arrived, each held, and what may be read from elsewhere."""
    places = [landing for landing, _ in prepared]
    # A page whose load is overdue is lent until the tier has let go of it (DESIGN D10).
    wishes = [(landing.source.tier, wish(store, landing)) for landing in places]
    answers, lent = store.mover.load(wishes, partial(_late, store, places))
    _bring(store, places, answers)
    arrived, again, fresh = [], [], list[Block]()
    for number, ((landing, path), answer) in enumerate(zip(prepared, answers, strict=True)):
        block = landing.block
        if number in lent:
            store.lend(block.group, landing.page)
        if land(store, landing, answer, brought=True):
            arrived.append(landing)
            fresh.append(block)
        elif block.page >= 0:  # a prefetch brought it, and counts its bytes
            arrived.append(landing._replace(buffer=landing.buffer[:0]))
        else:
            again.append((block, path))
            continue
        store.hold(block)
    store.insert(fresh)
    return arrived, again


def wish(store: Store, landing: Landing) -> Load:
    """What a tier is asked for a landing."""
    layout = store.forms[landing.block.group].fingerprints[landing.source.codec]
    return Load(landing.key, landing.buffer.numpy().data, layout, store.fidelity)


def _bring(store: Store, places: list[Landing], answers: Sequence[Completion]) -> None:
    """Copies what came to its pages, all at once, where those lie beside a GPU."""
    for landing, answer in zip(places, answers, strict=True):
        copies = store.pool(landing.block.group).copies
        if copies is not None and answer.outcome is Outcome.HIT:
            copies.upload(landing.buffer, granule_of(landing.page))
    for pool in store.pools.values():
        if pool.copies is not None:
            pool.copies.flush()


def land(store: Store, landing: Landing, answer: Completion, *, brought: bool = False) -> bool:
    """Publishes a page that came, or gives it back; whether it is the block's page now.

    Policies are to be told of it then (`Store.insert`).

    Args:
        store: Where its block is known.
        landing: The page.
        answer: What the tier says.
        brought: Whether its bytes lie in the page already, also where that is beside a GPU.
    """
    block, source, page, buffer, _ = landing
    pool = store.pool(block.group)
    if answer.outcome is Outcome.HIT and answer.info is not None:
        if block.page < 0 and not block.gone:
            if pool.copies is not None and not brought:
                pool.copies.upload(buffer, granule_of(page))
                pool.copies.flush()
            block.fidelity = answer.info.fidelity
            if block.tiers >> source.tier & 1:
                block.enter(source.tier, source.codec)
            store.publish(block, page)
            store.samples.came(block.key, store.tiers[source.tier].name)
            return True
        pool.release(page)  # it came by another way, or was forgotten meanwhile
        return False
    pool.release(page)
    if not block.gone and (source.last or answer.reason != "layout"):  # else: the next codec
        store.not_served(block, source.tier, answer)
    return False


def _told(
    store: Store, number: int, landings: list[Landing], times: list[tuple[float, float]]
) -> Fetched:
    """Counts and announces what came from one tier."""
    name, pages = store.tiers[number].name, dict[int, int]()
    n_bytes = sum(len(landing.buffer) for landing in landings)
    for landing in landings:
        pages[landing.block.group] = pages.get(landing.block.group, 0) + 1
    store.count_loaded(number, n_bytes)
    store.bus.emit(Promoted(source=name, tier="device", pages=len(landings), n_bytes=n_bytes))
    seconds, counted_s = (sum(column) for column in zip(*times, strict=True))
    known = all(counted for _, counted in times)
    return Fetched(max(pages.values()), n_bytes, seconds, counted_s if known else 0.0)


def _late(store: Store, landings: list[Landing], number: int) -> None:
    store.give_back(landings[number].block.group, landings[number].page)


def _buffers(pool: PagePool, pages: list[int], n_bytes: int) -> list[torch.Tensor]:
    """Where the tier puts the bytes: the pages themselves, or pinned memory beside a GPU."""
    if pool.copies is None:
        return [pool.page_bytes(page, n_bytes) for page in pages]
    return pool.copies.stage(len(pages), n_bytes)
