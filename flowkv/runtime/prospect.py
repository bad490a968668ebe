"""What of a prompt can be restored, and from where: looked up once, when it is opened."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from flowkv.core.layout import CODECS
from flowkv.policy.restore import Source
from flowkv.runtime.inbound import Inbound
from flowkv.runtime.restore import Restorer
from flowkv.runtime.sequence import Sequence


class Prospect(NamedTuple):
    """A known prefix that is not on its device.

    Attributes:
        pages: Of the whole prefix.
        resident: Leading ones that are on the device in every group.
        stop: One past the last page that is not.
        inbound: Per group: the pages behind the resident ones that are needed, by number.
        sources: Where they can be loaded from.
        tiers: Number of the tier of each source; -1 where pages lie on various ones.
    """

    pages: int
    resident: int
    stop: int
    inbound: list[dict[int, Inbound]]
    sources: tuple[Source, ...]
    tiers: tuple[int, ...]

    def drop(self) -> None:
        """Gives everything back."""
        for group in self.inbound:
            for page in group.values():
                page.drop()


def resident_pages(restorer: Restorer, seq: Sequence, pages: int) -> int:
    """Leading pages that are on their device, in every group and as far as windows reach."""

    def here(group: int, page: int) -> bool:
        block = restorer.find(seq, group, page)
        return block is not None and block.page >= 0

    groups = range(len(seq.blocks))
    for g in groups:
        if restorer.planner.window(g) is None:
            pages = next((page for page in range(pages) if not here(g, page)), pages)
    sliding = [g for g in groups if restorer.planner.window(g) is not None]
    while pages and not all(
        here(g, page) for g in sliding for page in range(restorer.first(g, pages), pages)
    ):
        pages -= 1
    return pages


def look(restorer: Restorer, seq: Sequence, resident: int, pages: int) -> Prospect | None:
    """Reserves the pages that a known prefix will lie in. Callers hold the KV lock.

    Args:
        restorer: Knows it.
        seq: Whose; its resident pages are attached, so that nothing evicts them.
        resident: How many those are.
        pages: All that are known.

    Returns:
        None if nothing of it can be loaded: it is out of reach for now, or does not fit.
    """
    while resident < pages:
        inbound: list[dict[int, Inbound]] = []
        for g in range(len(seq.blocks)):
            numbers = range(max(resident, restorer.first(g, pages)), pages)
            found = [(page, restorer.find(seq, g, page)) for page in numbers]
            inbound.append({n: Inbound(restorer.store, b, n) for n, b in found if b is not None})
        absent = [one for group in inbound for one in group.values() if not one.held]
        ways = _ways(restorer, absent)
        stop = max((one.page_no for one in absent), default=-1) + 1
        sources, tiers = _sources(restorer, absent, ways, (stop - resident) * restorer.page_size)
        prospect = Prospect(pages, resident, stop, inbound, sources, tiers)
        if sources and _reserve(restorer, absent, ways):
            return prospect
        prospect.drop()
        away = [one.page_no for one, way in zip(absent, ways, strict=True) if not way]
        if not away:
            return None
        pages = restorer.match(seq, min(away))  # as far as it can be reached
    return None


def _ways(restorer: Restorer, absent: list[Inbound]) -> list[dict[int, int]]:
    """For each page, the codec that it has on each tier that can be asked, the nearest first."""
    found = []
    for one in absent:
        ways: dict[int, int] = {}
        for source in restorer.store.sources(one.block):
            ways.setdefault(source.tier, source.codec)
        found.append(ways)
    return found


def _sources(
    restorer: Restorer, absent: list[Inbound], ways: list[dict[int, int]], tokens: int
) -> tuple[tuple[Source, ...], tuple[int, ...]]:
    """Tiers that have all of it, the most precise first; else one that stands for several."""
    if not ways or not all(ways):
        return (), ()
    store = restorer.store
    cells = tokens * sum(len(group.layers) for group in store.geometry.groups)

    def bytes_of(one: Inbound, codec: int) -> int:
        return store.page_bytes(one.group, codec)

    def source(tier: int, codecs: list[int]) -> Source:
        n_bytes = sum(map(bytes_of, absent, codecs))
        usual = Counter(codecs).most_common(1)[0][0]
        return Source(store.tiers[tier].name, CODECS[usual], n_bytes / cells)

    common = set.intersection(*(set(one) for one in ways))
    if common:
        made = {tier: source(tier, [one[tier] for one in ways]) for tier in sorted(common)}
        order = sorted(common, key=lambda tier: (CODECS.index(made[tier].codec), tier))
        return tuple(made[tier] for tier in order), tuple(order)
    nearest = [next(iter(one)) for one in ways]
    main = Counter(nearest).most_common(1)[0][0]
    codecs = [one[tier] for one, tier in zip(ways, nearest, strict=True)]
    return (source(main, codecs),), (-1,)


def _reserve(restorer: Restorer, absent: list[Inbound], ways: list[dict[int, int]]) -> bool:
    """Gives every page its place on the device; False if they do not fit."""
    wanted: dict[tuple[int, int], list[Inbound]] = {}
    for one, way in zip(absent, ways, strict=True):
        wanted.setdefault((one.group, next(iter(way.values()))), []).append(one)
    for (group, codec), those in wanted.items():
        taken = restorer.store.try_allocate(group, len(those), codec)
        if taken is None:
            return False
        for one, page in zip(those, taken, strict=True):
            one.take(page)
    return True
