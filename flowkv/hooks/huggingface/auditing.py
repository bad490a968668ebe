"""Audits of an attached model: sampled pages of its prompts are computed once more and compared."""

from __future__ import annotations

from contextlib import suppress

from flowkv.core.errors import CapacityError
from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.nested import Part
from flowkv.runtime.audit import audit, due


def audit_rows(cache: PagedCache) -> None:
    """Audits what was restored for a cache, once; what is wrong is forgotten, and told.

    Args:
        cache: In no forward. Its `audits` computes, with the arguments of its first forward.
    """
    nested, cache.audits = cache.audits, None
    if nested is None:
        return
    rows, kv = cache.rows, cache.rows.kv
    size = kv.page_size
    for row, (seq, pad) in enumerate(zip(list(rows.seqs), rows.pads.tolist(), strict=True)):
        for page in due(kv, seq) if nested.cut else ():
            if not nested.alone(row, page * size, (page + 1) * size):
                continue  # an image lies across its border; it waits for another sequence
            with audit(kv, seq, page) as case:
                if case is not None:
                    with suppress(CapacityError):
                        nested.compute([Part(row, case.twin, pad, size)])
                    case.judge()
