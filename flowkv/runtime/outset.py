"""How a restore begins: what is on the device is attached, the rest set on its way."""

from __future__ import annotations

from flowkv.runtime.prospect import Prospect, look, resident_pages
from flowkv.runtime.restoration import Restoration
from flowkv.runtime.restore import Restorer
from flowkv.runtime.restores import Restores
from flowkv.runtime.sequence import Sequence


def begin(
    restores: Restores, restorer: Restorer, seq: Sequence, limit: int, *, computable: bool
) -> Restoration | None:
    """Attaches what is on the device of a prompt, and begins to load the rest.

    Callers hold the KV lock.

    Args:
        restores: Of the cache.
        restorer: Of the cache.
        seq: A fresh sequence.
        limit: Most tokens of the prefix.
        computable: See `Restoration`.

    Returns:
        None if nothing is to be loaded.
    """
    restorer.store.expire()
    pages = restorer.match(seq, max(0, limit) // restorer.page_size)
    prospect = _look(restores, restorer, seq, pages, computable)
    here = seq.length
    known = prospect.pages * restorer.page_size if prospect is not None else here
    restorer.report(seq, known, known - here, limit)
    return None if prospect is None else _launch(restores, restorer, seq, prospect, computable)


def begin_whole(restores: Restores, restorer: Restorer, seq: Sequence, pages: int) -> bool:
    """Attaches so many known pages, also those that are still on their way: all or none of them.

    Callers hold the KV lock.

    Returns:
        Whether they are attached. If not, the sequence may hold some of them.
    """
    prospect = _look(restores, restorer, seq, pages, computable=False)
    if prospect is None:
        return seq.length == pages * restorer.page_size
    restoration = _launch(restores, restorer, seq, prospect, computable=False)
    if restoration.settle() == pages * restorer.page_size:
        return True
    restoration.abandon()
    return False


def _look(
    restores: Restores, restorer: Restorer, seq: Sequence, pages: int, computable: bool
) -> Prospect | None:
    """Attaches what is on the device of known pages; finds the rest, if it is worth loading."""
    resident = resident_pages(restorer, seq, pages)
    if resident:
        restorer.attach_resident(seq, resident)
    prospect = look(restorer, seq, resident, pages) if resident < pages else None
    if prospect is not None and not _worth(restores, prospect, restorer.page_size, computable):
        prospect.drop()
        prospect = None
    return prospect


def _launch(
    restores: Restores, restorer: Restorer, seq: Sequence, prospect: Prospect, computable: bool
) -> Restoration:
    """Begins to load what was found."""
    restoration = Restoration(restores, restorer, seq, prospect, computable=computable)
    seq.restoration = restoration
    restores.pump()
    return restoration


def _worth(restores: Restores, prospect: Prospect, size: int, computable: bool) -> bool:
    """Whether loading helps: where the front is computed meanwhile, if it does so for one page."""
    source, pages = prospect.sources[0], prospect.stop - prospect.resident
    layers = sum(len(group.layers) for group in restores.store.geometry.groups)
    page_bytes = source.cell_bytes * layers * size
    n_bytes = page_bytes if computable else page_bytes * pages
    return restores.gate.worth({source.tier: round(n_bytes)}, pages * size)
