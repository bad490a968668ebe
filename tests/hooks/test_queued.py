"""A CPU in the place of a GPU: models answer as without a cache, by the code for GPUs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import flowkv
from flowkv import Geometry, kernels
from tests.cache.audit import audit
from tests.cache.fakes import lasting
from tests.cache.test_codecs import PAGE, make, poison, text
from tests.cache.test_overflow import Noise, grow, run
from tests.cache.test_overflow import make as overflowing
from tests.cache.test_together import leave_all
from tests.cache.toy import (
    advance,
    check_content,
    make_kv,
    opened,
    published,
    settle,
    simple,
    write,
)
from tests.hooks import models
from tests.hooks.compare import asked, assert_same, attached, generate, reused
from tests.hooks.test_blend import DOCUMENTS, LISTS, blending, draw, last
from tests.inside import DeviceTimer, NonFiniteError
from tests.queued import Event, Runtime, like_a_gpu

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.thorough)])
def device(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with like_a_gpu(request.param) as runtime:
        yield runtime
        gc.collect()
        end_s = time.monotonic() + 10.0
        while runtime.registered and time.monotonic() < end_s:
            time.sleep(0.02)  # a thread that makes memory ahead holds it until it ends
            gc.collect()
        assert not runtime.registered, "memory is still registered with the device"
        assert not runtime.faults


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_models_answer_as_without_a_cache(name: str, device: Runtime) -> None:
    model = models.causal(name)
    questions = asked(model)
    with attached(model) as kv:
        for _ in range(3):
            for call, theirs in questions:
                assert_same(generate(model, **call), theirs)
        graphs = kv.stats()["graphs"]
        assert reused(kv) > 0 and (graphs["replayed"] > 0) == (not graphs["eager"])
        audit(kv)


@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_pages_leave_a_full_pool_and_come_back(codec: str, device: Runtime) -> None:
    model = models.causal("llama")
    prompts = [models.prompt(200, seed) for seed in range(4)]
    with attached(model, gpu="512KiB", host="64MiB", codec=codec, recent_tokens=0) as kv:
        kv.planner.measured = lambda *_: None  # no rate says what a load is worth
        answers = [generate(model, 3, input_ids=prompt).sequences for prompt in prompts]
        kv.flush()
        before = reused(kv)
        for prompt, answer in zip(prompts, answers, strict=True):
            again = generate(model, 3, input_ids=prompt)
            assert torch.equal(again.sequences, answer)
        host = kv.stats()["tiers"]["host"]
        assert reused(kv) - before >= 4 * 192 and host["loaded_bytes"] > 0
        assert device.registered and not host["dropped"]
        audit(kv)


def test_an_engine_serves_rows_that_come_and_go(device: Runtime) -> None:
    model = models.causal("llama")
    prompts = [models.prompt(30 + 20 * seed, seed)[0].tolist() for seed in range(5)]
    alone = [
        generate(model, 12, input_ids=torch.tensor([p])).sequences[0].tolist() for p in prompts
    ]
    with attached(model) as kv, flowkv.Engine(model, kv, max_rows=3) as engine:
        for _ in range(2):
            found = engine.run(prompts, max_new_tokens=12)
            assert [p + f.tokens for p, f in zip(prompts, found, strict=True)] == alone
        assert kv.stats()["graphs"]["replayed"] > 0
        audit(kv)


def test_contexts_beyond_the_device(device: Runtime) -> None:
    model, ids = models.causal("llama"), models.prompt(400)
    theirs = generate(model, 30, input_ids=ids)
    with attached(model, gpu="256KiB", host="64MiB", overflow=True) as kv:
        assert_same(generate(model, 30, input_ids=ids), theirs)
        assert kv.planner.overflow.read_bytes > 0


def test_a_stage_is_read_behind_the_copy_that_another_stream_began(
    device: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads attend over the same pages below their device, on streams of their own."""
    shape = Geometry.uniform(layers=1, kv_heads=2, head_dim=64, page_size=16)
    row = Noise(shape)
    with overflowing(shape, 16, overflow=True) as kv, kv.open([], reuse=False) as seq:
        grow(kv, [seq], [row], 300)
        assert seq.away
        kv.planner.overflow._stages.clear()
        with kv.fork(seq) as twin, kv.step([twin], [[7]]) as step:
            k, v, q = row.copy().make(0, twin.length, 1)
            step.write(0, k, v)
            monkeypatch.setattr(Event, "query", lambda _: False)  # the copies take their time
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                run(kv, [seq], [[7]], [row])
            torch.testing.assert_close(step.read(0, q), row.attention(0, q))


@pytest.mark.parametrize(("rows", "recent"), [(1, 0), (3, 8)])
def test_a_cache_closes_with_all_pages_whatever_cannot_be_encoded(
    rows: int, recent: int, device: Runtime
) -> None:
    """Pages are encoded behind a step, or behind the end of a sequence."""
    tier, left = lasting(), list[str]()
    tier.close = lambda: left.append("closed")
    kv = make("kv8", recent_tokens=recent * PAGE, non_finite="error", tiers=[tier])
    seqs = [kv.open(text(2 * PAGE, seed)) for seed in range(rows)]
    for seq in seqs:
        poison(kv, seq, 1e38, settles=False)
    with pytest.raises(NonFiniteError, match="page 1 of layer 1"):
        kv.close()
    assert kv.closed and left == ["closed"] and len(list(tier.scan())) == 4 * rows


def test_a_page_that_a_step_reads_is_not_replaced_by_the_published_one(device: Runtime) -> None:
    """Pages are published late: meanwhile their sequence may be in a step of another thread."""
    tokens, other = [*range(PAGE)], [*range(50, 50 + 2 * PAGE)]
    with make_kv(simple(page_size=PAGE), pages=5, prefetch="off") as kv:
        one, two = kv.open(tokens), kv.open(tokens)
        for seq in (one, two):
            advance(kv, [seq], [tokens])
        with kv.step([two], [[99]]) as step:
            write(step)
            before = kernels.gather_dense(step.pages(0), step.batch(0), PAGE + 1)
            with opened(kv, other) as third:
                after = kernels.gather_dense(step.pages(0), step.batch(0), PAGE + 1)
                check_content(kv, third, other)
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
        check_content(kv, two, [*tokens, 99])
        more = [*range(PAGE - 1)]
        advance(kv, [two], [more])
        settle(kv)
        assert one.blocks[0][0] is two.blocks[0][0] is not None, "it is shared after all"
        check_content(kv, two, [*tokens, 99, *more])
        two.close()
        one.close()
        audit(kv)


def test_pages_that_a_busy_tier_refuses_are_counted(device: Runtime) -> None:
    """Also where a copy ends just behind the refusal, so that the tier takes the next page."""
    tier, prompt = lasting(), [*range(6 * PAGE)]
    shape = simple(page_size=PAGE)
    with make_kv(shape, pages=16, tiers=[tier], write_back=False, prefetch="off") as kv:
        kv.planner.store.stack.mover.lanes[0].schedule.queue_bytes = 4096
        published(kv, prompt)
        leave_all(kv)
        whole, lost = kv.flush(60), 6 - len(tier.frames)
        assert lost and not whole and kv.stats()["tiers"]["lasting"]["dropped"] == lost


def test_a_beginning_before_documents_is_known_to_the_next_prompt(device: Runtime) -> None:
    """What is computed exactly is published, although what is blended behind it is not."""
    model, begins = models.causal("llama"), draw(200, 70)
    with blending(model, 0.15) as kv:
        kv.learn(LISTS)
        for n, document in enumerate(DOCUMENTS[:2]):
            seen = reused(kv)
            last(model, torch.cat([begins, document, draw(10, 71 + n)]))
            assert (reused(kv) - seen >= 192) == (n > 0)


def test_an_odd_forward_takes_no_earlier_page_away(device: Runtime) -> None:
    """Pages of a prompt may still wait for their device when no further ones can be published."""
    model, ids = models.causal("llama"), models.prompt(70)
    with attached(model) as kv, torch.no_grad():
        past = DynamicCache(config=model.config)
        model(ids[:, :64], past_key_values=past, use_cache=True, logits_to_keep=1)
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 64:]), past_key_values=past)
        del past
        generate(model, 1, input_ids=ids)
        assert reused(kv) >= 64


def test_an_export_is_behind_copies_that_another_stream_began(
    device: Runtime, all_is_loaded: None, tmp_path: Path
) -> None:
    prompt, archive = [*range(48)], tmp_path / "archive"
    with make_kv(pages=8, disk=f"{tmp_path}:16MiB", prefetch="off") as kv, make_kv() as heir:
        for tokens in (prompt, [99, *prompt]):
            published(kv, tokens)
            kv.flush()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Event, "query", lambda _: False)  # the copies take their time
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                waits = kv.prefetch([*prompt, 99])
                waits.wait()
            assert waits.arrived > 4
            kv.export(archive, prompt)
        assert heir.load(archive).frames == 12
        with heir.open([*prompt, 99]) as seq:
            assert seq.reused == 48
            check_content(heir, seq, prompt)


def test_the_time_of_a_prompt_is_that_of_the_device(device: Runtime) -> None:
    """A timer has no time before both of its ends are over."""
    timer = DeviceTimer(torch.device("cpu"))
    timer.stop()
    found = [timer.seconds() for _ in range(6)]
    assert found[-1] is not None and found[-1] >= 0
    assert None not in found[next(i for i, x in enumerate(found) if x is not None) :]
