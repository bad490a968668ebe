"""Runs a model over one row at a time, for models whose rows cannot be packed together.

Each row has a `PagedCache` of its own, so that whatever the model does with its cache it does as in
`generate`: recurrent states, chunked attention, positions that it counts itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.admission import Wish, admit
from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.door import Door
from flowkv.hooks.huggingface.inputs import Prompt, rectangle_inputs
from flowkv.hooks.huggingface.packing import exact
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.sequences import close_all
from flowkv.runtime.cache import KV
from flowkv.runtime.row import Asked, PagedRow
from flowkv.runtime.sequence import STOPS


class ApartRow(PagedRow):
    """A row with a cache of its own. While it is suspended, recurrent states stay where they are.

    Args:
        kv: Where its pages are.
        cache: Its cache.

    Attributes:
        cache: Its cache.
        damaged: A step failed in the middle of recurrent states, which cannot be taken back.
    """

    def __init__(self, kv: KV, cache: PagedCache) -> None:
        super().__init__(kv, cache.rows.seqs[0])
        self.cache, self.damaged = cache, False

    def close(self, stop: str = "") -> None:
        """See `Sequence.close`; recurrent states are kept for prompts that go on."""
        if stop:
            self.seq.stop = STOPS[stop]
        self.cache.close()


class Apart:
    """Runs rows one by one, see `engine.runner.Runner`.

    Args:
        model: The model.
        kv: The cache that it is attached to.
        door: Its door; held by the model's hooks.
    """

    together = False

    def __init__(self, model: Any, kv: KV, door: Door) -> None:
        self._model, self._kv, self._door = model, kv, door

    def open(self, request: Asked, tokens: NDArray[np.uint32], *, wait: bool) -> ApartRow:
        """See `engine.runner.Runner.open`. Rows with recurrent states always wait."""
        door, kv = self._door, self._kv
        door.refresh()
        plan = door.plan
        care = {"session": request.session, "lease": request.lease, "retain": request.retain}
        care = {name: value for name, value in care.items() if value not in (None, "", ())}
        most = len(tokens) - 1 if door.continues else 0
        wish = Wish(most, request.tenant, plan.stateful, care=care, wait=wait or plan.stateful)
        found = admit(kv, [Prompt(np.asarray(tokens), 0, list(request.salts))], wish)
        try:
            (seq,) = found.seqs
            rows = Rows(kv, found.seqs, [0], seq.length, layers=len(plan.placed))
            rows.trusted, rows.switch, rows.prefilling = door.trusted, door.identity.switch, False
            cache = PagedCache(rows, plan, door)
        except BaseException:
            close_all(found.seqs)
            raise
        cache.tenant, cache.care = request.tenant, care
        known = found.states
        if known is not None and (cache.recurrent is None or not cache.recurrent.restore(known)):
            cache.close()
            raise StateError(
                "a saved state does not fit the model", "Call kv.invalidate(), then try again"
            )
        return ApartRow(kv, cache)

    def step(self, rows: Items[Any], tokens: Items[NDArray[np.uint32]]) -> torch.Tensor:
        """See `engine.runner.Runner.step`; exactly one row.

        Raises:
            StateError: The row failed before in the middle of its recurrent states.
        """
        ((row, fresh),) = zip(rows, tokens, strict=True)
        if row.damaged:
            raise StateError(
                "a step of this row failed in the middle of its recurrent states",
                "Submit its request again",
            )
        model, cache, own = self._model, row.cache, row.cache.rows
        own.alive()
        if own.base != row.seq.length:
            own.rebase(row.seq.length)  # what was on its way is there
        if model.training:
            own.go_blind()
        device = model.get_input_embeddings().weight.device
        ids = torch.from_numpy(np.asarray(fresh, np.int64))[None]
        given = rectangle_inputs(self._door.names, ids, own.base, own.pads, device)
        own.begin(ids.shape[1])
        try:
            own.note(ids, None)
            with self._door.aside(), torch.no_grad(), exact(device):
                logits: torch.Tensor = model(past_key_values=cache, **given).logits[:, -1]
        except BaseException:
            row.damaged = cache.recurrent is not None
            raise
        finally:
            own.abandon()  # nothing, unless it failed: a hook has finished it
        return logits
