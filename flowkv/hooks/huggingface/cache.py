"""`PagedCache`: a `DynamicCache` whose K and V lie in pages."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.layers import PagedHybridLayer, PagedLayer
from flowkv.hooks.huggingface.plan import ModelPlan
from flowkv.hooks.huggingface.prefill import refuse_lost
from flowkv.hooks.huggingface.rows import Rows
from flowkv.hooks.huggingface.states import Recurrent, release
from flowkv.hooks.huggingface.versions import Cache, DynamicCache, removed

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.nested import Nested

SNAPSHOT_PAGES = 16
"""Recurrent states are saved at least every so many pages."""


class PagedCache(DynamicCache):  # type: ignore[misc]
    """A cache for one call of `generate`, one sequence per row.

    A subclass of `DynamicCache` because models and `EncoderDecoderCache` ask for one. A fresh
    native cache becomes one in place (`take_over`), so that whoever made it holds the same object.
    Released, it gives its pages back; what was published stays known.

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
    close: weakref.finalize[..., PagedCache]

    def __init__(self, rows: Rows, plan: ModelPlan, door: Any = None) -> None:
        layers = [_layer(rows, plan, index) for index in range(len(plan.specs))]
        Cache.__init__(self, layers=layers)
        self.rows, self.plan, self.door = rows, plan, door
        self.tenant, self.care, self.options, self.audits = None, {}, {}, None
        self.fresh, self.watched, self.drawn = False, False, None
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
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    @property
    def reused(self) -> int:
        """Tokens that were known when it was made, over all rows."""
        return sum(seq.reused for seq in self.rows.seqs)

    def give_up(self) -> None:
        """Becomes a native `DynamicCache` of the same content, in place."""
        layers = [x.as_native() if isinstance(x, PagedLayer) else x for x in self.layers]
        close, kept = self.close, dict(self.__dict__)
        for name in PagedCache.__annotations__:
            kept.pop(name, None)
        self.__dict__.clear()
        self.__dict__.update(kept, layers=layers)
        self.__class__ = DynamicCache
        close()

    def finish(self) -> None:
        """A forward of the model is over.

        Raises:
            StateError: It left out layers that cannot be had; the cache is as before it.
        """
        try:
            self.rows.finish()
        except StateError:
            self.fail()
            refuse_lost(self.rows)
            raise
        if self.recurrent is not None:
            every = SNAPSHOT_PAGES * self.rows.kv.page_size
            if self.recurrent.due(every):
                self.recurrent.save()

    def fail(self) -> None:
        """A forward of the model failed: as before it, as far as that can be."""
        base, rows, self.audits = self.rows.base, self.rows, None
        stateful, anew = self.recurrent is not None, self.fresh and not self.rows.forwards
        if anew or (stateful and rows.step is not None):
            rows.go_blind()  # another prompt may follow; some states may be further than others
        rows.abandon()
        if anew or (stateful and rows.base < base):
            self.empty()

    def follow(self) -> None:
        """Lets every layer agree with the rows again."""
        for layer in self.paged:
            layer.follow()

    # ---- what generation does to a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding and what was reused included."""
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
        for layer in self.layers:
            layer.crop(tokens)
        self.rows.crop(removed(tokens, self.rows.told))
        self.follow()

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
        for layer in self.layers:
            if hasattr(layer, name):
                getattr(layer, name)(argument)
        self.rows.select(rows)
        self.follow()

    def empty(self) -> None:
        """Forgets all tokens; those computed from now on begin a prompt again."""
        if self.recurrent is not None:
            for layer in self.recurrent.layers.values():
                layer.reset()
        self.rows.crop(self.rows.told)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.rows.alive()
        self.rows.abandon()
        for layer in self.layers:
            layer.reset()
        self.rows.crop(self.rows.told)
        self.rows.go_blind()
        self.follow()

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
        rows = self.rows.fork()
        twin = PagedCache(rows, self.plan, self.door)
        memo[id(self)] = twin
        own = ("layers", "rows", "recurrent", "close")
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k not in own})
        for old, new in zip(self.layers, twin.layers, strict=True):
            _copy_layer(old, new, memo)
        return twin

    def __copy__(self) -> PagedCache:
        """Like a deep copy: two caches cannot advance the same rows."""
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise StateError(
            "a FlowKV cache cannot be pickled", "Its pages are kept by a disk tier: disk='./kv'"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def _layer(rows: Rows, plan: ModelPlan, index: int) -> Any:
    spec, placed = plan.specs[index], plan.placed.get(index)
    if placed is None:
        return spec.make()
    return (PagedHybridLayer if spec.hybrid else PagedLayer)(rows, placed, spec)


def _copy_layer(old: Any, new: Any, memo: dict[int, Any]) -> None:
    """Copies what a layer keeps itself: plain attributes, and tensors as clones."""
    shared = ("rows", "placed", "spec", "pages", "batch", "_step", "_dense")
    for name, value in vars(old).items():
        if isinstance(old, PagedLayer) and name in shared:
            continue
        new.__dict__[name] = _clone(value, memo)


def _clone(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item, memo) for key, item in value.items()}
    if hasattr(value, "update") and hasattr(value, "get_seq_length"):  # a layer that left its pages
        twin = object.__new__(type(value))
        for name, item in vars(value).items():
            twin.__dict__[name] = _clone(item, memo)
        return twin
    return value
