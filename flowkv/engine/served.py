"""What an engine knows of the model that it serves: how it is run, and what it cannot take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, UnsupportedModelError
from flowkv.engine.invariant import check_cache, invariant
from flowkv.engine.runner import Packed, Runner, own_model
from flowkv.engine.sampling import OwnSampler, Sampler
from flowkv.runtime.cache import KV

Check = Callable[[NDArray[np.uint32], Mapping[str, Any]], None]


class Served(NamedTuple):
    """A model as an engine serves it.

    Attributes:
        runner: Runs it.
        sampler: Reads how requests choose their tokens.
        positions: Most tokens of a request, its new ones included; None if there is no bound.
        vocabulary: Token ids are below this; 2**32 where nobody knows.
        check: Refuses a prompt, with its options, that cannot be served.
    """

    runner: Runner
    sampler: Sampler
    positions: int | None = None
    vocabulary: int = 1 << 32
    check: Check = lambda tokens, options: None


def serve(
    model: Any,
    kv: KV,
    runner: Runner | None,
    sampler: Sampler | None,
    *,
    fixed: bool = False,
) -> Served:
    """How a model is served.

    Args:
        model: A Hugging Face model that is attached to the cache, or your own: called with
            `(tokens [1, N], positions [1, N])`, it returns logits `[1, N, V]`.
        kv: The cache.
        runner: Runs it in another way.
        sampler: Reads options in another way.
        fixed: What comes of a request is to be the same to the last bit whatever else runs.

    Raises:
        ConfigError: The model is not attached to this cache, or no model at all; or steps of a
            runner of your own, or over pages of a lossy codec, are to be fixed.
        UnsupportedModelError: It cannot be continued from token ids alone, or its steps cannot be
            fixed.
        CapacityError: The cache has no room to try how rows of the model run together.
    """
    if runner is not None:
        if fixed:
            raise ConfigError("invariant=True beside a runner", "Make your runner invariant")
        return Served(runner, sampler or OwnSampler())
    if fixed:
        check_cache(kv)
    if hasattr(model, "config") and callable(getattr(model, "generate", None)):
        return _transformers(model, kv, sampler, fixed)
    if not callable(model):
        raise ConfigError(
            f"{type(model).__name__} is no model", "Pass a model, or runner= that runs one"
        )
    forward = own_model(model)
    return Served(Packed(kv, invariant(forward) if fixed else forward), sampler or OwnSampler())


def _transformers(model: Any, kv: KV, sampler: Sampler | None, fixed: bool) -> Served:
    parts = importlib.import_module("flowkv.hooks.huggingface").make_runner_parts(model, kv)
    if sampler is None:
        sampling = importlib.import_module("flowkv.hooks.huggingface.sampling")
        sampler = sampling.GenerateSampler(parts.model)
    runner: Runner = parts.apart
    if parts.forward is not None:
        forward = invariant(parts.forward) if fixed else parts.forward
        runner = Packed(kv, forward, parts.refresh)
    elif fixed:
        raise UnsupportedModelError(
            f"steps of this model cannot be made invariant: {parts.reason}",
            "Leave invariant=True out",
        )
    return Served(runner, sampler, parts.positions, parts.vocabulary, parts.check)
