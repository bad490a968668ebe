"""Cache layers whose K and V lie in pages, beside a recurrent state or not."""

from __future__ import annotations

from typing import Any

import torch

from flowkv import kernels
from flowkv.hooks.huggingface.plan import LayerSpec, PlacedLayer
from flowkv.hooks.huggingface.prefill import refuse_lost
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.versions import CacheLayerMixin, LinearAttentionLayer
from flowkv.hooks.huggingface.views import PagedView
from flowkv.kernels.operands import Pages, Ragged


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a `PagedCache`.

    To the model it looks like the layer it replaces, lengths and window included; only K and V are
    elsewhere. Where they are not what the geometry says (another dtype, device or shape), the layer
    turns into the native one, for the rest of its life, and nothing more is published.

    Attributes:
        rows: The sequences of the cache.
        index: The model's layer index.
        window: Sliding window, or None.
        chunked: Attention is chunked: only ever read dense.
        shape: (Hk, D, Dv, dtype, device) that K and V must have.
        pages: This layer of all pages, of the step.
        batch: Rows of the step.
        columns: Columns that the layer shows in the step.
        native: The native layer once it has turned into it.
    """

    is_compileable, is_croppable, supports_early_init = False, True, False

    def __init__(self, rows: Rows, placed: PlacedLayer, spec: LayerSpec) -> None:
        super().__init__()
        self.rows, self.placed, self.spec, self.index = rows, placed, spec, placed.index
        self.window = spec.window if spec.kind == "sliding" else None
        self.shown = spec.window  # of sliding and chunked layers: as the native layer keeps them
        self.chunked, self.shape = spec.kind == "chunked", placed.shape
        self.columns, self.record_past = 0, False
        self.native: Any = None
        self.pages: Pages
        self.batch: Ragged
        self._step: object = None
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None
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
        rows = self.rows
        if rows.step is None or rows.step is self._step:
            self._own_step(key_states)
        if self.native is None and not self._expected(key_states, value_states):
            self.leave_pages()
        rows.updated += 1
        self._step = rows.step
        if self.native is not None:
            found = self.native.update(key_states, value_states, *args, **kwargs)
        else:
            found = self._write(key_states, value_states)
        if rows.driven and rows.updated == rows.layers:
            rows.finish()
        return found  # type: ignore[no-any-return]

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, step = self.rows, self.rows.step
        assert step is not None
        self.pages, self.batch = step.pages(self.index), step.batch(self.placed.group)
        self._dense = None
        backend = self.placed.backend
        kernels.append(rows.pack(k), rows.pack(v), self.pages, self.batch, backend=backend)
        step.appended(self.index)
        self.batch = step.batch(self.placed.group)  # pages may have been put in place meanwhile
        self.columns = self._shown(rows.base) + rows.new
        if rows.base == 0:
            return k, v
        if rows.driven or not self.placed.in_pages:
            return self.dense()
        return PagedView(self, 0, k, self.columns), PagedView(self, 1, v, self.columns)

    def _own_step(self, k: torch.Tensor) -> None:
        rows = self.rows
        rows.alive()
        if rows.step is not None and not rows.driven:
            # Called twice in one forward: a native layer would append twice.
            self.leave_pages()
            return
        rows.finish()  # of a forward that left layers out
        rows.land()  # nobody computes meanwhile
        refuse_lost(rows)
        rows.expand(k.shape[0])
        rows.begin(k.shape[2], driven=True)

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
        if self._dense is None:
            self._dense = kernels.gather_dense(self.pages, self.batch, self.columns)
        return self._dense

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
        if self.native is not None and hasattr(self.native, "activate_past_recording"):
            self.native.activate_past_recording()

    # ---- K and V for whoever asks between two forwards

    @property
    def keys(self) -> torch.Tensor | None:
        """`[B, Hk, S, D]`, gathered anew at every use; None before the first token."""
        return self._kept(0)

    @keys.setter
    def keys(self, _: Any) -> None:
        """Ignored; the base class sets it."""

    @property
    def values(self) -> torch.Tensor | None:
        """`[B, Hk, S, Dv]`, likewise."""
        return self._kept(1)

    @values.setter
    def values(self, _: Any) -> None:
        """Ignored; the base class sets it."""

    def _kept(self, which: int) -> torch.Tensor | None:
        if "rows" not in self.__dict__:
            return None
        if self.rows.step is None:
            self.rows.land()
        if not self.seen:
            return None
        if self.native is not None:
            return self.native.keys if which == 0 else self.native.values  # type: ignore[no-any-return]
        return self._gathered(self._shown(self.seen))[which]

    def _gathered(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
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

    # ---- leaving pages

    def as_native(self) -> Any:
        """A native layer with the same content."""
        native = self.spec.make()
        if self.record_past and hasattr(native, "activate_past_recording"):
            native.activate_past_recording()
        if self.seen:
            k, v = self._gathered(self.seen)
            native.update(k, v)
        return native

    def leave_pages(self) -> None:
        """Turns into the native layer: K and V are not what pages can hold."""
        if self.native is None:
            self.rows.go_blind()
            self.native = self.as_native()

    # ---- whole-cache operations: the cache moves the rows, a layer what is its own

    def follow(self) -> None:
        """Agrees with the rows again, after they were cropped, reordered or swapped."""
        self._step, self._dense = None, None

    def crop(self, tokens_to_remove: int) -> None:
        """Crops what it keeps itself."""
        if self.native is not None:
            self.native.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorders what it keeps itself."""
        if self.native is not None:
            self.native.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats what it keeps itself."""
        if self.native is not None:
            self.native.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selects of what it keeps itself."""
        if self.native is not None:
            self.native.batch_select_indices(indices)

    def reset(self) -> None:
        """Empties what it keeps itself."""
        self.native = None

    def offload(self) -> None:
        """Nothing: pages move on their own."""

    def prefetch(self) -> None:
        """Nothing: pages move on their own."""


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[misc]
    """A layer with attention in pages beside a recurrent state, kept as transformers keeps it."""

    is_compileable = False

    def __init__(self, rows: Rows, placed: PlacedLayer, spec: LayerSpec) -> None:
        PagedLayer.__init__(self, rows, placed, spec)
        LinearAttentionLayer.__init__(self, spec.arguments.get("number_of_states", 1))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialises states, which are named; attention needs nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        """Of states and attention."""
        LinearAttentionLayer.activate_past_recording(self)
        PagedLayer.activate_past_recording(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Of states and attention."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PagedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Of states and attention."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PagedLayer.reorder_cache(self, beam_idx)

    def reset(self) -> None:
        """Of states and attention."""
        LinearAttentionLayer.reset(self)
        PagedLayer.reset(self)

    def get_max_length(self) -> int:
        """The attention's."""
        return PagedLayer.get_max_length(self)

    @property
    def is_croppable(self) -> bool:
        """As the states say."""
        return bool(LinearAttentionLayer.is_croppable.fget(self))

    def as_native(self) -> Any:
        """A native hybrid layer with the same content."""
        native = PagedLayer.as_native(self)
        for name in vars(LinearAttentionLayer()):
            setattr(native, name, getattr(self, name))
        return native
