"""Runs an unmodified model over packed rows: one forward for rows of any lengths, no padding.

The cache that the model is given holds nothing. Its layers hand new keys and values to the step
that is under way, and look to the model like layers without a past; where each token stands, it is
told by its position. Whether a model can be run so is not looked up but tried (`trial`).
"""

from __future__ import annotations

from typing import Any

import torch

from flowkv.core.errors import StateError
from flowkv.hooks.huggingface.door import Door
from flowkv.hooks.huggingface.packing import RUNNING, Packing, exact
from flowkv.hooks.huggingface.plan import LayerSpec, ModelPlan, PlacedLayer
from flowkv.hooks.huggingface.versions import Cache, CacheLayerMixin, DynamicCache
from flowkv.runtime.batch import Step


class PackedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer of a packed forward.

    Args:
        placed: Where its pages are.
        spec: What it keeps.
    """

    is_compileable, is_croppable, supports_early_init = False, False, False

    def __init__(self, placed: PlacedLayer, spec: LayerSpec) -> None:
        super().__init__()
        self.placed, self.is_initialized = placed, True
        self.window = spec.window if spec.kind == "sliding" else None

    @property
    def is_sliding(self) -> bool:
        """Whether it has a window."""
        return self.window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: it keeps nothing."""

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens into the pages of their rows.

        Args:
            key_states: `[1, Hk, N, D]`.
            value_states: `[1, Hk, N, Dv]`.
            *args: Ignored, as by the native layer.
            **kwargs: Likewise.

        Returns:
            The same tensors: by them, attention knows the layer.

        Raises:
            StateError: No packed forward is under way.
        """
        packing = RUNNING.get()
        if packing is None:
            raise StateError("this cache belongs to a forward that is over", "Make another one")
        packing.write(self.placed, self.window, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """0: what came before differs from row to row."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of the mask, first of them), as without a past."""
        return query_length, 0

    def get_max_length(self) -> int:
        """The window, or -1."""
        return -1 if self.window is None else self.window


class PackedForward:
    """Runs a model in a step, see `engine.runner.Forward`.

    Args:
        model: The model.
        door: Its door; held by the model's hooks.
        by_index: The model computes logits at given places only.
    """

    def __init__(self, model: Any, door: Door, *, by_index: bool) -> None:
        self._model, self._door, self._by_index = model, door, by_index
        self._plan: ModelPlan | None = None
        self._cache: Any = None

    def __call__(self, step: Step, last: torch.Tensor) -> torch.Tensor:
        """Logits behind some tokens of a step.

        Args:
            step: The step, with its token ids.
            last: int64 `[B]`: places in its tokens.

        Returns:
            `[B, V]`.

        Raises:
            StateError: The model has moved to another dtype or device since the rows were opened.
            Unpackable: Its rows would mix.
        """
        assert step.tokens is not None
        door, model = self._door, self._model
        device = model.get_input_embeddings().weight.device
        names = door.names
        last = last.to(device)
        given = {
            names.ids: step.tokens.to(device),
            names.positions: step.positions.to(device),
            "past_key_values": self._fresh(step),
            "use_cache": True,
        }
        if self._by_index:
            given["logits_to_keep"] = last
        running = RUNNING.set(Packing(step))
        try:
            with door.aside(), exact(device):
                logits = model(**given).logits[0]
        finally:
            RUNNING.reset(running)
        # Asked late: on a GPU the forward still runs, and what changed meanwhile is noticed.
        if model.training or (step.fills and not door.identity.same(model)):
            for seq in step.seqs:
                seq.publishable = False
        found: torch.Tensor = logits if self._by_index else logits[last]
        return found

    def _fresh(self, step: Step) -> Any:
        """The cache to give to the model, which keeps nothing between two forwards."""
        plan = self._door.plan
        if plan is not self._plan:
            if plan.geometry.groups != step.groups:
                raise StateError(
                    "the model has moved to another dtype or device since these rows were opened",
                    "Submit their requests again",
                )
            self._plan, self._cache = plan, _cache(plan)
        return self._cache


def _cache(plan: ModelPlan) -> Any:
    cache = object.__new__(DynamicCache)  # models ask for one
    layers = [
        PackedLayer(plan.placed[index], spec) if index in plan.placed else spec.make()
        for index, spec in enumerate(plan.specs)
    ]
    Cache.__init__(cache, layers=layers)
    return cache
