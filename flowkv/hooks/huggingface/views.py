"""Tensors without storage: K and V that still lie in pages, and masks that nobody has built yet.

`Cache.update()` must return tensors, and an attention function receives no cache, only what
`update()` returned. So it returns a `PagedView`: a `torch.Tensor` wrapper subclass of the right
shape that knows its layer. FlowKV's attention takes the layer out of it and reads pages in place;
any other operation that touches it, whatever the model does, receives the dense tensor. Hence no
list of supported models is needed. `MaskRecipe` does the same for masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.layers import PagedLayer
    from flowkv.hooks.huggingface.rows import Rows


def solid(value: Any) -> Any:
    """The dense tensor behind a view or recipe; anything else unchanged."""
    return value.dense() if isinstance(value, (PagedView, MaskRecipe)) else value


def _touch(func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
    return func(*tree_map(solid, args), **tree_map(solid, kwargs or {}))


class PagedView(torch.Tensor):
    """K or V of one layer, `[B, Hk, S, D]`, as far as the layer shows it to the model.

    Attributes:
        layer: The cache layer it belongs to.
        which: 0 for keys, 1 for values.
        gathered: The tensor itself, once the layer has left its pages.
    """

    layer: PagedLayer
    which: int
    gathered: torch.Tensor | None
    # Otherwise torch would turn the dense results of operations into views again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, layer: PagedLayer, which: int, like: torch.Tensor, columns: int) -> PagedView:
        """A view of `columns` tokens, otherwise shaped like the new tokens `like`."""
        shape = like.shape
        view: PagedView = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            (shape[0], shape[1], columns, shape[3]),
            dtype=like.dtype,
            device=like.device,
        )
        view.layer, view.which, view.gathered = layer, which, None
        return view

    def dense(self) -> torch.Tensor:
        """The tensor itself, gathered from pages."""
        return self.layer.dense()[self.which] if self.gathered is None else self.gathered

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An operation of the model touches the view: it gets the tensor, later ones at once."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, PagedView) and value.gathered is None:
                value.layer.touched()
        return _touch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedView({tuple(self.shape)}, {'keys' if self.which == 0 else 'values'})"


class MaskRecipe(torch.Tensor):
    """The mask `[B, 1, T, S]` of a causal or sliding layer over cached tokens, not built.

    Attributes:
        build: Builds it in the format of the model's own attention; None if that needs none.
        arguments: What the mask function was called with.
        window: The sliding window; None for plain causal.
    """

    build: Callable[..., torch.Tensor | None]
    arguments: dict[str, Any]
    window: int | None
    _fits: tuple[Rows, int, bool] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        build: Callable[..., torch.Tensor | None],
        arguments: dict[str, Any],
        window: int | None,
        dtype: torch.dtype,
    ) -> MaskRecipe:
        """A recipe for `build(**arguments)`, which gives elements of `dtype`."""
        names = ("batch_size", "q_length", "kv_length")
        batch, new, length = (arguments[name] for name in names)
        recipe: MaskRecipe = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            (batch, 1, new, length),
            dtype=dtype,
            device=arguments.get("device", "cpu"),
        )
        recipe.build, recipe.arguments, recipe.window = build, arguments, window
        recipe._fits = None
        return recipe

    def native(self) -> torch.Tensor | None:
        """What the model's own mask function returns, None included."""
        return self.build(**self.arguments)

    def dense(self) -> torch.Tensor:
        """The mask as a tensor, also where the model's own attention would need none."""
        mask = self.build(**{**self.arguments, "allow_is_causal_skip": False})
        assert mask is not None
        return mask

    def fits(self, rows: Rows) -> bool:
        """Whether it says no more than causality, the window and the rows' own left padding."""
        known = self._fits
        if known is None or known[0] is not rows or known[1] != rows.total:
            fits = rows.padded_by(self.arguments.get("attention_mask"), rows.total)
            known = self._fits = (rows, rows.total, fits)
        return known[2]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Moving it to another device (`device_map`) keeps it a recipe; anything else builds it."""
        if func is torch.ops.aten._to_copy.default:
            wanted, recipe = dict(kwargs or {}), args[0]
            if wanted.get("device") is not None and wanted.get("dtype") in (None, recipe.dtype):
                arguments = dict(recipe.arguments, device=torch.device(wanted["device"]))
                mask = arguments.get("attention_mask")
                if isinstance(mask, torch.Tensor):
                    arguments["attention_mask"] = mask.to(arguments["device"])
                return MaskRecipe(recipe.build, arguments, recipe.window, recipe.dtype)
        return _touch(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"MaskRecipe({tuple(self.shape)}, window={self.window})"
