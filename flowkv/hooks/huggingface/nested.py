"""Nested forwards: the model runs over a few tokens of known prompts, inside its own forward.

What is computed so goes into the pages of the sequences themselves. Each nested forward sees a left
padded rectangle of its own: rows that have computed different numbers of tokens end at one column,
and a row that is further than the rectangle's first column keeps what it has (`Rows.uneven`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from flowkv.hooks.huggingface.cache import PagedCache
from flowkv.hooks.huggingface.fill import Fill
from flowkv.hooks.huggingface.inputs import Call
from flowkv.hooks.huggingface.plan import ModelPlan
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import DynamicCache, EncoderDecoderCache
from flowkv.runtime.cache import KV
from flowkv.runtime.sequence import Sequence

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.door import Door


class Part(NamedTuple):
    """What a nested forward computes of one row.

    Attributes:
        row: The row of the batch whose inputs it shares.
        seq: Where it goes. Its tokens are known beyond what is computed here.
        pad: Padding columns of the row.
        count: Tokens behind those that the sequence holds; at least one.
    """

    row: int
    seq: Sequence
    pad: int
    count: int  # type: ignore[assignment]


class Nested:
    """Runs a model over parts of prompts with the arguments of the forward that needs them.

    Args:
        door: Whose model it is; its hooks let nested forwards pass.
        model: The model.
        plan: Its layers.
        call: The forward that all of this is for.
        types: Token types of the whole prompts, by name, if there are any.
        fill: What fills placeholders of the whole prompts.

    Attributes:
        rows: Rows of the forward.
    """

    def __init__(
        self,
        door: Door,
        model: torch.nn.Module,
        plan: ModelPlan,
        call: Call,
        types: Mapping[str, torch.Tensor],
        fill: Fill,
    ) -> None:
        # Not the call itself: its cache would be held by what the cache holds.
        self._door, self._model, self._plan, self._names = door, model, plan, call.names
        self._fill, self.rows = fill, call.rows
        self._types = {name: _repeated(value, call.rows) for name, value in types.items()}
        self._mask, self._positions = call.mask, call.positions
        whole = call.given.get("past_key_values")
        self._paired = call.names.encoder or isinstance(whole, EncoderDecoderCache)
        self._given = given = dict(call.given)
        names = call.names
        for name in (names.ids, names.mask, names.positions, "past_key_values"):
            given.pop(name, None)
        for name in (*call.modal, *call.types):
            given.pop(name, None)
        for name, value in (("use_cache", True), ("logits_to_keep", 1)):
            if name in names.parameters:
                given[name] = value
        like = call.ids if call.ids is not None else call.given[names.embeds]
        self._device = like.device
        self._state: PagedCache | None = None

    @property
    def layers(self) -> Collection[int]:
        """The model's layers in pages."""
        return self._plan.placed.keys()

    @property
    def cut(self) -> bool:
        """Whether prompts can be gone on with anywhere: no layer keeps a state of its own."""
        return not self._plan.stateful

    def whole(self, part: Part) -> Part:
        """A part that is at least as long, and ends where the prompt can be cut."""
        stop = part.seq.length + part.count
        fitting = self._fill.whole(part.row, stop, self.kv.page_size)
        return part._replace(count=part.count + fitting - stop)

    def alone(self, row: int, first: int, stop: int) -> bool:
        """Whether a span of a row's tokens can be computed by itself."""
        return self._fill.parts(row, first, stop)

    @property
    def kv(self) -> KV:
        """Where the pages are."""
        return self._door.kv

    def compute(self, parts: Items[Part], awaits: Callable[[int], None] | None = None) -> None:
        """Computes the next tokens of some rows.

        Args:
            parts: At most one for each sequence.
            awaits: See `Step.awaits`.

        Raises:
            CapacityError: The pages do not fit.
        """
        # Models that make positions themselves count columns: each row keeps its own. What fills
        # placeholders is counted by models: none may be shown that are known already.
        together = self._positions is not None and not self._plan.stateful
        together = together and not self._fill.inputs
        for batch in [list(parts)] if together else [[part] for part in parts]:
            if batch:
                self._forward(batch, 0 if together else batch[0].pad, awaits)

    def _forward(self, parts: list[Part], pad: int, awaits: Callable[[int], None] | None) -> None:
        stops = [part.seq.length + part.count for part in parts]
        total, new = max(stops) + pad, max(part.count for part in parts)
        pads = [total - stop for stop in stops]
        cache = self._cache([part.seq for part in parts], pads, total - new)
        rows = cache.rows
        rows.begin(new)
        assert rows.step is not None
        rows.step.awaits = awaits
        try:
            with self._door.aside(), torch.no_grad():
                self._model(**self._inputs(parts, pads, total - new, cache))
        finally:
            rows.abandon()  # nothing, unless it failed: a hook has finished it

    def _cache(self, seqs: list[Sequence], pads: list[int], base: int) -> PagedCache:
        if self._state is not None and self._state.rows.seqs == seqs:
            return self._state  # recurrent layers go on in it
        rows = Rows(self.kv, seqs, pads, base, layers=len(self._plan.placed))
        rows.trusted = self._door.trusted
        rows.checked, rows.uneven = True, True
        cache = PagedCache(rows, self._plan, self._door)
        cache.close.detach()  # the sequences are somebody else's
        if self._plan.stateful:
            self._state = cache
        return cache

    # ---- inputs

    def _inputs(
        self, parts: list[Part], pads: list[int], base: int, cache: PagedCache
    ) -> dict[str, Any]:
        names, total = self._names, base + cache.rows.new
        ids = torch.from_numpy(np.zeros((len(parts), total - base), np.int64))
        for line, (part, pad) in enumerate(zip(parts, pads, strict=True)):
            known = part.seq.tokens[max(base - pad, 0) : total - pad].astype(np.int64)
            ids[line, total - base - len(known) :] = torch.from_numpy(known)
        given = _rows_of(self._given, [part.row for part in parts], self.rows)
        given[names.ids] = ids.to(self._device)
        given.update(self._more(parts, pads, base, total))
        given.update(self._fill.of(_spans(parts)))
        pair = EncoderDecoderCache(cache, DynamicCache()) if self._paired else cache
        given["past_key_values"] = pair
        return given  # type: ignore[no-any-return]

    def _more(
        self, parts: list[Part], pads: list[int], base: int, total: int
    ) -> dict[str, torch.Tensor]:
        """Mask, positions and token types of columns `[base, total)`."""
        names, mask, positions = self._names, self._mask, self._positions
        left, found = torch.tensor(pads, device="cpu")[:, None], {}
        if mask is not None or any(pads):
            seen = torch.arange(total, device="cpu") >= left
            found[names.mask] = seen.to(self._device, torch.int64 if mask is None else mask.dtype)
        if positions is not None:
            counted = (torch.arange(base, total, device="cpu") - left).clamp_min(0)
            shape = (*positions.shape[:-2], len(parts), total - base)
            counted = counted.to(positions.device, positions.dtype)
            found[names.positions] = counted.expand(shape).contiguous()
        for name, types in self._types.items():
            rows = []
            for part, pad in zip(parts, pads, strict=True):
                row = types[min(part.row, len(types) - 1), part.pad :]
                own = row[max(base - pad, 0) : total - pad]
                rows.append(torch.nn.functional.pad(own, (total - base - len(own), 0)))
            found[name] = torch.stack(rows)
        return found


def _spans(parts: Items[Part]) -> dict[int, tuple[int, int]]:
    return {part.row: (part.seq.length, part.seq.length + part.count) for part in parts}


def _repeated(types: torch.Tensor, rows: int) -> torch.Tensor:
    return types.repeat_interleave(max(rows // len(types), 1), 0)


def _rows_of(value: Any, rows: list[int], count: int) -> Any:
    """An argument with some rows of the batch only; tensors that count no rows as they are."""
    if rows == list(range(count)):
        return dict(value) if type(value) is dict else value
    if isinstance(value, torch.Tensor):
        return value[rows] if value.dim() and value.shape[0] == count else value
    if isinstance(value, Mapping):
        found = {key: _rows_of(item, rows, count) for key, item in value.items()}
        return found if type(value) is dict else type(value)(**found)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return type(value)([_rows_of(item, rows, count) for item in value])
    return value
