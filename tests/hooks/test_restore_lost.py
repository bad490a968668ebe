"""Restored columns that a cache was counted on for, and that are lost: never half a prompt."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.cache.audit import audit
from tests.inside import CapacityError, PagedCache, Restoring, StateError
from tests.inside import rows_Rows as Rows

from . import models
from .compare import assert_same, attached, generate
from .test_restore import Slow, restoring, stored

pytestmark = pytest.mark.usefixtures("all_is_loaded")
"""On a busy machine computing may be faster than the slow tier, and would be chosen."""
Patch = pytest.MonkeyPatch
Last = Callable[..., torch.Tensor]


def stop(armed: threading.Event) -> None:
    """Fails once it was asked for."""
    if armed.is_set():
        armed.clear()
        raise ZeroDivisionError("asked for")


@pytest.fixture(scope="module")
def armed() -> threading.Event:
    """What the model fails with next."""
    return threading.Event()


@pytest.fixture(scope="module")
def llama(armed: threading.Event) -> Any:
    model = models.causal("llama")
    model.model.layers[0].register_forward_pre_hook(lambda *_: stop(armed))
    return model


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return models.prompt(200)


@pytest.fixture(scope="module")
def frames(llama: Any, prompt: torch.Tensor) -> dict[bytes, Any]:
    return stored(llama, {"input_ids": prompt})


@pytest.fixture
def last(llama: Any, prompt: torch.Tensor) -> Last:
    """The logits behind the prompt, of a forward over what a cache does not hold."""

    @torch.no_grad()
    def last(cache: Any, first: int, *, rows: int = 1, masked: bool = True) -> torch.Tensor:
        ids = prompt.repeat(rows, 1)
        mask = torch.ones_like(ids) if masked else None
        return llama(ids[:, first:], attention_mask=mask, past_key_values=cache).logits[:, -1]

    return last


def right(logits: torch.Tensor, model: Any, prompt: torch.Tensor) -> bool:
    with torch.no_grad():
        theirs = model(prompt, use_cache=False).logits[:, -1]
    return torch.allclose(logits, theirs.expand_as(logits), rtol=1e-4, atol=1e-4)


def half(model: Any, kv: flowkv.KV, tier: Slow, prompt: torch.Tensor, lose: float) -> Any:
    """A cache that has 96 columns, of 192 that it says it has; some of the others are lost."""
    generate(model, 1, input_ids=prompt[:, :100])
    tier.lose = lose
    cache = kv.cache(prompt)
    assert cache.get_seq_length() == 192
    return cache


def lost_later(patch: Patch, tier: Slow, *, room: bool = True) -> None:
    """All that is on its way when a forward begins is lost, and nothing can be computed instead."""

    def full(*_: Any, **__: Any) -> None:
        raise CapacityError("the pages are full", "Close sequences")

    expand, begin = PagedCache.expand, Rows.plan

    def lose(cache: PagedCache, count: int) -> None:
        tier.lose = 1.0
        expand(cache, count)

    def begun(rows: Rows, new: int, **options: Any) -> None:
        full() if rows.restoring is not None else begin(rows, new, **options)

    patch.setattr(Restoring, "_mend", full)
    patch.setattr(PagedCache, "expand", lose)
    if not room:
        patch.setattr(Rows, "plan", begun)


@pytest.mark.parametrize("rows", [pytest.param(1, id="no room"), pytest.param(3, id="beams")])
@pytest.mark.parametrize("masked", [True, False])
def test_a_suffix_is_not_taken_for_the_whole(
    llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], last: Last, rows: int, masked: bool
) -> None:
    with restoring(llama, frames, 0.0) as (kv, tier, _):
        cache = kv.cache(prompt)
        assert cache.get_seq_length() == 192
        with Patch.context() as patch:
            lost_later(patch, tier, room=rows > 1)
            if rows == 1:  # the model's own cache takes what came, before anything is lost
                with pytest.warns(UserWarning, match="pages are full"):
                    assert right(last(cache, 192, rows=rows, masked=masked), llama, prompt)
                assert not tier.lost and cache.get_seq_length() == 200
                return
            with pytest.raises(StateError, match=r"get_seq_length\(\)"):
                last(cache, 192, rows=rows, masked=masked)
        left = cache.get_seq_length()
        assert tier.lost and left < 192
        assert right(last(cache, left, rows=rows, masked=masked), llama, prompt)
        assert cache.get_seq_length() == 200
        audit(kv)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_whole_prompt_in_hand_is_computed(
    llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], last: Last, rows: int
) -> None:
    refused = pytest.warns(UserWarning, match="pages are full") if rows == 1 else nullcontext()
    with restoring(llama, frames, 0.0) as (kv, tier, _), Patch.context() as patch, refused:
        cache = kv.cache(prompt)
        lost_later(patch, tier, room=rows > 1)
        assert right(last(cache, 0, rows=rows), llama, prompt)
        assert bool(tier.lost) == (rows > 1)


class TestWithoutAnybodyToCompute:
    """Where nothing can be computed instead, losing it is told as soon as it matters."""

    @torch.no_grad()
    @pytest.mark.parametrize("lose", [0.0, 1.0])
    @pytest.mark.parametrize("part", [0.0, 0.9])
    def test_a_part_of_the_model_is_called(
        self, llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], part: float, lose: float
    ) -> None:
        def last(first: int) -> torch.Tensor:
            hidden = llama.model(input_ids=prompt[:, first:], past_key_values=cache)
            return llama.lm_head(hidden.last_hidden_state[:, -1])

        with restoring(llama, frames, part) as (kv, tier, _):
            cache, first = half(llama, kv, tier, prompt, lose), 192
            if lose:
                with pytest.raises(StateError, match="holds 96 columns, not 192"):
                    last(first)
                first = cache.get_seq_length()
            assert right(last(first), llama, prompt)
            assert cache.get_seq_length() == 200
            audit(kv)

    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize("how", ["copied", "looked at", "cut", "looked at and cut", "failed"])
    def test_it_was_lost_before(
        self,
        llama: Any,
        prompt: torch.Tensor,
        frames: dict[bytes, Any],
        last: Last,
        armed: threading.Event,
        how: str,
        masked: bool,
    ) -> None:
        with restoring(llama, frames, 0.0) as (kv, tier, _):
            cache, first = half(llama, kv, tier, prompt, 0.5), 192
            if how == "copied":
                cache = copy.deepcopy(cache)
            elif how == "failed":
                tier.lose, tier.every = 0.0, 1000
                armed.set()
                with pytest.raises(ZeroDivisionError):
                    last(cache, first, masked=masked)
            if "looked" in how:
                assert cache.layers[0].keys.shape[2] == cache.get_seq_length()
            if "cut" in how:
                cache.crop(190)
                first = 190
            assert cache.get_seq_length() == 96
            with pytest.raises(StateError, match=f"holds 96 columns, not {first}"):
                last(cache, first, masked=masked)
            assert right(last(cache, 96, masked=masked), llama, prompt)

    @pytest.mark.parametrize("masked", [True, False])
    def test_whoever_has_noticed_goes_on(
        self, llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], last: Last, masked: bool
    ) -> None:
        theirs = generate(llama, 4, input_ids=prompt)
        with restoring(llama, frames, 0.0) as (kv, tier, _):
            cache = copy.deepcopy(half(llama, kv, tier, prompt, 0.5))
            assert tier.lost and cache.get_seq_length() == 96
            assert right(last(cache, 96, masked=masked), llama, prompt)
        with restoring(llama, frames, 0.0) as (kv, tier, _):
            cache = copy.deepcopy(half(llama, kv, tier, prompt, 0.5))
            assert_same(generate(llama, 4, input_ids=prompt, past_key_values=cache), theirs)


def test_nothing_is_planned_over_what_is_not_in_its_line(
    llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any]
) -> None:
    with restoring(llama, frames) as (kv, _, _):
        cache = kv.cache(prompt)
        with pytest.raises(StateError, match="missing"):
            cache.rows.plan(8)
        audit(kv)


def test_layers_left_out_come_as_well_or_nothing_does(
    llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], last: Last
) -> None:
    with restoring(llama, frames) as (kv, _, _):
        cache = kv.cache(prompt)
        with Patch.context() as patch:
            patch.setattr(Restoring, "complete", lambda _: False)
            with pytest.raises(StateError, match="did not come"):
                last(cache, 192)
        assert not cache.rows.forwards and cache.rows.step is None
        assert right(last(cache, cache.get_seq_length()), llama, prompt)
        assert cache.rows.forwards == 1
        audit(kv)


@torch.no_grad()
@pytest.mark.parametrize("masked", [True, False])
def test_a_first_forward_that_failed_is_repeated(
    llama: Any, prompt: torch.Tensor, armed: threading.Event, masked: bool
) -> None:
    given: dict[str, Any] = dict(attention_mask=torch.ones_like(prompt)) if masked else {}
    with attached(llama, revision="tests") as kv:
        generate(llama, 1, input_ids=prompt)
        cache = DynamicCache(config=llama.config)
        given |= dict(past_key_values=cache, logits_to_keep=1)
        armed.set()
        with pytest.raises(ZeroDivisionError):
            llama(prompt, **given)
        assert cache.get_seq_length() == 0, "as before"
        assert right(llama(prompt, **given).logits[:, -1], llama, prompt)
        assert cache.get_seq_length() == 200
        audit(kv)


@torch.no_grad()
def test_a_first_forward_with_images_is_repeated_with_others() -> None:
    model, armed = models.llava(), threading.Event()
    ids = models.prompt(120)
    ids[0, 20 : 20 + models.IMAGE_PATCHES] = models.IMAGE_TOKEN
    one, other = torch.randn(2, 1, 3, 28, 28, generator=torch.Generator().manual_seed(3)) * 3
    theirs = model(ids, pixel_values=other).logits[:, -1]
    model.lm_head.register_forward_pre_hook(lambda *_: stop(armed))
    with attached(model, revision="tests"):
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            armed.set()
            with pytest.raises(ZeroDivisionError):
                model(ids, pixel_values=one, past_key_values=cache, logits_to_keep=1)
            logits = model(ids, pixel_values=other, past_key_values=cache, logits_to_keep=1).logits
            torch.testing.assert_close(logits[:, -1], theirs, rtol=1e-4, atol=1e-4)
            run = generate(model, 1, input_ids=ids, pixel_values=other)
            torch.testing.assert_close(run.logits[0], theirs, rtol=1e-4, atol=1e-4)
            assert_same(
                generate(model, 4, input_ids=ids, pixel_values=one),
                generate(model, 4, input_ids=ids, pixel_values=one, use_cache=False),
            )


def test_a_failed_forward_is_not_audited(
    llama: Any, prompt: torch.Tensor, frames: dict[bytes, Any], last: Last, armed: threading.Event
) -> None:
    with restoring(llama, frames, 0.0, audit=1.0) as (kv, _, _):
        cache = kv.cache(prompt)
        armed.set()
        with pytest.raises(ZeroDivisionError):
            last(cache, 192)
        assert cache.audits is None


class TestAPromptPassedAgain:
    """Only where it can be nothing else are tokens taken for those that a cache holds."""

    @torch.no_grad()
    @pytest.mark.parametrize("told", ["nothing", "a mask", "positions"])
    def test_text_that_goes_on_as_it_began(self, llama: Any, told: str) -> None:
        ids = models.prompt(97)
        more = torch.cat([ids, models.prompt(9, seed=4)], 1)
        whole = torch.cat([ids[:, :96], more], 1)
        given: dict[str, torch.Tensor] = {}
        if told == "a mask":
            given["attention_mask"] = torch.ones_like(whole)
        elif told == "positions":
            given["position_ids"] = torch.arange(96, whole.shape[1])[None]
        with attached(llama, revision="tests") as kv:
            for _ in range(2):
                cache = kv.cache(ids)
                first = cache.get_seq_length()
                if first:
                    logits = llama(more, past_key_values=cache, **given).logits
                    assert logits.shape[1] == more.shape[1]
                    assert right(logits[:, -1], llama, whole)
                else:
                    generate(llama, 1, input_ids=ids, past_key_values=cache)
            assert first == 96


def test_pages_are_lost_of_a_model_that_another_thread_changes(monkeypatch: Patch) -> None:
    """The other thread uses the changed model before lost pages are computed."""
    model, prompt = models.short(), models.prompt(200)
    frames, todo = stored(model, {"input_ids": prompt}), [True]
    layer: Any = model.model.layers[0]
    plan = Rows.plan

    @torch.no_grad()
    def change() -> None:
        layer.mlp.down_proj.weight.mul_(-2.0)
        generate(model, 1, input_ids=models.prompt(20, 9))

    with restoring(model, frames, 0.0) as (_, tier, _):

        def planned(rows: Rows, new: int) -> Any:
            step = plan(rows, new)
            if rows.restoring is not None and todo and todo.pop():
                tier.lose = 1.0
                thread = threading.Thread(target=change)
                thread.start()
                thread.join()
            return step

        monkeypatch.setattr(Rows, "plan", planned)
        generate(model, 2, input_ids=prompt)
        assert tier.lost and not todo
        with torch.no_grad():
            layer.mlp.down_proj.weight.div_(-2.0)
        wanted = generate(models.short(), 2, input_ids=prompt)
        assert_same(generate(model, 2, input_ids=prompt), wanted)
