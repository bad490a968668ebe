"""Rows that an engine holds: what they leave behind, and how many are tried together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.falcon import modeling_falcon

from flowkv import KV, Engine, Request
from flowkv.hooks.huggingface import make_runner_parts
from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.inside import ApartRow, CapacityError, PackedRunner, PaddedRunner, PagedRow, door_of


def opened(model: torch.nn.Module, kv: KV, count: int = 20) -> PagedRow:
    """A row of its own whose prompt is computed."""
    door = door_of(model)
    assert door is not None
    runner = PaddedRunner(model, kv, door, together=False)
    text = np.asarray(models.prompt(count)[0], np.uint32)
    row = runner.open(Request(prompt=text), text, wait=True)
    runner.step([row], [text])
    return row


def left(kv: KV) -> tuple[int, int]:
    """Open sequences, and bytes of host memory for those that are suspended."""
    assert kv.planner is not None
    return int(kv.stats()["sequences"]), kv.planner.aside_bytes


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_a_suspended_row_that_is_closed_leaves_nothing(name: str) -> None:
    model = models.causal(name)
    with attached(model) as kv:
        row = opened(model, kv)
        assert row.suspend() > 0 and left(kv)[1] > 0
        row.close()
        assert left(kv) == (0, 0)


def test_states_are_kept_of_a_row_that_came_back() -> None:
    model = models.causal("qwen3_next")
    with attached(model) as kv:
        row = opened(model, kv)
        row.suspend()
        row.resume()
        row.close("turn_end")
        text = torch.cat([models.prompt(20), models.prompt(5, seed=3)], 1)
        wanted = generate(model, 2, input_ids=text).sequences
        assert reused(kv) == 20 and left(kv) == (0, 0)
        kv.invalidate()
        assert torch.equal(generate(model, 2, input_ids=text).sequences, wanted)


def test_a_row_whose_states_cannot_be_kept_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.causal("qwen3_next")
    with attached(model) as kv:
        row = opened(model, kv)
        assert isinstance(row, ApartRow)
        monkeypatch.setattr(kv, "save_state", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            row.close()
        assert left(kv) == (0, 0)


def test_a_page_of_another_row_is_no_edit() -> None:
    """Its model reads its own keys, which then come from the page that was published first."""
    model, text = models.causal("glm5_next"), np.asarray(models.prompt(40)[0], np.uint32)
    with attached(model) as kv:
        runner = PaddedRunner(model, kv, door_of(model), together=False)  # type: ignore[arg-type]
        rows = [runner.open(Request(prompt=text), text, wait=True) for _ in range(2)]
        runner.step(rows[:1], [text[:20]])
        for start in range(0, 40, 4):
            found = runner.step(rows[1:], [text[start : start + 4]])
        assert (rows[0].seq.blocks[0][0] or 0) is rows[1].seq.blocks[0][0]
        wanted = generate(model, 1, input_ids=torch.tensor(text[None].astype(np.int64))).logits[0]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        for row in rows:
            row.close()


# ---- how many are tried


@pytest.mark.parametrize("max_rows", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_as_many_rows_are_tried_as_there_can_be(name: str, max_rows: int) -> None:
    model = models.causal(name)
    prompts = [models.prompt(8 + n, seed=n)[0].tolist() for n in range(3)]
    wanted = [generate(model, 4, input_ids=torch.tensor([prompt])) for prompt in prompts]
    with attached(model, max_rows=max_rows) as kv:
        parts = make_runner_parts(model, kv)
        assert (parts.forward is not None) is (name == "llama")
        assert parts.apart.together and left(kv) == (0, 0)
        with Engine(model, kv, max_rows=max_rows) as engine:
            done = engine.run(prompts, max_new_tokens=4)
        for one, own, prompt in zip(done, wanted, prompts, strict=True):
            assert one.tokens == own.sequences[0, len(prompt) :].tolist()


@pytest.mark.parametrize("free", [0, 2])
def test_a_full_cache_says_nothing_about_its_model(free: int) -> None:
    model = models.causal("llama")
    with attached(model, max_rows=4) as kv:
        others = [kv.open([1, 2, 3]) for _ in range(4 - free)]
        with pytest.raises(CapacityError, match=r"tried.*4 sequences are open.*Close"):
            Engine(model, kv)
        assert left(kv)[0] == len(others)
        for seq in others:
            seq.close()
        assert isinstance(Engine(model, kv, max_rows=4)._loop.runner, PackedRunner)


def test_a_trial_that_finds_no_pages_leaves_nothing() -> None:
    model = models.causal("llama")
    with attached(model, gpu="1MiB") as kv:
        assert kv.planner is not None
        taken: list[int] = []
        with pytest.raises(CapacityError):
            while True:
                taken += kv.planner.allocate_raw([1])[0]
        with pytest.raises(CapacityError, match=r"tried.*do not fit.*Close"):
            make_runner_parts(model, kv)
        assert left(kv) == (0, 0)
        for page in taken:
            kv.planner.store.pool(0).release(page)
        assert make_runner_parts(model, kv).forward is not None


class Doubled(TorchDispatchMode):
    """Makes of every product another one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.01 if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm) else found


@pytest.mark.filterwarnings("ignore:FlowKV leaves this call")
def test_what_a_dispatch_mode_changes_is_known_to_nobody() -> None:
    """As in `generate`: what torch computes then is not what the code says."""
    model, prompt = models.causal("llama"), models.prompt(100)
    theirs = generate(model, 8, input_ids=prompt).sequences
    with attached(model) as kv:
        with Engine(model, kv) as engine, Doubled():
            engine.run([prompt[0].tolist()], max_new_tokens=2)
        assert kv.stats()["blocks"] == 0
        assert torch.equal(generate(model, 8, input_ids=prompt).sequences, theirs)
        assert reused(kv) == 0


# ---- code that comes to a model under an engine


def _mixes(model: Any, patch: pytest.MonkeyPatch) -> None:
    layer = model.transformer.h[1].mlp
    layer.register_forward_hook(lambda _, given, out: out + 0.7 * out.mean(0, keepdim=True))


def _unmasks(model: Any, patch: pytest.MonkeyPatch) -> None:
    own = modeling_falcon.create_causal_mask
    patch.setattr(
        modeling_falcon,
        "create_causal_mask",
        lambda *args, **given: own(*args, **given | dict(attention_mask=None)),
    )


@pytest.mark.filterwarnings("ignore:FlowKV shares nothing of this model")
@pytest.mark.parametrize("change", [_mixes, _unmasks])
@pytest.mark.parametrize("revision", ["", "1"])
def test_rows_stay_apart_once_a_change_would_mix_them(
    change: Any, revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.causal("falcon")
    prompts = [models.prompt(n, seed=n)[0].tolist() for n in (20, 33, 7, 40)]
    with attached(model, revision=revision) as kv, Engine(model, kv) as engine:
        before = [one.tokens for one in engine.run(prompts, max_new_tokens=8)]
        change(model, monkeypatch)
        found = [one.tokens for one in engine.run(prompts, max_new_tokens=8)]
    wanted = [generate(model, 8, input_ids=torch.tensor([one])).sequences[0] for one in prompts]
    assert found == [s[len(p) :].tolist() for p, s in zip(prompts, wanted, strict=True)]
    assert found != before or change is _unmasks, "the change changes nothing: no test"
