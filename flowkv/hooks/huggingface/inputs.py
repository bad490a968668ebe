"""Reads the arguments of one forward: token ids, padding, positions, and what else matters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowkv.core.keys import Salt
from flowkv.hooks.huggingface.fill import Fill, placeholder_ids
from flowkv.hooks.huggingface.salts import (
    column_salts,
    condition_salts,
    digest_of,
    place_salts,
    type_salts,
)
from flowkv.hooks.huggingface.versions import MODAL_INPUTS

TYPE_INPUTS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
_GRIDS = frozenset({"image_grid_thw", "video_grid_thw"})
_MODAL = MODAL_INPUTS | _GRIDS
MODEL_INPUTS = _MODAL | TYPE_INPUTS
"""Inputs beside token ids that some models take under `**kwargs`."""

_NEUTRAL = frozenset(
    """past_key_values use_cache return_dict logits_to_keep output_attentions output_hidden_states
    output_router_logits output_logits""".split()
)
"""Arguments that do not change K and V."""


class Names(NamedTuple):
    """What a model calls its arguments.

    Attributes:
        parameters: All of its forward, in order, with their defaults.
        encoder: It has an encoder, so that the decoder's arguments are called `decoder_...`.
        placeholders: Token ids that images and the like replace, by name.
    """

    parameters: dict[str, Any]
    encoder: bool
    placeholders: dict[str, int]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Names:
        """Those of a model."""
        config: Any = model.config
        signature = list(inspect.signature(type(model).forward).parameters.values())[1:]
        parameters = {one.name: one.default for one in signature}
        encoder = bool(getattr(config, "is_encoder_decoder", False))
        return cls(
            parameters, encoder and "decoder_input_ids" in parameters, placeholder_ids(config)
        )

    @property
    def ids(self) -> str:
        """Of the token ids."""
        return "decoder_input_ids" if self.encoder else "input_ids"

    @property
    def mask(self) -> str:
        """Of the padding mask."""
        return "decoder_attention_mask" if self.encoder else "attention_mask"

    @property
    def positions(self) -> str:
        """Of the positions."""
        return "decoder_position_ids" if self.encoder else "position_ids"

    @property
    def embeds(self) -> str:
        """Of embeddings given instead of token ids."""
        return "decoder_inputs_embeds" if self.encoder else "inputs_embeds"


def rectangle_inputs(
    names: Names,
    ids: torch.Tensor,
    base: int,
    pads: NDArray[np.int64],
    device: torch.device,
) -> dict[str, Any]:
    """What `generate` gives to a forward over left-padded rows that continue a cache.

    Args:
        names: What the model calls its arguments.
        ids: int64 `[B, T]`: the next tokens of each row.
        base: Columns in the cache, padding included.
        pads: int64 `[B]`: padding columns of each row.
        device: Where the model takes them.

    Returns:
        The arguments beside the cache; logits are wanted behind the last column alone.
    """
    left, end = torch.from_numpy(pads).to(device)[:, None], base + ids.shape[1]
    given = {names.ids: ids.to(device), "use_cache": True}
    if names.mask in names.parameters:
        given[names.mask] = (torch.arange(end, device=device) >= left).long()
    if names.positions in names.parameters:
        given[names.positions] = torch.arange(base, end, device=device) - left
    if "logits_to_keep" in names.parameters:
        given["logits_to_keep"] = 1
    return given


class Prompt(NamedTuple):
    """One row of a first forward.

    Attributes:
        tokens: Ids without padding.
        pad: Padding columns before them.
        salts: What K and V depend on beside them.
    """

    tokens: NDArray[np.uint32]
    pad: int
    salts: list[Salt]


class Call:
    """One forward's arguments.

    Attributes:
        ids: `[B, T]` token ids, or None.
        mask: What was given as mask, or None.
        positions: `[..., T]`, or None.
        keep: Positions at the end whose logits are wanted; 0 for all.
        modal: Inputs that fill placeholders.
        problem: Why the forward's K and V cannot be named by its token ids; "" if they can.

    Args:
        names: What the model calls its arguments.
        given: The arguments, by name.
    """

    def __init__(self, names: Names, given: dict[str, Any]) -> None:
        self.names, self.given = names, given
        self.ids: torch.Tensor | None = given.get(names.ids)
        self.mask: torch.Tensor | None = given.get(names.mask)
        self.positions: torch.Tensor | None = given.get(names.positions)
        wanted = given.get("logits_to_keep", 0) if "logits_to_keep" in names.parameters else 0
        self.keep = wanted if isinstance(wanted, int) else 0
        self.modal: dict[str, Any] = {}
        self.types: dict[str, torch.Tensor] = {}
        self.condition: dict[str, Any] = {}
        self.problem = self._text_problem() or self._sort()

    @property
    def columns(self) -> int:
        """Columns of the forward, T."""
        ids = self.ids if self.ids is not None else self.given.get(self.names.embeds)
        return int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() > 1 else 0

    @property
    def rows(self) -> int:
        """Rows of the forward, B."""
        ids = self.ids if self.ids is not None else self.given.get(self.names.embeds)
        return int(ids.shape[0]) if isinstance(ids, torch.Tensor) else 0

    @property
    def wants_weights(self) -> bool:
        """The caller asks for attention weights."""
        return bool(self.given.get("output_attentions"))

    @property
    def skippable(self) -> bool:
        """Nobody misses what a forward that skips known tokens would not compute."""
        return (
            self.keep > 0 and not self.wants_weights and not self.given.get("output_hidden_states")
        )

    def _text_problem(self) -> str:
        if self.given.get(self.names.embeds) is not None:
            return "embeddings are given instead of token ids"
        ids = self.ids
        if ids is None or ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
            return "there are no token ids"
        if not ids.shape[0] > 0 or not ids.shape[1] > 0:
            return "there are no tokens"
        if self.given.get("cache_position") is not None:
            return "it is told its place in the cache by `cache_position`"
        if self.given.get("labels") is not None:
            return "labels are given"
        return ""

    def _sort(self) -> str:
        skip = {self.names.ids, self.names.mask, self.names.positions, self.names.embeds}
        for name, value in self.given.items():
            if name in skip or name in _NEUTRAL or self._absent(name, value):
                continue
            if name in TYPE_INPUTS and isinstance(value, torch.Tensor):
                if value.shape[-1] != self.columns or value.dim() != 2:
                    return f"`{name}` is not one number per token"
                self.types[name] = value
            elif self.names.encoder:
                self.condition[name] = value
            elif name in _MODAL:
                self.modal[name] = value
            elif _by_column(value, self.columns):
                return f"`{name}` may say something of every token"
            else:
                self.condition[name] = value
        return ""

    def _absent(self, name: str, value: Any) -> bool:
        """Whether an argument is as if it were not given."""
        default = self.names.parameters.get(name)
        unsaid = default is None or default is inspect.Parameter.empty
        return value is None if unsaid else value is default

    # ---- the first forward of a cache

    def pads(self) -> list[int] | None:
        """Padding columns of each row; None if the mask is more than left padding."""
        assert self.ids is not None
        rows, columns = self.ids.shape
        mask = self.mask
        if mask is None:
            return [0] * rows
        if not isinstance(mask, torch.Tensor) or mask.shape != (rows, columns):
            return None
        seen = mask.detach().cpu().numpy() != 0
        if bool((np.diff(seen.astype(np.int8), axis=1) < 0).any()) or not seen[:, -1].all():
            return None
        return (columns - seen.sum(1)).tolist()  # type: ignore[no-any-return]

    def prompts(self, pads: list[int], *, by_place: bool = False) -> tuple[list[Prompt], Fill]:
        """The rows with their salts, and what fills their placeholders.

        Args:
            pads: Padding columns of each row.
            by_place: The model treats rows by their place in the batch.

        Raises:
            TypeError: Something that K and V depend on has no digest.
        """
        assert self.ids is not None
        ids = self.ids.detach().cpu().numpy()
        if ids.min() < 0 or ids.max() >= 1 << 32:
            raise TypeError("token ids out of range have no digest")
        tokens = [row[pad:].astype(np.uint32) for row, pad in zip(ids, pads, strict=True)]
        fill = Fill(tokens, self.modal, self.names.placeholders)
        types = {name: value.cpu().numpy() for name, value in self.types.items()}
        found = []
        for row, pad in enumerate(pads):
            salts = condition_salts(self.condition, row, len(pads)) + fill.salts(row)
            salts += column_salts(pad, self.positions)
            salts += place_salts(row, len(pads)) if by_place else []
            for name, value in types.items():
                salts += type_salts(name, value[min(row, len(value) - 1), pad:].astype(np.int64))
            salts.sort(key=lambda salt: (salt.position, salt.digest))
            found.append(Prompt(tokens[row], pad, salts))
        return found, fill

    def skip(self, columns: int, modal: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments without their first `columns` columns, which are known.

        Args:
            columns: How many.
            modal: What fills the placeholders that are left; default as before.
        """
        given = dict(self.given)
        if columns:
            for name in (self.names.ids, self.names.positions, *self.types):
                if isinstance(given.get(name), torch.Tensor):
                    given[name] = given[name][..., columns:]
        if modal is not None:
            for name in self.modal:
                del given[name]
            given.update(modal)
        return given

    # ---- later forwards

    def conditioned(self, options: Mapping[str, Any]) -> bool:
        """Whether inputs beside token ids are what they were for an earlier forward."""
        mine = self.condition
        if mine.keys() != options.keys():
            return False
        changed = [name for name in mine if mine[name] is not options[name]]
        try:
            return all(digest_of(mine[name]) == digest_of(options[name]) for name in changed)
        except TypeError:
            return False

    @property
    def continues(self) -> bool:
        """Whether token ids say everything about a later forward."""
        if self.problem or self.modal:
            return False
        return not any(bool(value.any()) for value in self.types.values())


def _by_column(value: Any, columns: int) -> bool:
    """Whether something of a batch's input could be told of each of its columns.

    Then it would have to be cut where known tokens are skipped, and nobody knows how.
    """
    if isinstance(value, torch.Tensor) and value.is_nested:
        return True  # it has no shape to ask
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return columns > 1 and columns in value.shape
    if isinstance(value, Mapping):
        return any(_by_column(item, columns) for item in value.values())
    if isinstance(value, (list, tuple)):
        inner = any(_by_column(item, columns) for item in value)
        return inner or (columns > 1 and len(value) == columns)
    return False
