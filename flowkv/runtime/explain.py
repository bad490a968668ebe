"""Says in words how much of a prompt is known, and what prevents more."""

from __future__ import annotations

import msgspec
import numpy as np

from flowkv.core.layout import CODECS
from flowkv.runtime.restore import Restorer
from flowkv.runtime.sequence import Sequence


class Explanation(msgspec.Struct, frozen=True):
    """What `KV.explain` found. `str()` of it is one line for people.

    Attributes:
        tokens: Length of the prompt.
        known: Tokens of it that need no computing.
        residency: Tokens of the known prefix by the nearest place that holds them.
        reason: Why the next token is not known.
        differs_at: First position where the nearest known prompt differs, if one was found.
    """

    tokens: int
    known: int
    residency: dict[str, int]
    reason: str
    differs_at: int | None = None

    def __str__(self) -> str:
        places = ", ".join(f"{n} on {place}" for place, n in self.residency.items())
        held = f" ({places})" if places else ""
        return f"{self.known} of {self.tokens} tokens are known{held}: {self.reason}"


def explain(restorer: Restorer, seq: Sequence, limit: int) -> Explanation:
    """Looks a fresh, empty sequence up without attaching anything. Callers hold the KV lock."""
    size, store, tokens = restorer.page_size, restorer.store, seq.tokens
    pages = restorer.match(seq, max(0, limit) // size)
    residency: dict[str, int] = {}
    for page_no in range(restorer.first(0, pages), pages):
        block = restorer.find(seq, 0, page_no)
        if block is not None:
            place = store.place(block)
            residency[place] = residency.get(place, 0) + size
    reason, differs = _reason(restorer, seq, pages, limit)
    return Explanation(len(tokens), pages * size, residency, reason, differs)


def _reason(restorer: Restorer, seq: Sequence, pages: int, limit: int) -> tuple[str, int | None]:
    size, store, tokens = restorer.page_size, restorer.store, seq.tokens
    if (pages + 1) * size > limit:
        left = len(tokens) - pages * size
        return f"the last {left} tokens fill no page, or hold the token that must run", None
    lossy = store.index.find(seq.key(0, pages))
    if lossy is not None and lossy.somewhere and lossy.fidelity > store.fidelity:
        codec = CODECS[lossy.fidelity]
        return f"what follows token {pages * size} is kept, but {codec} is too lossy here", None
    missing = _missing(restorer, seq, pages)
    if len(missing) < len(seq.blocks):
        groups = ", ".join(f"page {page} in layer group {g}" for g, page in missing.items())
        return f"known in some layer groups, but not {groups}", None
    at = pages * size
    fresh, realm = tokens[at : at + size], (seq.namespace, seq.tenant)
    below = store.index.children(seq.parent_key(0, pages))
    known = [block for block in below if (block.namespace, block.tenant) == realm]
    nearest = -1
    for block in known:
        if block.group == 0 and block.kind == "page" and block.tokens is not None:
            differing = np.flatnonzero(block.tokens != fresh)
            if len(differing) == 0 and block.key != seq.key(0, pages):
                return "the same tokens are known beside another image or encoder input", at
            nearest = max(nearest, int(differing[0]) if len(differing) else -1)
    if nearest >= 0:
        return f"token {at + nearest} differs from the nearest known prompt", at + nearest
    if pages == 0 and (others := _others(restorer, seq)):
        return f"no prompt of this tenant and model begins like this; {others}", None
    return f"nothing is known behind token {at}", None


def _missing(restorer: Restorer, seq: Sequence, pages: int) -> dict[int, int]:
    """Per group that prevents another page, the first page that is not known."""
    missing: dict[int, int] = {}
    for g in range(len(seq.blocks)):
        for page in range(restorer.first(g, pages + 1), pages + 1):
            if restorer.find(seq, g, page) is None:
                missing[g] = page
                break
    return missing


def _others(restorer: Restorer, seq: Sequence) -> str:
    foreign = sum(block.namespace != seq.namespace for block in restorer.store.index)
    if not foreign:
        return ""
    return f"{foreign} blocks belong to other models, weights, adapters or page sizes"
