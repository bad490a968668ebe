"""`Repetition`: keeps of a prompt what a rule chooses by a second reading of it.

The prompt is read by a plain prefill, and then once more behind itself, part by part. What the
queries of the second reading look at is what a model needs to reproduce the prompt. What stays is
paged, named, stored and shared as what a press leaves.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch

from flowkv.hooks.huggingface.attention import OBSERVER, Switch
from flowkv.hooks.huggingface.press import Press, make_press
from flowkv.hooks.huggingface.thin import attention
from flowkv.naming.computation import code_of
from flowkv.policy.sparsify import Sparsifier, make_sparsifier

_PART = 128
"""Tokens of the prompt that are read again at a time."""


class Repetition(Press):
    """A rule of FlowKV with `repeats`, as the sparsifier of an attached model.

    Args:
        given: The rule.
    """

    def __init__(self, given: Sparsifier) -> None:
        super().__init__(given)
        self.name = given.name or self.name

    def run(self, door: Any, model: Any, press: Any, given: dict[str, Any]) -> None:
        """Read a prompt twice, and leave in its cache what the rule keeps; see `Press.run`."""
        names = door.names
        ids, cache = given[names.ids], given[names.cache]
        length, mass = ids.shape[1], dict[int, torch.Tensor]()  # [Hk, Hq / Hk, S]
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if (
            most and length + min(length, _PART) > most
        ):  # a lookup beyond them breaks a GPU's stream
            raise ValueError(f"of {most} positions too few are left for a second reading")
        model(**given)

        def observe(index: int, keys: Any, query: torch.Tensor, how: dict[str, Any]) -> None:
            most = attention(query, keys(), how, [0])[0, ..., :length].amax(2)
            mass[index] = torch.maximum(most, mass.get(index, most))

        Switch(model).on()  # the copy attends by a function that gives queries to observers
        layers = {index: cache.layers[index] for index in door.plan.placed}
        for index, layer in layers.items():
            layer.update = partial(_update, WeakMethod(layer.update), partial(observe, index))
        for part in ids.split(_PART, 1):
            at = torch.arange(length, length + part.shape[1], device=ids.device)[None]
            model(**given | {names.ids: part} | ({} if names.counts else {names.positions: at}))
            cache.crop(-part.shape[1])
        for index, layer in layers.items():
            read = layer.keys[0], layer.values[0], mass[index].mean(1)
            own = [x.float().cpu().numpy() for x in read]
            slots = torch.from_numpy(press.keep(index, *own)).to(layer.keys.device, torch.int64)
            layer.keys, layer.values = (
                x.take_along_dim(slots[None, ..., None], 2) for x in (layer.keys, layer.values)
            )

    def words_of(self, press: Any) -> bytes:
        """Return the words that name the rule and what runs it; b"" if none do."""
        code = code_of(Repetition)
        return super().words_of([code, press]) if code else b""


def made_pruner(given: Any) -> Press | Sparsifier:
    """Make what drops tokens: a press, or a rule by its name or object.

    Raises:
        ConfigError: There is none of that name, or it cannot be used.
    """
    rule = make_press(given) or make_sparsifier(given)
    return Repetition(rule) if isinstance(rule, Sparsifier) and rule.repeats else rule


def _update(update: Any, observe: Any, *args: Any, **kwargs: Any) -> Any:
    """Update a layer of a cache, whose keys then give their queries to an observer.

    Neither holds itself, so that their memory is free at once, without a collection of cycles.
    """
    keys, values = update()(*args, **kwargs)
    setattr(keys, OBSERVER, partial(observe, ref(keys)))
    return keys, values
