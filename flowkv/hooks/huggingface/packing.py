"""One forward over packed rows, as an unmodified model's attention and masks see it.

The model is given one row `[1, N]`: the new tokens of all rows, one after the other, each at its
own position. Its masks and its attention must know which token belongs to which row, and the step
knows that. So while a packed forward runs, masks are only described (`PackedMask`), and attention
over the keys that a cache layer was just given goes to the step. Nothing else may happen to either:
what a model computes from them itself would mix the rows, and is refused (`Unpackable`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from flowkv.core.errors import UnsupportedModelError
from flowkv.hooks.huggingface.versions import causal_mask_function, overlay_window
from flowkv.runtime.batch import Step

if TYPE_CHECKING:
    from flowkv.hooks.huggingface.plan import PlacedLayer

RUNNING: ContextVar[Packing | None] = ContextVar("flowkv_packing", default=None)
"""The packed forward that runs in this thread."""


class Unpackable(UnsupportedModelError):
    """A model does something in which rows that are packed together would mix."""


class PackedMask(torch.Tensor):
    """The mask of a packed forward: causal within each row, windowed or not; never built.

    Attributes:
        window: The sliding window; None for plain causal.
    """

    window: int | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], window: int | None, dtype: torch.dtype, device: Any
    ) -> PackedMask:
        """A mask that looks like any other of this shape."""
        mask: PackedMask = torch.Tensor._make_wrapper_subclass(
            cls,  # type: ignore[arg-type]
            shape,
            dtype=dtype,
            device=device,
        )
        mask.window = window
        return mask

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Moving it to another device (`device_map`) keeps it; nothing else can be done with it."""
        wanted = kwargs or {}
        if func is torch.ops.aten._to_copy.default and wanted.get("device") is not None:
            (mask,) = args
            dtype = wanted.get("dtype") or mask.dtype
            return PackedMask(tuple(mask.shape), mask.window, dtype, wanted["device"])
        _refuse(f"the model computes with its mask ({func})")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedMask({tuple(self.shape)}, window={self.window})"


class _Written(NamedTuple):
    placed: PlacedLayer
    window: int | None
    key: torch.Tensor
    value: torch.Tensor


class Packing:
    """A packed forward under way.

    Args:
        step: Its rows and their pages.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._count = int(step.counts.sum())
        # Held by their objects: as long as they are here, no other tensor has the same id.
        self._written: dict[int, _Written] = {}
        self._masks: dict[tuple[int | None, torch.dtype], PackedMask] = {}

    def write(
        self, placed: PlacedLayer, window: int | None, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Puts the new keys and values of a layer into pages.

        Args:
            placed: The layer.
            window: Its sliding window, or None.
            key: `[1, Hk, N, D]`.
            value: `[1, Hk, N, Dv]`.

        Raises:
            Unpackable: They are not what the pages hold.
        """
        heads, dim, dim_v, dtype, device = placed.shape
        if key.shape != (1, heads, self._count, dim) or key.dtype is not dtype:
            _refuse(f"layer {placed.index} has keys {key.dtype} {tuple(key.shape)}")
        if value.shape != (1, heads, self._count, dim_v) or value.dtype is not dtype:
            _refuse(f"layer {placed.index} has values {value.dtype} {tuple(value.shape)}")
        if key.device != device:
            _refuse(f"layer {placed.index} has moved to {key.device}")
        self._step.write(placed.index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        self._written[id(key)] = _Written(placed, window, key, value)

    def mask(self, previous: str, arguments: dict[str, Any]) -> PackedMask:
        """The mask that a model asks for.

        Args:
            previous: Implementation that the model had before.
            arguments: What transformers asks mask functions.

        Raises:
            Unpackable: It is neither causal nor sliding, or more than that.
        """
        function, window = arguments.get("mask_function"), None
        if function is not causal_mask_function:
            window = overlay_window(function)
            if window is None:
                _refuse("a mask is neither causal nor a sliding window")
        if arguments.get("use_vmap") or arguments.get("attention_mask") is not None:
            _refuse("a mask is more than causality and a window")
        dtype = arguments.get("dtype", torch.float32) if previous == "eager" else torch.bool
        found = self._masks.get((window, dtype))
        if found is None:
            shape = (1, 1, self._count, self._count)
            found = PackedMask(shape, window, dtype, arguments.get("device", "cpu"))
            self._masks[window, dtype] = found
        return found

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
        obeyed: frozenset[str],
    ) -> torch.Tensor:
        """Attention of each row's new tokens over the row's own pages.

        Args:
            query: `[1, Hq, N, D]`.
            key: What the layer's cache returned.
            value: Likewise.
            mask: What the model's mask function returned.
            arguments: scaling, dropout and what else the model passes.
            obeyed: Those of them that are obeyed, or change nothing.

        Returns:
            `[1, N, Hq, Dv]`.

        Raises:
            Unpackable: It is not plainly that.
        """
        written = self._written.get(id(key))
        if written is None or written.value is not value:
            _refuse("attention is over other keys than the cache was given")
        if type(mask) is not PackedMask or mask.window != written.window:
            shown = mask.window if type(mask) is PackedMask else "no mask of ours"
            _refuse(f"a layer with window {written.window} is shown {shown}")
        for name, given in arguments.items():
            if given is not None and name not in obeyed:
                _refuse(f"attention is given {name!r}")
        if arguments.get("dropout") or arguments.get("is_causal") is False:
            _refuse("attention drops weights out, or is not causal")
        heads, dim = written.placed.shape[:2]
        rows, query_heads, count, query_dim = query.shape
        if (rows, count, query_dim) != (1, self._count, dim) or query_heads % heads:
            _refuse(f"queries are {tuple(query.shape)}")
        out = self._step.read(
            written.placed.index,
            query[0].transpose(0, 1),
            scale=arguments.get("scaling"),
            softcap=arguments.get("softcap"),
            sinks=arguments.get("s_aux"),
        )
        return out.unsqueeze(0)


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Keeps the autocast of whoever runs the engine out of keys and values."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _refuse(problem: str) -> NoReturn:
    raise Unpackable(f"rows cannot be packed: {problem}", "Let each row run by itself")
