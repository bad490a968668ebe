"""Cold pages (kvt) decoded on the device, with their ways there and back, over one core's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench.gpu.machine import Machine
from flowkv import LayerGroup
from flowkv.core.geometry import page_layout
from flowkv.kvt.basis import KeyTurn
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.device import CodedPage, DeviceDecoder
from flowkv.kvt.learning import GroupLearner

PAGES, CAUSES, NEAR = 48, 128, 2**-6


def learned(machine: Machine) -> tuple[PageCoder, list[bytes], list[bytes]]:
    """A coder of keys and values of few causes, coded pages, and the same as one core decodes."""
    small = {"kv_heads": 2, "head_dim": 16, "value_dim": 16, "layers": (0, 1)}
    large = {"kv_heads": 8, "head_dim": 128, "value_dim": 128, "layers": (0, 1)}
    group = LayerGroup(**(small if machine.dry else large), dtype="bfloat16")
    layout = page_layout(group, 64)
    shape = len(group.layers), group.kv_heads, group.head_dim
    turn = KeyTurn(1e4 ** -(np.arange(0, shape[2], 2) / shape[2]))
    learner = GroupLearner(layout, [turn] * shape[0])
    weights = torch.linspace(3, 0.3, CAUSES)[:, None, None, None]
    mixes = [weights * torch.randn(CAUSES, *shape) for _ in range(2)]

    def sides(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = [torch.einsum("tc,clhd->lhtd", torch.randn(tokens, CAUSES), mix) for mix in mixes]
        return made[0] + torch.randn(made[0].shape), made[1] + torch.randn(made[1].shape)

    for _ in range(2):
        keys, values = sides(640)
        noise = torch.randn(keys.shape), torch.randn(values.shape)  # all errors cost the same
        learner.add((learner.turns.apply(keys, 0), values), noise, sample=True)
    coder, coded, raw = learner.coder(4.0, {}), list[bytes](), list[bytes]()
    for number in range(2 if machine.dry else PAGES):
        body = bytearray(layout.page_bytes)
        for view, x in zip(coder.views(memoryview(body)), sides(64), strict=True):
            view.copy_(x)
        data = coder.encode(memoryview(body), number)
        assert data is not None and coder.decode(memoryview(data), memoryview(body), 0, shape[0])
        coded.append(data)
        raw.append(bytes(body))
    return coder, coded, raw


def cold(machine: Machine) -> Iterator[dict[str, Any]]:
    """One row; dry, one core takes both parts, since Triton needs a device."""
    coder, coded, raw = learned(machine)
    layers, size = coder.layout.layers, len(raw[0])
    targets = [torch.zeros(size, dtype=torch.uint8, pin_memory=not machine.dry) for _ in raw]
    pages = [
        CodedPage(coder, data, memoryview(target.numpy()), 0, layers, print)
        for data, target in zip(coded, targets, strict=True)
    ]

    def by_one_core() -> None:
        for page in pages:
            assert coder.decode(memoryview(page.data), page.target, 0, layers)

    began = time.perf_counter()
    by_one_core()
    alone_us = 1e6 * (time.perf_counter() - began)
    call = by_one_core
    if not machine.dry:
        decoder = DeviceDecoder(coder, machine.device)

        def call() -> None:
            assert decoder.decode_batch(pages) == [True] * len(pages)

    for target in targets:
        target.fill_(0xFF)
    call()
    for target, wanted in zip(targets, raw, strict=True):
        x, y = (
            one.view(torch.bfloat16).float()
            for one in (target, torch.frombuffer(bytearray(wanted), dtype=torch.uint8))
        )
        if not torch.allclose(x, y, rtol=NEAR, atol=NEAR):
            yield {"case": "cold pages", "wrong": True}
            return
    found = {"case": "cold pages", **machine.eager([call])}
    rate = 1e6 * size * len(pages) / found["us"]
    yield found | {"bytes_s": rate, "core_us": alone_us, "times": alone_us / found["us"]}
