"""Rows that begin with the same pages are attended to as if they did not, only faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flowkv
from flowkv import Geometry, LayerGroup, Sequence, Step, kernels
from tests.inside import step as sharing

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 16


def _cache(**kind: Any) -> flowkv.KV:
    fields = dict(kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM, dtype="float32") | kind
    group = LayerGroup(layers=(0, 1), **fields)
    return flowkv.KV(Geometry(groups=(group,), page_size=PAGE), gpu="16MiB")


def _attend(step: Step, seed: int) -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    count, found = int(step.counts.sum()), []
    for layer in (0, 1):
        q, k, v = (
            torch.randn(count, heads, DIM, generator=noise) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        found.append(step.attend(layer, q, k, v, sinks=torch.linspace(-1, 1, HEADS)))
    return found


def _rows(kv: flowkv.KV, prefix: int, lengths: list[int], token: int = 0) -> list[Sequence]:
    first = kv.open(np.full(prefix, token))
    with kv.step([first], [first.tokens]) as step:
        _attend(step, 0)
    rows = []
    for number, more in enumerate(lengths):
        rows.append(kv.fork(first))
        with kv.step(rows[-1:], [[100 + number] * more]) as step:
            _attend(step, number + 1)
    first.close()
    return rows


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups of each cascade."""
    found: list[int] = []
    own = kernels.cascade_attention

    def counted(q: Any, pages: Any, batch: Any, shared: Any, **how: Any) -> Any:
        found.append(len(shared.groups))
        return own(q, pages, batch, shared, **how)

    monkeypatch.setattr(kernels, "cascade_attention", counted)
    monkeypatch.setattr(sharing, "LEAST_TOKENS", 4 * PAGE)
    return found


def _both(kv: flowkv.KV, rows: list[Sequence], counts: list[int]) -> tuple[Any, Any]:
    """What a step answers with and without looking for what its rows share."""
    answers = []
    for apart in (False, True):
        step = kv.step(rows, [[7] * n for n in counts])
        step.apart = apart  # each token by itself: no cascade
        answers.append(torch.stack(_attend(step, 99)))
        step.rollback()
    return answers[0], answers[1]


def test_shared_pages_are_read_once_and_answer_the_same(calls: list[int]) -> None:
    kv = _cache()
    rows = _rows(kv, 40, [3, 20, 1, 33])  # two pages are shared
    for counts in ([1, 1, 1, 1], [1, 9, 30, 2]):
        shared, flat = _both(kv, rows, counts)
        torch.testing.assert_close(shared, flat, atol=1e-5, rtol=1e-5)
    assert calls == [1, 1, 1, 1], "two layers of two steps"


def test_a_neighbour_that_shares_nothing_is_left_out(calls: list[int]) -> None:
    kv = _cache()
    some, lone, others = (
        _rows(kv, 64, lengths, token) for token, lengths in enumerate([[3, 20, 1], [4], [5, 6]])
    )
    rows = [*some, *lone, *others]
    shared, flat = _both(kv, rows, [1, 2, 1, 3, 1, 1])
    torch.testing.assert_close(shared, flat, atol=1e-5, rtol=1e-5)
    assert calls == [2, 2]


def test_the_full_page_of_a_single_row_is_not_shared(calls: list[int]) -> None:
    kv = _cache()
    rows = _rows(kv, 40, [3, 20])
    _both(kv, rows, [1, 1])
    assert not calls, "32 tokens are spared, 64 are asked for"
    _both(kv, rows[:1], [1])
    assert not calls


def test_windows_and_watched_steps_are_attended_to_row_by_row(calls: list[int]) -> None:
    kv = _cache(kind="sliding", window=24)
    _both(kv, _rows(kv, 64, [3, 20, 1, 33]), [1, 1, 1, 1])
    kv.close()
    kv = _cache()
    rows = _rows(kv, 64, [3, 20, 1, 33])
    with kv.step(rows, [[7]] * 4) as step:
        step.watch()
        _attend(step, 5)
    assert not calls


def test_a_step_plans_once_and_again_after_pages_were_replaced(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = _cache()
    rows = _rows(kv, 64, [3, 20, 1, 33])
    plans: list[object] = []
    own = kernels.plan_cascade
    monkeypatch.setattr(kernels, "plan_cascade", lambda *a, **k: plans.append(a) or own(*a, **k))
    with kv.step(rows, [[7]] * 4) as step:
        _attend(step, 5)
        assert len(plans) == 1
        step.refresh()
        _attend(step, 5)
    assert len(plans) == 2 and len(calls) == 4
