"""What an engine needs to know about a Hugging Face model before it serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, TokenError, UnsupportedModelError
from flowkv.hooks.huggingface.apart import Apart
from flowkv.hooks.huggingface.attach import base_model, door_of
from flowkv.hooks.huggingface.beside import Beside
from flowkv.hooks.huggingface.door import Door
from flowkv.hooks.huggingface.inputs import MODEL_INPUTS
from flowkv.hooks.huggingface.packed import PackedForward
from flowkv.hooks.huggingface.trial import choose_way
from flowkv.runtime.cache import KV

_CHOICES = frozenset({"use_cache", "output_attentions", "output_hidden_states", "return_dict"})
"""Arguments of a model that generation knows as options of its own."""


class Parts(NamedTuple):
    """How an engine runs a model.

    Attributes:
        model: The model itself; of an adapter-wrapped one, its base.
        forward: Runs it over packed rows, for `engine.runner.Packed`; None if that cannot be.
        apart: Runs them otherwise, an `engine.runner.Runner`: beside each other, or one by one.
        reason: Why they cannot be packed; "" if they can.
        positions: Most tokens of a request, prompt and answer; None if the model names no bound.
        vocabulary: Token ids are below this.
        refresh: To be called before rows are opened: notices that the model has changed.
        check: Refuses token ids with options, where they do not say what is to be gone on with.
    """

    model: Any
    forward: PackedForward | None
    apart: Beside | Apart
    reason: str
    positions: int | None
    vocabulary: int
    refresh: Callable[[], None]
    check: Callable[[NDArray[np.uint32], Mapping[str, Any]], None]


def make_runner_parts(model: Any, kv: KV) -> Parts:
    """What an engine needs to know about an attached model. Runs it over a few tokens.

    Args:
        model: The model, as it was given to `flowkv.attach`.
        kv: What that returned.

    Raises:
        CapacityError: The cache has no room to try how rows run together.
        ConfigError: It is not attached to this cache.
        UnsupportedModelError: Token ids alone do not say what it is to go on with.
    """
    model = base_model(model)
    door = door_of(model)
    if door is None or door.kv is not kv or not door.hung:
        raise ConfigError(
            f"this {type(model).__name__} is not attached to this cache",
            "Attach it: kv = flowkv.attach(model, ...), and see what flowkv.verify(model) says",
        )
    if door.names.encoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} answers to an encoder's input, not to token ids alone",
            "Call its generate",
        )
    door.refresh()
    if door.identity.compiled:
        raise UnsupportedModelError(
            "parts of the model are compiled", "Serve the model that torch.compile was given"
        )
    way = choose_way(model, kv, door)
    return Parts(
        model,
        way.forward,
        way.runner,
        way.reason,
        _positions(door, model),
        int(model.config.get_text_config(decoder=True).vocab_size),
        door.refresh,
        partial(_check, door),
    )


def _positions(door: Door, model: Any) -> int | None:
    """Positions that a row may have; those of all rows are encoded alike up to there."""
    text = model.config.get_text_config(decoder=True)
    trained = getattr(text, "max_position_embeddings", None)
    switch = door.identity.switch
    bounds = [int(trained)] if trained else []
    return min([*bounds, *([] if switch is None else [switch - 1])], default=None)


def _check(door: Door, tokens: NDArray[np.uint32], options: Mapping[str, Any]) -> None:
    """Refuses what token ids do not say everything about.

    Raises:
        TokenError: A token stands for an image, audio, or the like.
        UnsupportedModelError: A request has inputs of the model beside token ids.
    """
    for name, token in door.names.placeholders.items():
        if (tokens == token).any():
            raise TokenError(
                f"the prompt holds token {token} ({name}), which stands for more than itself",
                "Call generate for prompts with images, audio or video",
            )
    inputs = (MODEL_INPUTS | frozenset(door.names.parameters)) - _CHOICES
    more = sorted(inputs & options.keys())
    if more:
        raise UnsupportedModelError(
            f"a request has inputs beside token ids: {', '.join(more)}", "Call generate for it"
        )
