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
    resident = resident_pages(restorer, seq, pages)
    if resident:
        restorer.attach_resident(seq, resident)
    prospect = look(restorer, seq, resident, pages) if resident < pages else None
    if prospect is not None and not _worth(restores, prospect, restorer.page_size, computable):
        prospect.drop()
        prospect = None
    known = pages if prospect is not None else resident
    restorer.report(seq, known * restorer.page_size, (known - resident) * restorer.page_size, limit)
    if prospect is None:
        return None
    seq.restoration = Restoration(restores, restorer, seq, prospect, computable=computable)
    restores.pump()
    return seq.restoration


def _worth(restores: Restores, prospect: Prospect, size: int, computable: bool) -> bool:
    """Whether loading helps: where the front is computed meanwhile, if it does so for one page."""
    source, pages = prospect.sources[0], prospect.stop - prospect.resident
    layers = sum(len(group.layers) for group in restores.store.geometry.groups)
    page_bytes = source.cell_bytes * layers * size
    n_bytes = page_bytes if computable else page_bytes * pages
    return restores.gate.worth({source.tier: round(n_bytes)}, pages * size)
