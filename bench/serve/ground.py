"""The ground of measuring: one model, alone for baselines, and behind several engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

import flowkv
from bench.serve.baselines import Batched
from bench.serve.models import endless, longer, shaped_model, twin
from flowkv.core.config import DEFAULT_CPU_POOL_SIZE, DEFAULT_GPU_SIZE, parse_size
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import page_layout
from flowkv.data import tiny_path
from flowkv.hooks.huggingface.load import DTYPES, load
from flowkv.sim.restore import SHAPES

_CONTEXT = 16384
"""Of models that name none, and of shapes."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine and its cache are set up.

    Attributes:
        scheduler: See `flowkv.Engine`, like the next two.
        max_rows: Most rows of a step.
        token_budget: Most tokens of a step.
        page_size: Tokens of a page.
        caching: Whether prompts find what others computed.
        pool_bytes: Of the device pool; 0 for that of the ground.
        extra: Further fields of `flowkv.Config`, as pairs.
    """

    scheduler: str = "fcfs"
    max_rows: int = 128
    token_budget: int = 512
    page_size: int = 64
    caching: bool = True
    pool_bytes: int = 0
    extra: tuple[tuple[str, Any], ...] = ()


class Ground:
    """A model, and what serves it.

    Args:
        model: A folder or id as `flowkv generate` takes it; "" for the model that FlowKV ships.
        shape: Instead of it: a name in `SHAPES`, for random weights.
        dtype: Of weights and cache.
        device: Where it computes; "" for the GPU if there is one.
        pool: Size of device pools, of the baseline's too; "" for what `flowkv.attach` takes.

    Attributes:
        model: Without FlowKV.
        name: Of the model.
        context: Most tokens of a request.
        vocabulary: Tokens that there are.
        pool_bytes: Of device pools.

    Raises:
        ConfigError: If there is no such model or shape.
    """

    def __init__(
        self,
        model: str = "",
        *,
        shape: str = "",
        dtype: str = "float32",
        device: str = "",
        pool: str = "",
    ) -> None:
        if shape:
            self.name, self.model = shape, _shaped(shape, dtype, device)
        else:
            source = model or str(tiny_path())
            self.name = os.path.basename(source.rstrip("/")) if model else "fixture"
            self.model = load(source, dtype=dtype, device=device or None).model
        endless(self.model)
        config = self.model.config
        self.context = int(getattr(config, "max_position_embeddings", None) or _CONTEXT)
        self.vocabulary = int(config.vocab_size)
        self.pool_bytes = self._pool(pool)

    @contextmanager
    def engine(self, setting: Setting, *, positions: int = 0) -> Iterator[tuple[Any, Any]]:
        """An engine over a copy of the model that shares its weights, and its cache.

        Args:
            setting: How it is set up.
            positions: Tokens that requests may have, where that is more than the model's own.
        """
        model = longer(self.copied(), positions)
        size = setting.pool_bytes or self.pool_bytes
        kv = flowkv.attach(model, page_size=setting.page_size, gpu=size, **dict(setting.extra))
        try:
            with flowkv.Engine(
                model,
                kv,
                scheduler=setting.scheduler,
                max_rows=setting.max_rows,
                token_budget=setting.token_budget,
            ) as engine:
                yield engine, kv
        finally:
            kv.close()

    def copied(self) -> Any:
        """A copy of the model that shares its weights, and none of its hooks."""
        return twin(self.model)

    @contextmanager
    def batched(self, setting: Setting) -> Iterator[Batched]:
        """Transformers' continuous batching, with a cache of the pool's size."""
        model = self.copied()
        system = Batched(
            model,
            most_rows=setting.max_rows,
            token_budget=setting.token_budget,
            pool_tokens=self.pool_tokens(setting),
        )
        try:
            yield system
        finally:
            system.close()

    def pool_tokens(self, setting: Setting) -> int:
        """Tokens that the pool of a setting holds."""
        size = setting.pool_bytes or self.pool_bytes
        return size // self.token_bytes(setting.page_size)

    def token_bytes(self, page_size: int = 64) -> int:
        """Bytes that a token takes in pages of that size, all layers together."""
        kv = flowkv.attach(self.copied(), page_size=page_size, gpu="64MiB")
        assert kv.geometry is not None
        groups = kv.geometry.groups
        kv.close()
        return sum(page_layout(group, page_size).page_bytes for group in groups) // page_size

    def _pool(self, size: str) -> int:
        device = self.model.device
        if device.type != "cuda":
            return parse_size(size or DEFAULT_CPU_POOL_SIZE)
        memory = int(torch.cuda.get_device_properties(device).total_memory)
        return parse_size(size or DEFAULT_GPU_SIZE, total_bytes=memory)


def _shaped(shape: str, dtype: str, device: str) -> Any:
    if shape not in SHAPES or SHAPES[shape].experts > 1:
        known = ", ".join(name for name, one in SHAPES.items() if one.experts == 1)
        raise ConfigError(f"there is no shape {shape!r}", f"Use one of {known}")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return shaped_model(SHAPES[shape], context=_CONTEXT, dtype=DTYPES[dtype], device=place)
