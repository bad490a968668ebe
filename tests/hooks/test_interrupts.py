"""Ctrl-C anywhere in a `generate` over an attached cache, and in attaching and detaching it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers

import flowkv
from tests import interrupts
from tests.hooks.models import GROUPED
from tests.inside import attach_lock, door_of

IDS = torch.arange(40)[None] % 90 + 33
HOW: dict[str, Any] = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
DOOR = tuple(f"hooks/huggingface/{name}.py" for name in ("door", "cache", "rows", "restore"))


def make_model() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**GROUPED | dict(num_hidden_layers=1, hidden_size=32))
    return transformers.LlamaForCausalLM(config).eval()


def check(most: int, **options: Any) -> None:
    model = make_model()
    want = model.generate(IDS, **HOW)
    kv = flowkv.attach(model, gpu="4MiB", page_size=16)
    door = door_of(model)
    assert door is not None

    def story() -> None:
        model.generate(IDS, **HOW)

    for _ in range(8):  # until nothing is learned about the model any more
        story()
    count, came = interrupts.places(story, **options), 0
    with interrupts.collectable():
        for at in interrupts.chosen(count, most):
            came += interrupts.run(story, interrupts.Tracer(at, **options))
            interrupts.whole(kv)
            assert not door._switched and not door._inside and not door.switch._forwards
    assert came > min(most, count) * 0.9
    before = kv.stats()["tokens_reused"]
    assert torch.equal(model.generate(IDS, **HOW), want)
    assert kv.stats()["tokens_reused"] > before
    kv.close()


def test_at_lines_of_the_hooks() -> None:
    check(50, only=DOOR)


@pytest.mark.slow
def test_at_every_line() -> None:
    check(10_000)


@pytest.mark.slow
def test_at_any_bytecode_of_the_hooks() -> None:
    check(600, opcodes=True, only=DOOR)


def attaching(most: int) -> None:
    model = make_model()
    want = model.generate(IDS, **HOW)

    def story() -> None:
        with flowkv.attach(model, gpu="4MiB", page_size=16):
            model.generate(IDS, **HOW)

    story()
    only = ("hooks/huggingface/attach.py", "cache/kv.py", "hooks/huggingface/door.py")
    count = interrupts.places(story, only=only)
    with interrupts.collectable():
        for at in interrupts.chosen(count, most):
            interrupts.run(story, interrupts.Tracer(at, only=only))
            gc.collect()
            assert interrupts.free(attach_lock)
            held = door_of(model)
            if held is not None:  # it was interrupted before its block, or at the block's end
                interrupts.whole(held.kv)
                held.kv.close()
            assert torch.equal(model.generate(IDS, **HOW), want)


def test_attaching_at_some_lines() -> None:
    attaching(12)


@pytest.mark.slow
def test_attaching_at_any_line() -> None:
    attaching(10_000)
