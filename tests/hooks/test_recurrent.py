"""Models with recurrent layers: few tokens behind a state, drafts, positions, half precision."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import ForwardHook, Recurrent, StatePlacement
from tests.inside import rows_Rows as Rows

REFUSED = {"jamba": "does not continue from a cache as it answers in one pass"}
"""Whose own code goes on from a state otherwise than in one pass."""
SUFFIXES = range(1, 6)
thorough = pytest.mark.thorough


def attached_or_refused(model: torch.nn.Module, name: str, **options: object) -> flowkv.KV:
    """The cache of an attached model, which warned if and only if it is to be refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kv = flowkv.attach(model, gpu="64MiB", page_size=16, **options)
    said = " ".join(str(one.message) for one in caught if "FlowKV leaves" in str(one.message))
    assert REFUSED.get(name, "") in said
    assert bool(said) == (name in REFUSED)
    return kv


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("falcon_h1", "jamba", "lfm2") else [thorough])
        for name in models.RECURRENT
    ],
)
@pytest.mark.usefixtures("all_is_loaded")
def test_few_tokens_behind_a_state(name: str, tmp_path: Path) -> None:
    model, twin = models.causal(name), models.causal(name)
    bases = [models.prompt(20, seed=n) for n in SUFFIXES]
    prompts = [torch.cat([b, models.prompt(n, seed=9)], 1) for n, b in enumerate(bases, 1)]
    wanted = [generate(twin, 3, input_ids=ids) for ids in prompts]
    for known in (False, True):  # the second time from a disk
        kv = attached_or_refused(model, name, disk=f"{tmp_path}/kv:64MiB")
        try:
            for base, ids, want in zip(bases, prompts, wanted, strict=True):
                if not known:
                    generate(model, 1, input_ids=base)
                    assert kv.flush()  # a state is found once a tier has it
                assert_same(generate(model, 3, input_ids=ids), want, 1e-5)
            assert bool(reused(kv)) == (name not in REFUSED)
        finally:
            kv.close()


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "jamba", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_no_lost_convolution(name: str, dtype: torch.dtype) -> None:
    model = models.causal(name).to(dtype)
    before = dict(model.named_parameters())
    kv = attached_or_refused(model, name)
    assert all(before[path] is value for path, value in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in list(model.modules())[1:])
    generate(model, 1, input_ids=models.prompt(40))
    longer = torch.cat([models.prompt(40), models.prompt(3, seed=9)], 1)
    generate(model, 2, input_ids=longer)
    assert (reused(kv) > 0) == (name not in REFUSED)
    kv.close()


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=thorough)])
@pytest.mark.parametrize("change", ["select", "repeat", "expand"])
def test_rows_take_their_states_along(name: str, change: str) -> None:
    """Operations that native layers with states lack: each row's state is under its own name."""
    model, twin = models.causal(name), models.causal(name)
    ids = torch.cat([models.prompt(48, seed=n) for n in (1, 2)])
    longer = torch.cat([ids, models.prompt(6, seed=9).view(2, 3)], 1)
    wanted = [generate(twin, 6, input_ids=one[None]) for one in longer]
    with attached(model) as kv, torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, logits_to_keep=1)
        if change == "select":
            cache.batch_select_indices(torch.tensor([1]))
        elif change == "repeat":
            cache.batch_repeat_interleave(2)
        token = longer[[1] if change == "select" else [0, 0, 1, 1], 48:49]
        found = model(token, past_key_values=cache, logits_to_keep=1).logits[-1]
        whole = twin(longer[1:, :49], logits_to_keep=1).logits[0]
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-3)
        for one, want in zip(longer, wanted, strict=True):
            assert_same(generate(model, 6, input_ids=one[None]), want)
        assert reused(kv)


def test_states_are_saved_between_the_forwards_of_their_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another prompt saves a state while the thread that it serves is about to go on."""
    model, ids = models.causal("lfm2"), models.prompt(64)
    longer = torch.cat([ids, models.prompt(6, seed=9)], 1)
    wanted, own = generate(model, 6, input_ids=longer), Recurrent.state_of
    met, ended = threading.Event(), threading.Event()

    def met_half_way(states: Recurrent, row: int) -> dict[str, Any]:
        found = {k: copy.deepcopy(v) for k, v in own(states, row).items()}
        if threading.current_thread() is other:
            met.set()
            ended.wait(0.5)
        return found

    with attached(model) as kv, torch.no_grad():
        cache, failed = DynamicCache(config=model.config), list[Exception]()

        def ask() -> None:
            try:
                generate(model, 1, input_ids=models.prompt(20, seed=3))
            except Exception as error:
                failed.append(error)

        model(ids[:, :48], past_key_values=cache, logits_to_keep=1)
        other = threading.Thread(target=ask)
        monkeypatch.setattr(Recurrent, "state_of", met_half_way)
        other.start()
        assert met.wait(20.0)
        model(ids[:, 48:], past_key_values=cache, logits_to_keep=1)
        ended.set()
        other.join(60.0)
        assert not failed
        assert_same(generate(model, 6, input_ids=longer), wanted)
        assert reused(kv)


def test_an_interrupt_before_a_forward_leaves_its_cache_unlocked() -> None:
    """At each line of the hook: other threads would wait for ever for a lock that stays taken."""
    model, ids, code = models.causal("llama"), models.prompt(40), ForwardHook.before.__code__
    free, stopped = list[bool](), 0
    with attached(model), torch.no_grad():
        cache: Any = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache, logits_to_keep=1)
        rows = cache.rows
        for line in sorted({n for *_, n in code.co_lines() if n}):

            def trace(frame: Any, event: str, _: Any, line: int = line) -> Any:
                if frame.f_code is code and event == "line" and frame.f_lineno == line:
                    raise KeyboardInterrupt
                return trace if frame.f_code is code else None

            sys.settrace(trace)
            try:
                model(ids[:, 20:21], past_key_values=cache, logits_to_keep=1)
            except KeyboardInterrupt:
                stopped += 1
            finally:
                sys.settrace(None)

            def take() -> None:
                free.append(rows.turn.acquire(timeout=1.0))
                if free[-1]:
                    rows.turn.release()

            other = threading.Thread(target=take)
            other.start()
            other.join()
    assert all(free) and stopped > 10


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_counts_from_zero_behind_its_cache(*, padded: bool) -> None:
    """Bamba without positions: a user's own loop gets what one pass over the prompt gives."""
    model, twin = models.causal("bamba"), models.causal("bamba")
    base, longer = models.prompt(40), torch.cat([models.prompt(40), models.prompt(9, seed=3)], 1)
    mask = torch.ones_like(longer)
    if padded:
        longer, mask = longer.roll(4, 1), mask.clone()
        mask[:, :4] = 0

    def one_pass(model: torch.nn.Module) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        given = dict(attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return model(input_ids=longer, **given).logits[:, -1]

    wanted = one_pass(twin)
    with attached(model) as kv:
        generate(model, 1, input_ids=base)
        for _ in range(2):
            torch.testing.assert_close(one_pass(model), wanted, rtol=0, atol=1e-4)
        assert bool(reused(kv)) != padded


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize("name", [pytest.param("bamba", marks=thorough), "falcon_h1", "lfm2"])
def test_a_prompt_that_comes_again_finds_the_state_of_its_last_page(
    name: str, tmp_path: Path
) -> None:
    model, twin, ids = models.causal(name), models.causal(name), models.prompt(50)
    pair = torch.cat([ids, models.prompt(50, seed=2)])
    wanted = [generate(twin, 3, input_ids=one) for one in (ids, pair)]
    for first in (True, False):  # the second time from a disk
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            for again in range(2):
                for one, want in zip((ids, pair), wanted, strict=True):
                    known = reused(kv)
                    assert_same(generate(model, 3, input_ids=one), want, 1e-5)
                    if again and first:
                        assert reused(kv) - known == 48 * len(one)


@pytest.mark.parametrize("name", ["lfm2", pytest.param("lfm2_moe", marks=thorough)])
def test_drafts_are_taken_back_from_convolutions(name: str, tmp_path: Path) -> None:
    model, twin, other = (models.causal(name) for _ in range(3))
    helper, talks = models.causal("llama"), []
    for how in (dict(prompt_lookup_num_tokens=4), dict(assistant_model=helper), dict()):
        ids = models.prompt(12, seed=3 + len(talks)).repeat(1, 3)
        for turn in range(3):
            talks.append((ids, how, generate(twin, 6, input_ids=ids, **how)))
            ids = torch.cat([talks[-1][2].sequences, models.prompt(2 + turn, seed=turn)], 1)
            how = how if turn else {}
    for served in (model, other):  # the second goes on from states that drafts left on disk
        with attached(served, disk=f"{tmp_path}/kv:64MiB") as kv:
            for ids, how, want in talks:
                assert_same(generate(served, 6, input_ids=ids, **how), want, 1e-5)
            assert reused(kv) > 0


def test_a_cache_that_left_its_pages_is_in_no_ones_way() -> None:
    """Its owner holds it, edited, while other prompts begin."""
    model, twin = models.causal("falcon_h1"), models.causal("falcon_h1")
    want = generate(twin, 3, input_ids=models.prompt(20, seed=3))
    with torch.no_grad(), attached(model):
        held = DynamicCache(config=model.config)
        model(models.prompt(20), past_key_values=held, logits_to_keep=1)
        held.layers[0].keys = held.layers[0].keys * 2
        assert_same(generate(model, 3, input_ids=models.prompt(20, seed=3)), want, 1e-5)
        assert held.get_seq_length() == 20


def states_of(kv: flowkv.KV) -> list[Any]:
    return [block for block in kv.planner.store.index if block.kind == "state"]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of each forward, in order."""
    found, plan = list[int](), Rows.plan

    def planned(rows: Rows, new: int) -> Any:
        found.append(new)
        return plan(rows, new)

    monkeypatch.setattr(Rows, "plan", planned)
    return found


@pytest.mark.usefixtures("all_is_loaded")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=thorough) for name in ("qwen3_5", "falcon_h1")] + ["lfm2"]
)
def test_a_state_is_saved_where_prompts_part(
    name: str, tmp_path: Path, computed: list[int]
) -> None:
    """The first prompt parts from nothing, the second stops there, the others go on from there."""
    model, twin, shared = models.causal(name), models.causal(name), models.prompt(600)
    prompts = [torch.cat([shared, models.prompt(300, seed=n)], 1) for n in (2, 3, 4, 5)]
    pair = torch.cat([torch.cat([shared, models.prompt(300, seed=n)], 1) for n in (6, 7)])
    wanted = [generate(twin, 2, input_ids=ids) for ids in (*prompts, pair)]
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        for ids, want, first in zip(prompts[:3], wanted, (896, 592, 308), strict=False):
            computed.clear()
            assert_same(generate(model, 2, input_ids=ids), want, 1e-4)
            assert computed[0] == first and kv.flush()
            assert sum(computed) + (592 if first == 308 else 0) == 901, "no token twice"
        computed.clear()
        assert_same(generate(model, 2, input_ids=prompts[2]), wanted[2], 1e-4)
        assert computed == [304, 4, 1], "seen before, its end is worth a stop"
        kv.flush()
        computed.clear()
        assert_same(generate(model, 2, input_ids=prompts[2]), wanted[2], 1e-4)
        assert computed == [4, 1]
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:  # pages and states from the disk
        for ids, want in zip((prompts[3], pair), wanted[3:], strict=True):
            computed.clear()
            assert_same(generate(model, 2, input_ids=ids), want, 1e-4)
            assert computed == [308, 1]
        assert reused(kv) == 3 * 592


def test_a_prompt_stops_behind_pages_that_load(tmp_path: Path, computed: list[int]) -> None:
    """Its state and pages come from a disk, and it parts from known text further on."""
    model, twin = models.causal("lfm2"), models.causal("lfm2")
    base, middle = models.prompt(320), models.prompt(320, seed=2)
    texts = [base, torch.cat([base, middle, models.prompt(40, seed=3)], 1)]
    texts.append(torch.cat([base, middle, models.prompt(60, seed=4)], 1))
    wanted = [generate(twin, 2, input_ids=ids) for ids in texts]
    for ids, want in zip(texts, wanted, strict=True):
        with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
            computed.clear()
            assert_same(generate(model, 2, input_ids=ids), want, 1e-4)
            assert reused(kv) == (0 if ids is base else 304)
    assert computed == [336, 60, 1], "304 come from the disk, then to where the two part"


def test_a_conversation_keeps_few_states_and_finds_them(computed: list[int]) -> None:
    """Answers come back shortened, as thoughts are left out; now and then a turn is taken back."""
    model, twin, talk = models.causal("lfm2"), models.causal("lfm2"), [5] * 40
    with attached(model) as kv:
        kv.snapshots.placement = StatePlacement("auto", least_tokens=32)
        for turn in range(12):
            talk = talk[:-30] if turn in (5, 9) else talk
            talk += models.prompt(60, seed=turn)[0].tolist()
            ids, before = torch.tensor([talk]), reused(kv)
            want = generate(twin, 6, input_ids=ids)
            assert_same(generate(model, 6, input_ids=ids), want, 1e-4)
            if turn not in (0, 5, 9):
                assert len(talk) - (reused(kv) - before) <= 60 + 3 + 16, "all but what is new"
            talk += want.sequences[0, -3:].tolist()
        assert len(states_of(kv)) <= 10
        state_bytes = sum(block.n_bytes for block in states_of(kv))
    assert state_bytes < 12 * 8192 and sum(computed) < 12 * (60 + 16 + 16 + 6) + 200


@pytest.mark.filterwarnings("ignore:host can store no page")
def test_no_prompt_stops_for_states_that_no_tier_stores(computed: list[int]) -> None:
    model, twin = models.causal("lfm2"), models.causal("lfm2")
    with attached(model, host="4KiB") as kv:
        for seed, (length, forwards) in enumerate(((300, 3), (300, 2), (40, 2))):
            computed.clear()
            ids = models.prompt(length, seed=seed)
            assert_same(generate(model, 2, input_ids=ids), generate(twin, 2, input_ids=ids), 1e-4)
            assert len(computed) == forwards, "only the first finds out"
        assert not states_of(kv)


def test_rows_stop_where_all_of_them_part(computed: list[int]) -> None:
    model, twin, shared = models.causal("lfm2"), models.causal("lfm2"), models.prompt(300)
    first = torch.cat([shared, models.prompt(100, seed=9)], 1)
    pair = torch.cat([torch.cat([shared, models.prompt(100, seed=n)], 1) for n in (2, 3)])
    with attached(model) as kv:
        generate(model, 2, input_ids=first)
        computed.clear()
        assert_same(generate(model, 2, input_ids=pair), generate(twin, 2, input_ids=pair), 1e-4)
        assert computed == [288, 112, 1]
        computed.clear()
        assert_same(generate(model, 2, input_ids=pair), generate(twin, 2, input_ids=pair), 1e-4)
        assert computed == [112, 1] and reused(kv) == 2 * 288
