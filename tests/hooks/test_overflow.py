"""Prompts and answers longer than the pool: the same tokens, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.fixture_model import load_tiny
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.inside import CapacityError, ConfigError, StateError, StoreError

pytestmark = pytest.mark.usefixtures("one_thread")
POOL = dict(gpu="1MiB", host="64MiB", overflow=True)  # 256 tokens of the fixture's, in 16 pages


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    source = Path(flowkv.__file__).with_name("cache") / "store.py"
    return torch.tensor([list(source.read_bytes()[:3000])])


def away(kv: flowkv.KV) -> int:
    return int(kv.planner.overflow.away)


class TestAnswers:
    def test_are_those_of_a_pool_that_fits(self, text: torch.Tensor) -> None:
        """Prompt, answer, and the next turn, which finds all of it again."""
        model, prompt = load_tiny(), text[:, :1500]
        theirs = generate(model, 40, input_ids=prompt)
        longer = torch.cat([theirs.sequences, text[:, 1500:1800]], 1)
        after = generate(model, 20, input_ids=longer)
        with attached(model, **POOL) as kv:
            assert_same(generate(model, 40, input_ids=prompt), theirs)
            over, pool = kv.planner.overflow, kv.planner.store.pools["cpu"]
            assert over.read_bytes > 0 and pool.capacity_bytes() == 1 << 20
            assert_same(generate(model, 20, input_ids=longer), after)
            assert reused(kv) >= 1536 - 16

    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "mistral"])
    def test_of_many_architectures(self, name: str) -> None:
        """Full layers, and sliding ones beside them, with softcaps and sinks; or sliding alone."""
        model = models.causal(name)
        if name == "llama":
            model.set_attn_implementation("eager")
        ids = models.prompt(400)
        theirs = generate(model, 30, input_ids=ids)
        pool = "512KiB" if name == "mistral" else "256KiB"  # windows have to fit
        with attached(model, gpu=pool, host="64MiB", overflow=True) as kv:
            assert_same(generate(model, 30, input_ids=ids), theirs)
            assert (kv.planner.overflow.read_bytes > 0) == (name != "mistral")

    def test_of_padded_batches(self, text: torch.Tensor) -> None:
        model, rows = load_tiny(), models.pad_rows(text[0, :1800].view(3, 600), 0, 7, 250)
        theirs = generate(model, 20, **rows)
        with attached(model, **POOL) as kv:
            for _ in range(2):
                assert_same(generate(model, 20, **rows), theirs)
            assert kv.planner.overflow.read_bytes > 0

    def test_of_beams(self, text: torch.Tensor) -> None:
        model, prompt = load_tiny(), text[:, :700]
        options = dict(num_beams=3, return_dict_in_generate=False, output_logits=False)
        theirs = generate(model, 12, input_ids=prompt, **options)
        with attached(model, **POOL) as kv:
            assert torch.equal(generate(model, 12, input_ids=prompt, **options), theirs)
            assert kv.planner.overflow.read_bytes > 0

    def test_of_a_prompt_shown_in_chunks(self, text: torch.Tensor) -> None:
        model, prompt = load_tiny(), text[:, :900]
        theirs = generate(model, 12, input_ids=prompt)
        with attached(model, **POOL) as kv:
            ours = generate(model, 12, input_ids=prompt, prefill_chunk_size=100)
            assert_same(ours, theirs)
            assert kv.planner.overflow.read_bytes > 0

    @pytest.mark.filterwarnings("ignore:host can store no page")
    @pytest.mark.usefixtures("all_is_loaded")
    def test_from_a_disk_of_an_earlier_process(self, text: torch.Tensor, tmp_path: Path) -> None:
        model, prompt = load_tiny(), text[:, :900]
        theirs = generate(model, 12, input_ids=prompt)
        pool = POOL | dict(host="8KiB", disk=str(tmp_path))
        for turn in range(2):
            with attached(model, **pool) as kv:
                assert_same(generate(model, 12, input_ids=prompt), theirs)
                assert (reused(kv) > 800) == bool(turn)
                assert kv.planner.overflow.read_bytes > 0

    def test_on_a_disk_alone_whose_model_has_to_be_proven(
        self, text: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flowkv.naming.identity.SMALL_BYTES", 0)
        model, prompt = load_tiny(), text[:, :900]
        theirs = generate(model, 40, input_ids=prompt)
        with attached(model, gpu="1MiB", disk=str(tmp_path), overflow=True) as kv:
            assert_same(generate(model, 40, input_ids=prompt), theirs)
            assert kv.planner.overflow.read_bytes > 0

    @pytest.mark.parametrize("codec", ["kv8", "auto"])
    def test_of_encoded_pages_are_near(self, text: torch.Tensor, codec: str) -> None:
        model, prompt = load_tiny(), text[:, :1500]
        options = dict(codec=codec, page_size=64, host="64MiB", overflow=True)
        found = []
        for pool in ("64MiB", "1MiB"):
            with attached(model, gpu=pool, **options) as kv:
                found.append(generate(model, 1, input_ids=prompt).logits[0].log_softmax(-1))
                assert (kv.planner.overflow.read_bytes > 0) == (pool == "1MiB")
        assert float((found[0] - found[1]).abs().median()) < 0.3


class TestWhatFits:
    def test_is_served_as_ever(self, text: torch.Tensor) -> None:
        model, prompt = load_tiny(), text[:, :200]
        with attached(model, gpu="16MiB", host="16MiB", overflow=True) as kv:
            generate(model, 20, input_ids=prompt)
            over = kv.planner.overflow
            assert over.away == over.read_bytes == over.staging_bytes() == 0


class TestEngine:
    @pytest.mark.parametrize("scheduler", ["fcfs", "shortest"])
    def test_serves_what_is_longer_than_its_pool(self, text: torch.Tensor, scheduler: str) -> None:
        """Beside requests that fit; tokens are those of a pool that holds everything."""
        model = load_tiny()
        starts = [(0, 700), (1200, 60), (300, 450), (2000, 100), (700, 550), (1250, 30)]
        prompts = [text[0, at : at + count].tolist() for at, count in starts]
        theirs = [generate(model, 12, input_ids=torch.tensor([p])).sequences[0] for p in prompts]
        with (
            attached(model, **POOL) as kv,
            flowkv.Engine(model, kv, max_rows=4, scheduler=scheduler) as engine,
        ):
            for _ in range(2):
                found = engine.run(prompts, max_new_tokens=12)
                for prompt, one, expected in zip(prompts, found, theirs, strict=True):
                    assert [*prompt, *one.tokens] == expected.tolist()
            over = kv.planner.overflow
            assert over.read_bytes > 0
            assert kv.planner.store.pools["cpu"].capacity_bytes() == 1 << 20

    def test_does_no_more_for_what_fits(self, text: torch.Tensor) -> None:
        model = load_tiny()
        prompts = [text[0, 100 * n : 100 * n + 100].tolist() for n in range(4)]
        with (
            attached(model, gpu="16MiB", host="16MiB", overflow=True) as kv,
            flowkv.Engine(model, kv) as engine,
        ):
            engine.run(prompts, max_new_tokens=8)
            over = kv.planner.overflow
            assert over.away == over.read_bytes == over.staging_bytes() == 0


class TestWhatDoesNotCome:
    def test_is_an_error_once_and_computed_the_next_time(self, text: torch.Tensor) -> None:
        model, prompt = load_tiny(), text[:, :900]
        theirs = generate(model, 12, input_ids=prompt)
        with attached(model, **POOL) as kv:
            cache = DynamicCache()
            with torch.no_grad():
                model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
                assert away(kv) > 20
                (host,) = kv.planner.store.stack.tiers
                host.delete(list(host._frames)[5:7])
                with pytest.raises(StoreError, match="Generate again"):
                    for _ in range(3):
                        model(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
            del cache
            assert_same(generate(model, 12, input_ids=prompt), theirs)
            assert away(kv) == 0


class TestWhatIsNotServed:
    def test_dense_models_are_refused(self) -> None:
        model = models.causal("llama")
        with pytest.raises(ConfigError, match="cannot go on past its pool"):
            flowkv.attach(model, reads="dense", **POOL)
        assert not model._forward_hooks

    def test_latents_that_are_read_dense_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="layers 0-3 are read dense"):
            flowkv.attach(models.causal("deepseek_v3"), **POOL)

    def test_recurrent_models_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="recurrent"):
            flowkv.attach(models.causal("falcon_h1"), **POOL)

    def test_keys_and_values_cannot_be_had(self, text: torch.Tensor) -> None:
        model = load_tiny()
        with attached(model, **POOL), torch.no_grad():
            cache = DynamicCache()
            given = dict(past_key_values=cache, use_cache=True, logits_to_keep=1)
            model(input_ids=text[:, :600], **given)
            with pytest.raises(StateError, match="below its device"):
                assert cache.layers[0].keys.shape


def test_without_room_anywhere_the_error_names_the_room(text: torch.Tensor) -> None:
    """No other cache could go on with pages that lie below the device."""
    model, prompt = load_tiny(), text[:, :1500]
    kv = attached(model, gpu="1MiB", host="5MiB", overflow=True)
    with kv, pytest.raises(CapacityError):
        generate(model, 600, input_ids=prompt)
