"""Unmodified models restore: nested forwards from the front, loads from the back, both at once."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

import flowkv
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Outcome
from tests.cache.fakes import Halves, Wrapped
from tests.inside import RestoreEnded, RestoreSpan

from . import models
from .compare import assert_same, generate, reused
from .test_restore_nested import padded

PAGE = 16


class Slow(Wrapped):
    """A disk that answers few loads at a time, in the order asked, and loses some."""

    def __init__(self, frames: Any = None, *, every: int = 3, lose: float = 0.0) -> None:
        memory = MemoryTier(name="slow")
        memory.frames = frames if frames is not None else {}
        super().__init__(memory, kind="disk")
        self.every, self.lose, self.lost = every, lose, 0
        self.most = math.inf  # answers; later loads wait for a larger number
        self._random, self._polls, self._jobs = random.Random(7), 0, 0
        self._owed: list[tuple[int, int, Any]] = []

    def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
        self._jobs -= 1
        self._owed += [(self._jobs, index, item) for index, item in enumerate(items)]
        return self._jobs

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        self._polls += 1
        found = self.inner.poll(0.0)
        if self._owed and self._polls % self.every == 0 and self.most > 0:
            self.most -= 1
            job, index, item = self._owed.pop(0)
            header, _ = self.inner.frames[item.key]
            if header.info.kind != "state" and self._random.random() < self.lose:
                self.lost += 1
                return [*found, Completion(job, index, item.key, Outcome.FAILED, "lost")]
            self.inner.submit_load([item])
            (answer,) = self.inner.poll(0.0)
            found.append(answer._replace(job=job, item=index))
        return found

    def cancel(self, job: int) -> None:
        """Answers in any case."""


class Seen:
    """What restores of a cache did."""

    def __init__(self, kv: flowkv.KV) -> None:
        self.ended: list[RestoreEnded] = []
        self.spans: list[RestoreSpan] = []
        kv.bus.subscribe(self._see)

    def _see(self, event: object) -> None:
        if isinstance(event, RestoreEnded):
            self.ended.append(event)
        elif isinstance(event, RestoreSpan):
            self.spans.append(event)

    def sum(self, name: str) -> int:
        return int(sum(getattr(event, name) for event in self.ended))


def on(model: Any, tier: Any, **options: Any) -> flowkv.KV:
    """A cache above a tier that lasts, for models whose hooks no name would say."""
    options = {"revision": "tests"} | options
    return flowkv.attach(model, tiers=["gpu:64MiB", tier], page_size=PAGE, **options)


def stored(model: Any, *many: dict[str, torch.Tensor], **options: Any) -> dict[bytes, Any]:
    """Frames of the pages that these calls of `generate` make."""
    tier = Slow()
    with on(model, tier, **options) as kv:
        for inputs in many:
            generate(model, 1, **inputs)
        assert kv.flush()
        return dict(tier.inner.frames)


@contextmanager
def restoring(
    model: Any, frames: dict[bytes, Any], part: float = 0.5, **options: Any
) -> Iterator[tuple[flowkv.KV, Slow, Seen]]:
    """A cache that finds these frames on a slow tier, and computes a part of what it restores."""
    slow = {name: options.pop(name) for name in ("every", "lose") if name in options}
    tier = Slow(dict(frames), **slow)
    with on(model, tier, prefetch="off", **options) as kv:
        kv.restores.policy = Halves(part)
        yield kv, tier, Seen(kv)


@functools.cache
def known(name: str, *lengths: int) -> tuple[Any, dict[str, torch.Tensor], Any, dict[bytes, Any]]:
    """A model, a prompt or a padded batch, its answer, and frames of its pages."""
    model = models.causal(name)
    inputs = padded(*lengths) if lengths else {"input_ids": models.prompt(200)}
    return model, inputs, generate(model, 4, **inputs), stored(model, inputs)


def some(few: list[str], every: list[str]) -> list[Any]:
    """Parameters of which only a few run by default."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in every]


@pytest.mark.parametrize("part", [0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in (0, 1))])
@pytest.mark.parametrize("name", some(["llama", "gemma3"], models.CAUSAL))
def test_a_prompt_is_computed_and_loaded_at_once(name: str, part: float) -> None:
    model, inputs, theirs, frames = known(name)
    with restoring(model, frames, part) as (kv, _, seen):
        assert_same(generate(model, 4, **inputs), theirs)
        (ended,) = seen.ended
        assert ended.tokens == 192 and not ended.failed
        assert ended.computed_tokens == round(192 * part)
        within = 32 if name == "mistral" else 192  # its window sees two pages
        assert ended.loaded_tokens == min(within, 192 - round(192 * part))
        assert reused(kv) == 192 - round(192 * part)
        assert_same(generate(model, 4, **inputs), theirs)
        assert len(seen.ended) == 1, "by then it is on the device"


@pytest.mark.parametrize("name", some(["llama"], ["llama", "gemma3", "bloom"]))
def test_padded_rows_move_their_own_splits(name: str) -> None:
    model, inputs, theirs, frames = known(name, 200, 150, 173)
    with restoring(model, frames) as (kv, _, seen):
        assert_same(generate(model, 4, **inputs), theirs)
        assert len(seen.ended) == 3 and seen.sum("computed_tokens") > 150
        assert reused(kv) > 150
        assert_same(generate(model, 4, **inputs), theirs)
        assert len(seen.ended) == 3


def test_rows_that_are_known_further_than_others() -> None:
    model, inputs = models.causal("llama"), padded(200, 150, 173)
    theirs = generate(model, 4, **inputs)
    lone = dict(input_ids=inputs["input_ids"][1:2, 50:130])
    rest = {key: value[[0, 2]] for key, value in inputs.items()}
    frames = stored(model, lone, rest)
    with restoring(model, frames, 0.25) as (kv, _, seen):
        assert_same(generate(model, 4, **inputs), theirs)
        assert seen.sum("computed_tokens") > 0 and reused(kv) > 150
        assert_same(generate(model, 4, **inputs), theirs)


def test_beams_restore_their_prompt_once() -> None:
    model, inputs, _, frames = known("llama")
    beams = dict(num_beams=3, num_return_sequences=3)
    theirs = generate(model, 6, **inputs, **beams).sequences
    with restoring(model, frames) as (kv, _, seen):
        assert torch.equal(generate(model, 6, **inputs, **beams).sequences, theirs)
        (ended,) = seen.ended
        assert ended.loaded_tokens == 96
        assert reused(kv) == 3 * 96


class TestWhatDoesNotCome:
    """Lost and damaged loads are recomputed, before the user's forward or in the middle of it."""

    @pytest.mark.parametrize("part", [0.0, 0.5])
    @pytest.mark.parametrize("name", some(["llama"], ["llama", "gemma3", "deepseek_v3", "bloom"]))
    def test_one_prompt(self, name: str, part: float) -> None:
        model, inputs, theirs, frames = known(name)
        with restoring(model, frames, part, lose=0.2, every=5) as (_, tier, _):
            assert_same(generate(model, 4, **inputs), theirs)
            assert tier.lost
            assert_same(generate(model, 4, **inputs), theirs)

    @pytest.mark.parametrize("beams", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_a_padded_batch(self, beams: int) -> None:
        model, inputs, _, frames = known("llama", 200, 150, 173)
        theirs = generate(model, 4, **inputs, num_beams=beams).sequences
        with restoring(model, frames, 0.25, lose=0.2) as (_, tier, _):
            assert torch.equal(generate(model, 4, **inputs, num_beams=beams).sequences, theirs)
            assert tier.lost

    @pytest.mark.parametrize("lose", [0.2, 1.0])
    def test_rows_of_one_prompt(self, lose: float) -> None:
        model, inputs = models.causal("llama"), {"input_ids": models.prompt(200).repeat(3, 1)}
        theirs = generate(model, 4, **inputs)
        frames = stored(model, inputs)
        for part in (0.0, 0.5):
            with restoring(model, frames, part, lose=lose) as (_, tier, _):
                assert_same(generate(model, 4, **inputs), theirs)
                assert tier.lost
                assert_same(generate(model, 4, **inputs), theirs)

    def test_everything_is_lost(self) -> None:
        model, inputs, theirs, frames = known("llama")
        with restoring(model, frames, 0.0, lose=1.0) as (kv, _, _):
            assert_same(generate(model, 4, **inputs), theirs)
            assert reused(kv) == 0

    def test_a_cache_made_beforehand(self) -> None:
        model, inputs, theirs, frames = known("llama", 200, 200)
        for lose in (0.2, 1.0):
            with restoring(model, frames, 0.25, lose=lose) as (kv, _, _):
                cache = kv.cache(**inputs)
                assert cache.get_seq_length() == 192
                assert_same(generate(model, 4, **inputs, past_key_values=cache), theirs)


class TestCachesMadeBeforehand:
    def test_they_are_restored_by_their_first_forward(self) -> None:
        model, inputs, _, frames = known("llama", 200, 200)
        for beams in (1, 2):
            theirs = generate(model, 4, **inputs, num_beams=beams).sequences
            with restoring(model, frames) as (kv, _, seen):
                cache = kv.cache(**inputs)
                assert cache.get_seq_length() == 192
                run = generate(model, 4, **inputs, num_beams=beams, past_key_values=cache)
                assert torch.equal(run.sequences, theirs)
                assert seen.sum("computed_tokens") > 100 and reused(kv) > 100

    def test_they_can_be_copied_cut_and_looked_at_before(self) -> None:
        model, inputs, theirs, frames = known("llama")
        with restoring(model, frames) as (kv, _, _):
            cache = kv.cache(**inputs)
            twin = copy.deepcopy(cache)
            assert twin.get_seq_length() == cache.get_seq_length() == 192
            assert_same(generate(model, 4, **inputs, past_key_values=twin), theirs)
            assert_same(generate(model, 4, **inputs, past_key_values=cache), theirs)
        with restoring(model, frames) as (kv, _, _):
            cache = kv.cache(**inputs)
            assert cache.layers[0].keys.shape[2] == 192
            cache.crop(-30)
            assert_same(generate(model, 4, **inputs, past_key_values=cache), theirs)

    def test_they_can_be_dropped(self) -> None:
        model, inputs, theirs, frames = known("llama")
        with restoring(model, frames) as (kv, _, _):
            cache = kv.cache(**inputs)
            del cache
            assert_same(generate(model, 4, **inputs), theirs)
            cache = kv.cache(**inputs)
            kv.close()
            assert_same(generate(model, 4, **inputs, past_key_values=cache), theirs)


class TestOtherModels:
    def test_images(self) -> None:
        model = models.llava()
        pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(3)) * 3
        ids = models.prompt(200)
        for first in (20, 150):
            ids[0, first : first + models.IMAGE_PATCHES] = models.IMAGE_TOKEN
        inputs = dict(input_ids=ids, pixel_values=pixels)
        theirs = generate(model, 4, **inputs)
        frames = stored(model, inputs)
        for part, lose in [(0.9, 0.0), (0.0, 0.2)]:
            with restoring(model, frames, part, lose=lose) as (kv, tier, seen):
                assert_same(generate(model, 4, **inputs), theirs)
                assert (tier.lost > 0) is (lose > 0)
                assert (seen.sum("computed_tokens") > 0) is (part > 0)
                assert lose or reused(kv) > 0

    def test_speech(self) -> None:
        model = models.whisper()
        sound = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(1))
        text = models.prompt(100).repeat(2, 1)
        inputs = dict(input_features=sound, decoder_input_ids=text)

        def answer(cache: Any) -> torch.Tensor:
            given = inputs | dict(past_key_values=cache, max_new_tokens=1, do_sample=False)
            wanted = dict(return_dict_in_generate=True, output_logits=True)
            return GenerationMixin.generate(model, **given, **wanted).logits[0]

        theirs, tier = answer(pair(DynamicCache())), Slow()
        with on(model, tier) as kv:
            answer(pair(kv.cache(**inputs)))
            assert kv.flush()
            frames = dict(tier.inner.frames)
        for lose in (0.0, 0.3):
            with restoring(model, frames, lose=lose) as (kv, _, seen):
                cache = pair(kv.cache(**inputs))
                torch.testing.assert_close(answer(cache), theirs, rtol=1e-4, atol=1e-4)
                assert seen.sum("computed_tokens") >= 96


def pair(cache: Any) -> Any:
    """As encoder-decoders want it."""
    return EncoderDecoderCache(cache, DynamicCache())
