"""Call of an unmodified model over packed rows: `[1, N]` tokens of rows of any lengths.

The cache argument of the model is empty. Its layers pass new keys and values to the running step,
and look to the model like layers without a past; the position argument gives the place of each
token in its row.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from flowkv.cache.step import Step
from flowkv.core.errors import StateError
from flowkv.core.interrupts import Setting
from flowkv.hooks.huggingface.attention import RUNNING, Packing, exact, packed_mask
from flowkv.hooks.huggingface.cache import LayerSpec, ModelPlan, PlacedLayer
from flowkv.hooks.huggingface.inputs import Names
from flowkv.hooks.huggingface.versions import Cache, DynamicCache, DynamicLayer
from flowkv.kernels.operands import sent


class PackedLayer(DynamicLayer):  # type: ignore[misc]
    """Cache layer of a packed forward, which stores no tensors and has no past.

    Args:
        placed: The layer's place in the pages.
        spec: The kind and window of the layer.
    """

    is_croppable = False

    def __init__(self, placed: PlacedLayer, spec: LayerSpec) -> None:
        super().__init__()
        self.placed, self.window = placed, spec.window if spec.kind == "sliding" else None
        self.is_sliding = self.window is not None

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens into the pages of their rows.

        Args:
            key_states: `[1, Hk, N, D]`.
            value_states: `[1, Hk, N, Dv]`.
            *args: Ignored, as by the native layer.
            **kwargs: Likewise.

        Returns:
            The same tensors, by which the attention function finds the layer.

        Raises:
            StateError: No packed forward is under way.
        """
        packing = RUNNING.get()
        if packing is None:
            raise StateError("this cache belongs to a forward that is over", "Make another one")
        packing.write(self.placed, self.window, key_states, value_states)
        return key_states, value_states


class PackedCall:
    """Call of a model over the packed tokens of a step.

    Args:
        model: The model, held weakly.
        names: The names of its arguments.
        masked: Pass a mask to the model, one for all of its layers. For transformers to make one
            takes as long as everything else that a step of one row does here.
    """

    def __init__(self, model: Any, names: Names, *, masked: bool) -> None:
        self._model, self._names, self._masked = weakref.ref(model), names, masked
        self._mask = packed_mask(0, None, torch.bool, "cpu")
        self._plan: ModelPlan | None = None
        self._cache: Any = None

    def __call__(self, step: Step, plan: ModelPlan, keep: torch.Tensor | None = None) -> Any:
        """Return the logits of the tokens of a step, `[1, N, V]`.

        Args:
            step: The step, with its token ids.
            plan: The layers of the model.
            keep: int64 `[B]`: the tokens with wanted logits; None for all.

        Raises:
            StateError: The model has moved to another dtype or device since the rows were opened.
            Unpackable: Its rows would mix.
        """
        assert step.tokens is not None
        model, names, count = self._model(), self._names, step.tokens.shape[1]
        assert model is not None
        device = model.get_input_embeddings().weight.device
        given = {
            names.ids: sent(step.tokens, device),
            names.positions: sent(step.positions, device),
            names.cache: self._fresh(step, plan),
            "use_cache": True,
        }
        if keep is not None:
            given["logits_to_keep"] = sent(keep, device)
        if self._masked:
            if self._mask.shape[2] != count or self._mask.device != device:
                self._mask = packed_mask(count, None, torch.bool, device)
            given[names.mask] = self._mask
        with Setting(RUNNING, Packing(step)), exact(device):
            return model(**given).logits

    def _fresh(self, step: Step, plan: ModelPlan) -> Any:
        """Return the cache argument of the model, which stores nothing between two forwards."""
        if plan is not self._plan:
            if plan.geometry.groups != step.groups:
                raise StateError(
                    "the model has moved to another dtype or device since these rows were opened",
                    "Submit their requests again",
                )
            self._plan, self._cache = plan, _cache(plan)
        return self._cache


def _cache(plan: ModelPlan) -> Any:
    cache = object.__new__(DynamicCache)  # some models check the class of their cache
    layers = [
        PackedLayer(plan.placed[index], spec) if index in plan.placed else spec.make()
        for index, spec in enumerate(plan.specs)
    ]
    Cache.__init__(cache, layers=layers)
    return cache
