"""The pages of a restored prefix that come from the back, and how they enter a sequence's line."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from flowkv.core.errors import StateError
from flowkv.policy.restore import Load
from flowkv.runtime.flights import Piece
from flowkv.runtime.inbound import Inbound
from flowkv.runtime.prospect import Prospect
from flowkv.runtime.restore import Restorer
from flowkv.runtime.sequence import Sequence


class Back:
    """Pages on their way, in every layer group. Callers hold the KV lock.

    Args:
        restorer: Knows windows.
        seq: Whose.
        prospect: What is to come.

    Attributes:
        index: Of each model layer: where it stands among all that have pages.
    """

    def __init__(self, restorer: Restorer, seq: Sequence, prospect: Prospect) -> None:
        self._restorer, self._planner, self._seq = restorer, restorer.planner, seq
        self._groups, self._tiers = prospect.inbound, prospect.tiers
        groups = self._planner.geometry.groups
        layers = sorted(layer for group in groups for layer in group.layers)
        self.index = {layer: index for index, layer in enumerate(layers)}
        self._stripes = [[self.index[layer] for layer in group.layers] for group in groups]

    def __iter__(self) -> Iterator[Inbound]:
        return (inbound for group in self._groups for inbound in group.values())

    @property
    def gone(self) -> bool:
        """Whether anything of it was forgotten meanwhile."""
        return any(inbound.block.gone for inbound in self)

    def tier_of(self, source: int) -> int:
        """Number of the tier that a source is; -1 where that is for each page to say."""
        return self._tiers[source]

    def pieces(self, op: Load) -> Iterator[Piece]:
        """What is not there of the cells of a load."""
        size = self._restorer.page_size
        pages = range(op.tokens.first // size, -(-op.tokens.stop // size))
        for group, stripes in zip(self._groups, self._stripes, strict=True):
            first, stop = (bisect_left(stripes, layer) for layer in op.layers)
            for inbound in (group[page] for page in pages if page in group):
                for there, run in groupby(range(first, stop), inbound.there):
                    if not there:
                        head, *others = run
                        yield Piece(inbound, head, 1 + len(others))

    def there(self, index: int) -> bool:
        """Whether a layer of all pages is there."""
        at = [stripes.index(index) if index in stripes else -1 for stripes in self._stripes]
        return all(
            inbound.there(stripe)
            for group, stripe in zip(self._groups, at, strict=True)
            for inbound in (group.values() if stripe >= 0 else ())
        )

    def room(self, pages: int) -> bool:
        """Whether so many pages can be computed beside those that are reserved."""
        store, taken = self._restorer.store, list[list[int] | None]()
        for g in range(len(self._groups)):
            taken.append(store.try_allocate(g, pages))
        for g, fresh in enumerate(taken):
            for page in fresh or ():
                store.pool(g).release(page)
        return None not in taken

    def reach(self, first: int, stop: int, good: Callable[[Inbound], bool]) -> int:
        """The most pages that every group has as far as its window reaches; at least `first`."""

        def has(g: int, page: int) -> bool:
            inbound = self._groups[g].get(page)
            return page < first or (inbound is not None and good(inbound))

        groups = range(len(self._groups))
        for g in groups:
            if self._planner.window(g) is None:
                stop = next((page for page in range(first, stop) if not has(g, page)), stop)
        sliding = [g for g in groups if self._planner.window(g) is not None]
        while stop > first and not all(
            has(g, page) for g in sliding for page in range(self._restorer.first(g, stop), stop)
        ):
            stop -= 1
        return stop

    # ---- the line

    def place(self, first: int, stop: int) -> None:
        """Puts pages `[first, stop)` into the line, also those that are not there yet.

        What lies behind a window now stays until `close`: the line may still be cut.
        """
        seq, planner = self._seq, self._planner
        planner.shorten(seq, first)
        for g, group in enumerate(self._groups):
            seen = self._restorer.first(g, stop)
            for page in range(first, stop):
                if page < seen:
                    planner.put(seq, g, page, -1)
                else:
                    group[page].place(seq)
            if not first:
                seq.first_page[g] = seen
            seq.published[g] = stop  # not before it is there
        self.drop([one.page_no for one in self if not first <= one.page_no < stop])
        planner.tables.lengths[seq.row] = stop * self._restorer.page_size

    def close(self, first: int, whole: int, stop: int) -> int:
        """Cuts the line to what is there, and makes that known.

        Args:
            first: Pages that were there before `place`.
            whole: Pages that there are with those that `place` put.
            stop: Pages that are there.

        Returns:
            Pages that are left.
        """
        seq, planner = self._seq, self._planner
        if stop < whole and seq.state is not None:  # of a recurrent layer: it fits all of it only
            stop, seq.state = 0, None
        for g in range(len(self._groups)):
            seen = self._restorer.first(g, stop)
            if stop > first and seq.first_page[g] < seen:
                planner.drop_before(seq, g, seen)
        if stop < whole:
            try:
                planner.shorten(seq, stop)
            except StateError:  # a step went on though it lacked pages: nothing of it is right
                planner.shorten(seq, 0)
        seq.published = [min(done, first) for done in seq.published]
        planner.publish(seq)
        return stop

    def fill(self, other: Sequence, stop: int) -> None:
        """Takes what is missing from another sequence; see `Restoration.fill`."""
        seq, planner, end = self._seq, self._planner, stop * self._restorer.page_size
        alike = other.planner is planner and min(other.length, other.known) >= end
        for g in range(len(self._groups)) if alike else ():
            alike &= other.key(g, stop - 1) == seq.key(g, stop - 1)
        if not alike:
            raise StateError(
                "a sequence of another prompt, or too short, cannot fill this one",
                f"Compute the same {end} tokens",
            )
        for inbound in self:
            if not inbound.complete:
                g, page = inbound.group, inbound.page_no
                inbound.fill(int(planner.tables.pages[g][other.row, page]))
        seq.fidelity = max(seq.fidelity, other.fidelity)

    def drop(self, pages: Iterable[int]) -> None:
        """Wants pages with these numbers no more."""
        numbers = set(pages)
        for group in self._groups:
            for page in numbers & group.keys():
                group.pop(page).drop()

    def clear(self) -> None:
        """Wants nothing any more; what is in the line stays there."""
        self.drop([inbound.page_no for inbound in self])
