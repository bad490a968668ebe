"""Chunked prefill: a prompt that is shown bit by bit is looked up again with every bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowkv.core.errors import CapacityError
from flowkv.hooks.huggingface.admission import Wish, abort, admit, discard, uncount
from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.inputs import Call, Prompt
from flowkv.runtime.cache import KV


def extend(kv: KV, cache: PagedCache, call: Call) -> dict[str, Any]:
    """Skips what is known of a further chunk; returns the arguments that are left to compute.

    Args:
        kv: The cache's pages.
        cache: A cache of which only prompts were computed so far.
        call: The next chunk.
    """
    rows = cache.rows
    if not call.skippable or call.ids is None or call.ids.shape[0] != len(rows.seqs):
        return call.given
    rows.flush()
    if rows.blind or not rows.usual(call.columns, call.positions) or not rows.trusted(rows):
        return call.given
    most = rows.base + call.columns - call.keep
    if rows.switch is not None and rows.base + call.columns >= rows.switch:
        return call.given
    try:
        wish = Wish(most, cache.tenant, cache.plan.stateful, care=cache.care)
        found = admit(kv, _prompts(cache, call), wish)
    except CapacityError:
        return call.given
    gained = found.base - rows.base
    if gained <= 0:
        abort(kv, discard(kv, found.seqs))
        uncount(kv, -len(rows.seqs) * call.columns, 0)
        return call.given
    abort(kv, discard(kv, list(rows.seqs)))
    rows.seqs[:] = found.seqs
    rows.rebase(found.base)
    if cache.recurrent is not None and found.states is not None:
        cache.recurrent.restore(found.states)
    cache.follow()
    return call.skip(gained)


def _prompts(cache: PagedCache, call: Call) -> list[Prompt]:
    """Each row's tokens so far with the chunk's."""
    rows, found = cache.rows, []
    assert call.ids is not None
    ids = call.ids.cpu().numpy().astype(np.uint32)
    for row, (seq, pad) in enumerate(zip(rows.seqs, rows.pads.tolist(), strict=True)):
        known = seq.tokens[: max(rows.base - pad, 0)]
        fresh = ids[row, max(pad - rows.base, 0) :]
        found.append(Prompt(np.concatenate([known, fresh]), pad, list(seq.salts)))
    return found
