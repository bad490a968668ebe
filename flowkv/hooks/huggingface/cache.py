"""`PagedCache`: a `DynamicCache` whose K and V lie in pages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.layers import PAGED_STATE, PagedHybridLayer, PagedLayer
from flowkv.hooks.huggingface.plan import ModelPlan
from flowkv.hooks.huggingface.prefill import refuse_lost
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.states import Recurrent, release
from flowkv.hooks.huggingface.versions import (
    Cache,
    DynamicCache,
    LinearAttentionLayer,
    removed,
)

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.nested import Nested

SNAPSHOT_PAGES = 16
"""Recurrent states are saved at least every so many pages."""


class PagedCache(DynamicCache):  # type: ignore[misc]
    """A cache for one call of `generate`, one sequence per row.

    A subclass of `DynamicCache` because models and `EncoderDecoderCache` ask for one. A fresh
    native cache becomes one in place (`take_over`), so that whoever made it holds the same object.
    Whatever is done to it that pages cannot hold, writing to its keys above all, turns it back in
    place (`give_up`). Released, it gives its pages back; what was published stays known.

    Attributes:
        rows: Its sequences.
        plan: Its layers.
        recurrent: Its recurrent layers, if there are any.
        door: The attached model that it serves, or None.
        tenant: Whose pages it uses, if not the cache's own tenant's.
        care: `session`, `lease` and `retain` of its requests, as far as they were said.
        options: Arguments beside token ids that its first forward was given.
        fresh: Whoever made it saw it empty until its first forward was over.
        audits: Computes restored pages once more after the first forward, or None.
        drawn: Where random generators stood when its forward began; None where nobody draws.
        watched: Its forward began with a model as it was named.
        close: Releases it now instead of when nobody holds it any more.
    """

    rows: Rows
    plan: ModelPlan
    recurrent: Recurrent | None
    door: Any
    tenant: str | None
    care: Mapping[str, Any]
    options: dict[str, Any]
    fresh: bool
    audits: Nested | None
    drawn: tuple[bytes, ...] | None
    watched: bool
    unsteady: int
    close: weakref.finalize[..., PagedCache]
    _made: list[Any]

    def __init__(self, rows: Rows, plan: ModelPlan, door: Any = None) -> None:
        me = weakref.ref(self)
        layers = [_layer(rows, plan, index, me) for index in range(len(plan.specs))]
        Cache.__init__(self, layers=list(layers))
        self._made = layers
        self.rows, self.plan, self.door = rows, plan, door
        self.tenant, self.care, self.options, self.audits = None, {}, {}, None
        self.fresh, self.watched, self.drawn = False, False, None
        self.unsteady = 0 if door is None else door.identity.unsteady
        self.recurrent = Recurrent(plan, rows, layers) if plan.stateful else None
        # Works because neither rows nor layers refer to the cache.
        self.close = weakref.finalize(self, release, rows, rows.seqs, self.recurrent)
        self.close.atexit = False

    @classmethod
    def take_over(cls, cache: Any, rows: Rows, plan: ModelPlan, door: Any) -> PagedCache:
        """Turns a fresh native cache into a paged one, in place."""
        cache.__dict__.clear()
        cache.__class__ = cls
        cls.__init__(cache, rows, plan, door)
        return cache  # type: ignore[no-any-return]

    @property
    def paged(self) -> list[PagedLayer]:
        """Its layers in pages."""
        return [layer for layer in self._made if isinstance(layer, PagedLayer)]

    @property
    def reused(self) -> int:
        """Tokens that were known when it was made, over all rows."""
        return sum(seq.reused for seq in self.rows.seqs)

    def stays(self, *, computed: bool = False) -> bool:
        """Whether it is as FlowKV made it; otherwise it is a native cache from now on.

        Asked before anything is done with it. Somebody may have written to its keys and values, or
        put other layers into it; or this process was forked, and its pages are the parent's.

        Args:
            computed: A forward is just over, which writes to recurrent states itself.
        """
        if self.rows.kv.inherited or self.layers != self._made or self._edited():
            self.give_up(private=True)
            return False
        if not computed and self.recurrent is not None and self.recurrent.edited():
            self.rows.go_blind()
        return True

    def _edited(self) -> bool:
        return any(layer.edited() for layer in self.paged)

    def give_up(self, *, private: bool = False) -> None:
        """Becomes a native `DynamicCache` of the same content, in place, and so do its layers.

        Args:
            private: Nothing of it is to be published, states of recurrent layers included.

        Raises:
            StateError: Pages of it were on their way and did not come.
        """
        rows = self.rows
        rows.arrive()
        if private:
            rows.go_blind()
        for layer in self.paged:
            layer.become_native()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):  # of another cache: both advance it from now on
                layer.leave()
        close, kept = self.close, dict(self.__dict__)
        for name in PagedCache.__annotations__.keys() - {"close"}:
            kept.pop(name, None)
        self.__dict__.clear()
        self.__dict__.update(kept, left_pages=True)  # its copies know it, too
        self.__class__ = DynamicCache
        if not rows.kv.inherited:
            rows.abandon()
        close()

    def finish(self) -> None:
        """A forward of the model is over.

        Raises:
            StateError: It left out layers that cannot be had; the cache is as before it.
        """
        if not self.stays(computed=True):
            return
        try:
            self.rows.finish()
        except StateError:
            self.fail()
            refuse_lost(self.rows)
            raise
        if self.recurrent is not None:
            self.recurrent.mark()
            every = SNAPSHOT_PAGES * self.rows.kv.page_size
            if self.recurrent.due(every):
                self.recurrent.save()

    def fail(self) -> None:
        """A forward of the model failed: as before it, as far as that can be."""
        base, rows, self.audits = self.rows.base, self.rows, None
        stateful, anew = self.recurrent is not None, self.fresh and not self.rows.forwards
        if anew or (stateful and rows.step is not None):
            rows.go_blind()  # another prompt may follow; some states may be further than others
        if rows.step is not None:
            self.follow()
        rows.abandon()
        if anew or (stateful and rows.base < base):
            self.empty()

    def follow(self, kept: int | None = None) -> None:
        """Lets every layer agree with the rows again.

        Args:
            kept: Columns that are left, if that is all that happened.
        """
        for layer in self.paged:
            layer.follow(kept)

    # ---- what generation does to a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding and what was reused included."""
        if self.layers != self._made and not self.stays():
            return self.get_seq_length(layer_idx)
        if self.rows.step is None:
            return self.rows.base
        length: int = super().get_seq_length(layer_idx)
        return length

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens.

        Args:
            tokens_to_remove: Minus their number; a positive number is the length that remains.

        Raises:
            StateError: They reach behind a sliding window.
        """
        self.rows.alive()
        tokens = int(tokens_to_remove)  # assisted generation passes a tensor
        if not self.stays():
            return self.crop(tokens)
        self._each("crop", tokens)
        self.rows.crop(removed(tokens, self.rows.told))
        self.follow(self.rows.base)
        self._mark()
        return None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row `beam_idx[i]` row i: pages are shared, nothing is copied."""
        self._move("reorder_cache", beam_idx, beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps some rows."""
        every = torch.arange(len(self.rows.seqs), device=indices.device)
        self._move("batch_select_indices", indices, every[indices].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        rows = [row for row in range(len(self.rows.seqs)) for _ in range(repeats)]
        self._move("batch_repeat_interleave", repeats, rows)

    def _move(self, name: str, argument: Any, rows: list[int]) -> None:
        self.rows.alive()
        if not self.stays():
            getattr(self, name)(argument)
            return
        self._each(name, argument)
        self.rows.select(rows)
        self.follow()
        self._mark()

    def _each(self, name: str, *arguments: Any) -> None:
        """Does to what layers keep themselves what is done to the rows."""
        for layer in self.layers:
            if isinstance(layer, PagedHybridLayer):
                operation = getattr(LinearAttentionLayer, name, None)
                if operation is not None:
                    operation(layer, *arguments)
            elif not isinstance(layer, PagedLayer) and hasattr(layer, name):
                getattr(layer, name)(*arguments)

    def _mark(self) -> None:
        if self.recurrent is not None:
            self.recurrent.mark()

    def empty(self) -> None:
        """Forgets all tokens; those computed from now on begin a prompt again."""
        if self.recurrent is not None:
            self._each("reset")
        self.rows.crop(self.rows.told)
        self.follow()
        self._mark()

    def reset(self) -> None:
        """Forgets all tokens."""
        self.rows.alive()
        if not self.stays():
            self.reset()
            return
        self.rows.abandon()
        self._each("reset")
        self.rows.crop(self.rows.told)
        self.rows.go_blind()
        self.follow()
        self._mark()

    @property
    def is_linear(self) -> list[bool]:
        """Which layers keep a recurrent state and nothing else."""
        found: list[bool] = super().is_linear
        return [
            linear and not isinstance(layer, PagedHybridLayer)
            for linear, layer in zip(found, self.layers, strict=True)
        ]

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """An independent cache: pages are shared until one of the two writes."""
        self.rows.alive()
        if not self.stays():
            return deepcopy(self, memo)  # type: ignore[return-value]
        rows = self.rows.fork()
        twin = PagedCache(rows, self.plan, self.door)
        memo[id(self)] = twin
        own = ("layers", "_made", "rows", "recurrent", "close")
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        for old, new in zip(self.layers, twin.layers, strict=True):
            _copy_layer(old, new)
        twin._mark()
        return twin

    def __copy__(self) -> PagedCache:
        """Like a deep copy: two caches cannot advance the same rows."""
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a `DynamicCache` of the same content."""
        twin: Any = self.__deepcopy__({})
        if isinstance(twin, PagedCache):
            twin.give_up(private=True)
        return _itself, (twin,)


def _itself(cache: Any) -> Any:
    return cache


def _layer(rows: Rows, plan: ModelPlan, index: int, cache: weakref.ref[PagedCache]) -> Any:
    spec, placed = plan.specs[index], plan.placed.get(index)
    if placed is None:
        return spec.make()
    return (PagedHybridLayer if spec.hybrid else PagedLayer)(rows, placed, spec, cache)


def _copy_layer(old: Any, new: Any) -> None:
    """Copies what a layer keeps itself: plain attributes, and tensors as clones."""
    for name, value in vars(old).items():
        if not isinstance(old, PagedLayer) or name not in PAGED_STATE:
            new.__dict__[name] = _clone(value)


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return value
