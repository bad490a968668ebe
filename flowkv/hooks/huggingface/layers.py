"""Cache layers whose K and V lie in pages, beside a recurrent state or not."""

from __future__ import annotations

import weakref
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flowkv import kernels
from flowkv.hooks.huggingface.plan import LayerSpec, PlacedLayer
from flowkv.hooks.huggingface.prefill import refuse_lost
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import CacheLayerMixin, LinearAttentionLayer
from flowkv.hooks.huggingface.views import PagedView
from flowkv.kernels.operands import Pages, Ragged

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.cache import PagedCache


PAGED_STATE = frozenset(
    ("rows", "placed", "spec", "pages", "batch", "_cache", "_step", "_gathered", "_views")
)
"""Attributes of a layer that are no other layer's."""


class Gathered(NamedTuple):
    """K and V that were taken out of pages, as somebody holds them and may write to them.

    Attributes:
        keys: `[B, Hk, S, D]`.
        values: `[B, Hk, S, Dv]`.
        versions: How often torch saw them written to when they were taken out.
        asked: Somebody beside the model's forward was given them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    versions: tuple[int, int]
    asked: bool

    @property
    def written(self) -> bool:
        """Whether torch has seen a write since."""
        return (_version(self.keys), _version(self.values)) != self.versions

    def last(self, columns: int) -> Gathered:
        """The last columns, of the same memory."""
        if columns == self.keys.shape[2]:
            return self
        first = self.keys.shape[2] - columns
        return self._replace(keys=self.keys[:, :, first:], values=self.values[:, :, first:])


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a `PagedCache`.

    To the model it looks like the layer it replaces, lengths and window included; only K and V are
    elsewhere. Where they are not what the geometry says (another dtype, device or shape), or
    somebody writes to them, the cache turns into a native one, layers in place, for the rest of its
    life, and nothing more is published.

    Attributes:
        rows: The sequences of the cache.
        index: The model's layer index.
        window: Sliding window, or None.
        chunked: Attention is chunked: only ever read dense.
        shape: (Hk, D, Dv, dtype, device) that K and V must have.
        pages: This layer of all pages, of the step.
        batch: Rows of the step.
        columns: Columns that the layer shows in the step.

    Args:
        rows: The sequences of the cache.
        placed: Where its pages are.
        spec: What it keeps.
        cache: The cache that it is made for.
    """

    is_compileable, is_croppable, supports_early_init = False, True, False

    def __init__(
        self,
        rows: Rows,
        placed: PlacedLayer,
        spec: LayerSpec,
        cache: weakref.ref[PagedCache],
    ) -> None:
        super().__init__()
        self._cache = cache
        self.rows, self.placed, self.spec, self.index = rows, placed, spec, placed.index
        self.window = spec.window if spec.kind == "sliding" else None
        self.shown = spec.window  # of sliding and chunked layers: as the native layer keeps them
        self.chunked, self.shape = spec.kind == "chunked", placed.shape
        self.columns, self.record_past = 0, False
        self.dtype, self.device = placed.shape[3:]
        self.pages: Pages
        self.batch: Ragged
        self._step: object = None
        self._gathered: Gathered | None = None
        self._views: list[weakref.ref[PagedView]] = []
        self.is_initialized = True

    @property
    def is_sliding(self) -> bool:
        """Whether the native layer would keep a window only."""
        return self.shown is not None

    @property
    def seen(self) -> int:
        """Columns written."""
        return self.rows.total if self.in_step else self.rows.base

    @property
    def in_step(self) -> bool:
        """Whether the step that wrote its newest tokens is still open."""
        return self._step is not None and self._step is self.rows.step

    # ---- what the model calls

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: shapes are known beforehand."""

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens into pages.

        Args:
            key_states: `[B, Hk, T, D]`.
            value_states: `[B, Hk, T, Dv]`.
            *args: Ignored, as by the native layer.
            **kwargs: Likewise.

        Returns:
            K and V of the columns that the layer shows: the given ones if there are no others, else
            views for FlowKV's attention, or dense tensors for any other.
        """
        rows, cache = self.rows, self._cache()
        if rows.step is None or rows.step is self._step:
            stays = self._own_step(key_states)
        else:
            stays = not self.edited()
        if not stays or not self._expected(key_states, value_states):
            return self.leave().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        rows.updated += 1
        self._step = rows.step
        found = self._write(key_states, value_states)
        if rows.driven and rows.updated == rows.layers and (cache is None or cache.stays()):
            rows.finish()
        return found

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, step = self.rows, self.rows.step
        assert step is not None
        self.pages, self.batch = step.pages(self.index), step.batch(self.placed.group)
        self._gathered, self._views = None, []
        backend = self.placed.backend
        kernels.append(rows.pack(k), rows.pack(v), self.pages, self.batch, backend=backend)
        step.appended(self.index)
        self.batch = step.batch(self.placed.group)  # pages may have been put in place meanwhile
        self.columns = self._shown(rows.base) + rows.new
        if rows.base == 0:
            return k, v
        if rows.driven or not self.placed.in_pages:
            return self.dense()
        views = PagedView(self, 0, k, self.columns), PagedView(self, 1, v, self.columns)
        self._views = [weakref.ref(view) for view in views]
        return views

    def _own_step(self, k: torch.Tensor) -> bool:
        """Begins a step that no hook has begun; False if that cannot be done in pages."""
        rows, cache = self.rows, self._cache()
        rows.alive()
        if (rows.step is not None and not rows.driven) or (cache and not cache.stays()):
            return False  # called twice in one forward: a native layer would append twice
        rows.finish()  # of a forward that left layers out
        rows.land()  # nobody computes meanwhile
        refuse_lost(rows)
        rows.expand(k.shape[0])
        rows.begin(k.shape[2], driven=True)
        return True

    def _expected(self, k: torch.Tensor, v: torch.Tensor) -> bool:
        heads, dim, dim_v, dtype, device = self.shape
        return (
            k.dtype is dtype
            and v.dtype is dtype
            and k.shape == (len(self.rows.seqs), heads, self.rows.new, dim)
            and v.shape[1:] == (heads, self.rows.new, dim_v)
            and k.device == device
        )

    def _shown(self, seen: int) -> int:
        return seen if self.shown is None else min(seen, self.shown - 1)

    def touched(self) -> None:
        """The model computes with its K and V itself: later steps hand it tensors at once."""
        self.placed.in_pages = False

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the columns it shows, gathered once a step."""
        if self._gathered is None:
            self._gathered = self._hold(self._gather(self.columns), asked=False)
        return self._gathered[:2]

    # ---- lengths, as the native layer tells them

    def get_seq_length(self) -> int:
        """Columns seen, those dropped behind a window included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, first of them) for `query_length` new ones."""
        shown = self._shown(self.seen)
        return shown + query_length, self.seen - shown

    def get_max_length(self) -> int:
        """The window, or -1."""
        return -1 if self.shown is None else self.shown

    def activate_past_recording(self) -> None:
        """Nothing to do: pages behind a window stay for a while, see `KV.truncate`."""
        self.record_past = True

    # ---- K and V for whoever asks, and may write to them

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, Hk, S, D]`, the same until the next forward; None before the first token."""
        return self._shows("keys")

    @keys.setter
    def keys(self, given: Any) -> None:
        """Leaves pages, for this cache only; the base class sets None at first."""
        if "rows" in self.__dict__:
            self.leave().keys = given

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, Hk, S, Dv]`, likewise."""
        return self._shows("values")

    @values.setter
    def values(self, given: Any) -> None:
        """Leaves pages, for this cache only; the base class sets None at first."""
        if "rows" in self.__dict__:
            self.leave().values = given

    def _shows(self, name: str) -> torch.Tensor | None:
        rows = self.__dict__.get("rows")
        if rows is None:
            return None
        if rows.kv.inherited:
            return getattr(self.leave(), name)  # type: ignore[no-any-return]
        if rows.step is None:
            rows.land()
        if not self.seen:
            return None
        if self._gathered is None:
            columns = self.columns if self.in_step else self._shown(self.seen)
            self._gathered = self._hold(self._gather(columns), asked=True)
        self._gathered = self._gathered._replace(asked=True)
        return getattr(self._gathered.last(self._shown(self.seen)), name)  # type: ignore[no-any-return]

    @staticmethod
    def _hold(pair: tuple[torch.Tensor, torch.Tensor], *, asked: bool) -> Gathered:
        return Gathered(*pair, (_version(pair[0]), _version(pair[1])), asked)

    def _gather(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, step = self.rows, self.rows.step
        rows.alive()
        if self.in_step:
            return kernels.gather_dense(self.pages, self.batch, columns)
        if step is None:
            with rows.reading(self.index, self.placed.group) as (pages, batch):
                return kernels.gather_dense(pages, batch, columns)
        # A forward is under way and has not reached this layer: leave its new columns out.
        pages, batch = step.pages(self.index), step.batch(self.placed.group)
        k, v = kernels.gather_dense(pages, batch, columns + rows.new)
        return k[:, :, :columns], v[:, :, :columns]

    def edited(self) -> bool:
        """Whether somebody has written to K or V that were taken out of pages."""
        held = self._gathered
        if held is None or held.written or not held.asked:
            return held is not None and held.written
        # Writes through `.data` or numpy are not counted.
        held = held.last(self._shown(self.seen))
        keys, values = self._gather(held.keys.shape[2])
        return not (_same(keys, held.keys) and _same(values, held.values))

    # ---- leaving pages

    def become_native(self) -> None:
        """Turns into a native layer with the same content, in place."""
        native, held = self.spec.make(), self._gathered
        if self.record_past and hasattr(native, "activate_past_recording"):
            native.activate_past_recording()
        for view in (known() for known in self._views):
            if view is not None and self.in_step:
                view.gathered = self.dense()[view.which]
        if self.seen:
            native.update(*self._gather(self.seen))
        if held is not None:
            shown = held.last(self._shown(self.seen))
            if native.keys.shape[2] == shown.keys.shape[2]:
                native.keys, native.values = shown.keys, shown.values
            else:  # a window that records its past has more than it shows
                native.keys[:, :, -shown.keys.shape[2] :] = shown.keys
                native.values[:, :, -shown.values.shape[2] :] = shown.values
        self._keep_state(native)
        self.__dict__.clear()
        self.__class__ = type(native)
        self.__dict__.update(native.__dict__)

    def _keep_state(self, native: Any) -> None:
        """Gives a native layer what is kept beside K and V."""

    def leave(self) -> Any:
        """Leaves pages with the whole cache; returns itself, which is a native layer now."""
        cache = self._cache()
        if cache is not None:
            cache.give_up(private=True)
        else:
            self.rows.go_blind()
            self.become_native()
        return self

    # ---- what is done to all layers of a cache is done to the rows; to one alone, natively

    def follow(self, kept: int | None = None) -> None:
        """Agrees with the rows again, after they were cropped, reordered or swapped.

        Args:
            kept: Columns that are left, if that is all that happened.
        """
        held, self._step, self._gathered, self._views = self._gathered, None, None, []
        if held is not None and held.asked and kept and self.shown is None:
            # As of a native layer, what was taken out and what is left share their memory.
            cut = held._replace(keys=held.keys[:, :, :kept], values=held.values[:, :, :kept])
            self._gathered = cut

    def crop(self, tokens_to_remove: int) -> None:
        """Leaves pages, and crops this layer alone."""
        self.leave().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Leaves pages, and reorders this layer alone."""
        self.leave().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Leaves pages, and repeats the rows of this layer alone."""
        self.leave().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Leaves pages, and selects rows of this layer alone."""
        self.leave().batch_select_indices(indices)

    def reset(self) -> None:
        """Leaves pages, and empties this layer alone."""
        self.leave().reset()

    def __copy__(self) -> Any:
        return copy(self.leave())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.leave(), memo)

    def offload(self) -> None:
        """Nothing: pages move on their own."""

    def prefetch(self) -> None:
        """Nothing: pages move on their own."""


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with attention in pages beside a recurrent state, kept as transformers keeps it."""

    is_compileable = False

    def __init__(
        self,
        rows: Rows,
        placed: PlacedLayer,
        spec: LayerSpec,
        cache: weakref.ref[PagedCache],
    ) -> None:
        PagedLayer.__init__(self, rows, placed, spec, cache)
        LinearAttentionLayer.__init__(self, spec.arguments.get("number_of_states", 1))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises states, which are named; attention needs nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        """Of states and attention."""
        LinearAttentionLayer.activate_past_recording(self)
        PagedLayer.activate_past_recording(self)

    crop, reorder_cache, reset = PagedLayer.crop, PagedLayer.reorder_cache, PagedLayer.reset

    def get_max_length(self) -> int:
        """The attention's."""
        return PagedLayer.get_max_length(self)

    @property
    def is_croppable(self) -> bool:
        """As the states say."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def _keep_state(self, native: Any) -> None:
        for name in vars(LinearAttentionLayer()):
            setattr(native, name, getattr(self, name))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
