"""Edited conversations: spans found at any place, turned, mended, and apart from exact pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flowkv
from flowkv import Salt
from tests.cache.toy import settle
from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.hooks.test_blend import MADE, draw, last
from tests.inside import ConfigError, History, KnownText, door_of, edits

pytestmark = pytest.mark.usefixtures("one_thread")
SYSTEM, RESULT, WORDS, LATE, NEW = (
    draw(n, seed) for n, seed in ((70, 1), (130, 2), (90, 3), (60, 4), (25, 5))
)
FORMER = torch.cat([SYSTEM, RESULT, WORDS, LATE])
EDITS = {
    "removed": torch.cat([SYSTEM, WORDS, LATE, NEW]),
    "replaced": torch.cat([SYSTEM, draw(9, 6), WORDS, LATE, NEW]),
    "put in": torch.cat([SYSTEM, RESULT, draw(40, 7), WORDS, LATE, NEW]),
    "moved": torch.cat([SYSTEM, WORDS, RESULT, LATE, NEW]),
    "in front": torch.cat([draw(11, 8), SYSTEM[3:], RESULT, WORDS, LATE, NEW]),
    "twice": torch.cat([SYSTEM, WORDS, NEW, WORDS, NEW]),
}


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


@contextmanager
def editing(model: Any, recompute: Any = "first:0", **options: Any) -> Iterator[flowkv.KV]:
    with (
        pytest.warns(flowkv.ExperimentalWarning, match="edits"),
        attached(model, reuse="edits", recompute=recompute, **options) as kv,
    ):
        yield kv


def blended(kv: flowkv.KV) -> dict[str, int]:
    return dict(kv.stats()["blend"])


def texts_of(model: Any, kv: flowkv.KV) -> list[KnownText]:
    history = door_of(model).blending.now()._histories.get(kv.config.tenant, History())
    return list(history.texts.values())


@pytest.mark.parametrize(
    ("name", "chosen"),
    [pytest.param(name, [*EDITS][n % 3 :: 3], id=name) for n, name in enumerate(MADE)],
)
def test_every_kind_of_edit_is_exact_where_all_is_computed_again(
    name: str, chosen: list[str]
) -> None:
    model = MADE[name]()
    for prompt in (EDITS[edit] for edit in chosen):
        exact = last(model, prompt)
        with editing(model, 1.0) as kv:
            last(model, FORMER)
            found = last(model, prompt)
            assert blended(kv)["computed_tokens"] > 100 and not blended(kv)["taken_tokens"]
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("edit", EDITS)
def test_spans_are_taken_and_later_turns_continue_them(edit: str) -> None:
    model, prompt = models.causal("llama"), EDITS[edit]
    exact = last(model, prompt)
    with editing(model) as kv:
        last(model, FORMER)
        answer = generate(model, 12, input_ids=prompt[None]).sequences[0]
        first = blended(kv)
        assert first["taken_tokens"] >= 130 - 50 * (edit == "twice")
        near = last(model, prompt)
        assert float((near - exact).abs().max()) > 1e-4
        again = blended(kv)
        assert again["computed_tokens"] == first["computed_tokens"]
        generate(model, 4, input_ids=torch.cat([answer, NEW])[None])
        third = blended(kv)
        assert third["computed_tokens"] == first["computed_tokens"], "no page was continued"
        assert third["taken_tokens"] - again["taken_tokens"] > first["taken_tokens"]


def test_another_edit_of_an_edited_text(model: Any) -> None:
    """Its pages are told apart by both edits; what stands before the second is continued."""
    once, twice = EDITS["removed"], torch.cat([SYSTEM, WORDS, RESULT, NEW])
    prompts = [FORMER, once, twice, torch.cat([twice, NEW]), once]
    exact = [last(model, prompt) for prompt in prompts]
    with editing(model, 1.0) as kv:
        for prompt, expected in zip(prompts, exact, strict=True):
            found, far = last(model, prompt), 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=far)
        assert sorted(len(text.salts) for text in texts_of(model, kv)) == [0, 1, 2]


def test_exact_prompts_get_no_edited_page(tmp_path: Path) -> None:
    """Neither in this cache nor in others on the same directory."""
    model, disk, prompt = models.causal("llama"), f"{tmp_path}:64MiB", EDITS["removed"]
    theirs = generate(model, 30, input_ids=prompt[None]).sequences
    with editing(model, disk=disk) as kv:
        last(model, FORMER)
        ours = generate(model, 30, input_ids=prompt[None]).sequences
        assert not torch.equal(ours, theirs)
        with kv.open(prompt.tolist()) as seq:
            assert seq.length <= len(SYSTEM)
        assert kv.flush()
    with attached(model, disk=disk) as kv:
        assert torch.equal(generate(model, 30, input_ids=prompt[None]).sequences, theirs)
        assert 0 < reused(kv) <= len(SYSTEM)


def test_texts_of_a_tenant_serve_that_tenant() -> None:
    model, prompt = models.causal("llama"), EDITS["removed"]
    exact = last(model, prompt)
    with editing(model) as kv:
        for tenant in ("alice", "bob"):
            with torch.no_grad(), kv.open(FORMER.tolist(), tenant=tenant):
                pass  # nothing is computed: nothing is known
        cache = kv.cache(input_ids=FORMER[None], tenant="alice")
        with torch.no_grad():
            model(FORMER[None], past_key_values=cache, use_cache=True)
        cache.close()
        torch.testing.assert_close(last(model, prompt), exact, rtol=0, atol=1e-4)
        assert not blended(kv)["documents"]


@pytest.mark.parametrize("whole", [False, True])
def test_erased_texts_are_not_found(whole: bool) -> None:
    model, prompt = models.causal("llama"), EDITS["removed"]
    exact = last(model, prompt)
    with editing(model) as kv:
        last(model, FORMER)
        last(model, prompt)
        if whole:
            kv.forget(tenant=kv.config.tenant)
        else:
            for text in (FORMER, prompt):
                assert kv.forget(text[:-1].tolist()) > 0
        before = blended(kv)
        torch.testing.assert_close(last(model, prompt), exact, rtol=0, atol=1e-4)
        assert blended(kv) == before


@pytest.mark.parametrize("tenant", [False, True])
def test_texts_that_are_erased_while_open_are_not_remembered(tenant: bool, model: Any) -> None:
    with editing(model) as kv:
        cache = kv.cache(input_ids=FORMER[None])
        generate(model, 3, input_ids=FORMER[None], past_key_values=cache)
        if tenant:
            kv.forget(tenant=kv.config.tenant)
        else:
            kv.forget(FORMER.tolist())
        cache.close()
        assert not texts_of(model, kv)


def test_whole_answers_are_erased_though_their_last_token_is_not_cached(model: Any) -> None:
    with editing(model) as kv:
        last(model, FORMER)
        settle(kv)
        kept = kv.stats()["blocks"]
        answer = generate(model, 12, input_ids=EDITS["removed"][None]).sequences[0]
        settle(kv)
        assert kv.stats()["blocks"] > kept and len(texts_of(model, kv)) == 2
        kv.forget(answer.tolist())
        assert kv.stats()["blocks"] == kept and len(texts_of(model, kv)) == 1


def test_edited_pages_of_a_former_process_are_erased_with_their_text(tmp_path: Path) -> None:
    """The texts are not known any more; twice edited ones are found by both marks."""
    model, disk = models.causal("llama"), f"{tmp_path}:64MiB"
    once, twice = EDITS["removed"], torch.cat([SYSTEM, WORDS, RESULT, NEW])
    with editing(model, disk=disk) as kv:
        for prompt in (FORMER, once, twice):
            last(model, prompt)
        assert len({text.salts for text in texts_of(model, kv)}) == 3
        assert kv.flush()
    with editing(model, disk=disk) as kv:
        assert kv.stats()["blocks"] > len(FORMER) // 16
        for prompt in (twice, FORMER, once):
            assert kv.forget(prompt.tolist())
        assert not kv.stats()["blocks"]


def test_tenants_share_the_bound_of_remembered_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.causal("llama")
    monkeypatch.setattr("flowkv.hooks.blend._MOST_TOKENS", 500)
    with editing(model) as kv:
        for tenant in ("alice", "bob", "carol", "bob"):
            cache = kv.cache(input_ids=WORDS[None].repeat(1, 2), tenant=tenant)
            generate(model, 2, input_ids=WORDS[None].repeat(1, 2), past_key_values=cache)
            cache.close()
            kv.forget(tenant="carol" if tenant == "carol" else "nobody")
        histories = door_of(model).blending.now()._histories
        assert list(histories) == ["alice", "bob"]
        last(model, FORMER)
        assert kv.config.tenant in histories
        assert sum(history.size for history in histories.values()) <= 500


def test_rules_of_another_share_have_pages_of_their_own(tmp_path: Path) -> None:
    """Also on a common disk: where all is to be computed again, all is exact."""
    model, disk = models.causal("llama"), f"{tmp_path}:64MiB"
    later = torch.cat([EDITS["removed"], NEW])
    exact = last(model, later)
    for share, gpu in ((0.0, "64MiB"), (1.0, "768KiB")):
        with editing(model, share, disk=disk, gpu=gpu) as kv:
            last(model, FORMER)
            last(model, EDITS["removed"])
            for seed in range(20, 27) if share else ():
                last(model, draw(330, seed))  # evicts the others
            found = last(model, later)
            assert kv.flush()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_texts_whose_pages_were_evicted_are_computed() -> None:
    model, prompt = models.causal("llama"), EDITS["removed"]
    with editing(model, gpu="768KiB", policy="lru") as kv:  # others keep what took long
        last(model, FORMER)
        for seed in range(20, 40):
            last(model, draw(330, seed))
        known = [text for text in texts_of(model, kv) if len(text.tokens) == len(FORMER)]
        found = last(model, prompt)
        assert not blended(kv)["taken_tokens"] and len(known) == 1
        left = texts_of(model, kv)
        assert all(text is not known[0] for text in left), "it is looked for with every prompt"
    torch.testing.assert_close(found, last(model, prompt), rtol=0, atol=1e-4)


def test_a_changed_model_begins_anew() -> None:
    model, prompt = models.causal("llama"), EDITS["removed"]
    with editing(model) as kv:
        last(model, FORMER)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
            model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        found = last(model, prompt)
        assert not blended(kv)["documents"]
    torch.testing.assert_close(found, last(model, prompt), rtol=0, atol=1e-4)


def test_rows_of_a_batch_and_of_an_engine(model: Any) -> None:
    prompts = [EDITS["removed"], EDITS["replaced"]]
    theirs = [generate(model, 8, input_ids=p[None]).sequences[0].tolist() for p in prompts]
    given = models.padded(*(prompt[None] for prompt in prompts))
    width = given["input_ids"].shape[1]
    with editing(model, 1.0) as kv:
        last(model, FORMER)
        found = generate(model, 8, **given).sequences
        assert blended(kv)["documents"] >= 2
        for row, prompt, expected in zip(found, prompts, theirs, strict=True):
            assert row[width - len(prompt) :].tolist() == expected
        before = blended(kv)["documents"]
        with flowkv.Engine(model, kv, max_rows=4) as engine:
            runs = engine.run([[*p.tolist(), 7] for p in prompts], max_new_tokens=4)
        assert blended(kv)["documents"] > before
    for prompt, run in zip(prompts, runs, strict=True):
        ids = torch.tensor([[*prompt.tolist(), 7]])
        expected = generate(model, 4, input_ids=ids).sequences[0].tolist()
        assert [*ids[0].tolist(), *run.tokens] == expected


class TestTheLimit:
    def test_of_little_divergence_leaves_every_prompt_exact(self, model: Any) -> None:
        edits = [torch.cat([SYSTEM, draw(5 + n, n), WORDS, LATE, NEW]) for n in range(6)]
        exact = [last(model, prompt) for prompt in edits]
        with editing(model, max_kl=1e-9) as kv:
            last(model, FORMER)
            for prompt, expected in zip(edits, exact, strict=True):
                torch.testing.assert_close(last(model, prompt), expected, rtol=0, atol=1e-4)
            assert blended(kv)["declined"] == 3  # the first three were measured

    def test_of_much_divergence_leaves_trials_exact_and_takes_the_others(self, model: Any) -> None:
        edits = [torch.cat([SYSTEM, draw(5 + n, n), WORDS, LATE, NEW]) for n in range(5)]
        exact = [last(model, prompt) for prompt in edits]
        with editing(model, max_kl=50.0):
            last(model, FORMER)
            far = [
                float((last(model, p) - e).abs().max()) for p, e in zip(edits, exact, strict=True)
            ]
            assert max(far[:3]) < 1e-4 < min(far[3:])

    @pytest.mark.parametrize("options", [dict(max_kl=0), dict(max_kl=0.1, reuse="exact")])
    def test_odd_ones_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="max_kl"):
            flowkv.attach(models.causal("llama"), **{"reuse": "edits", **options})

    def test_audits_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="audit"):
            flowkv.attach(models.causal("llama"), reuse="edits", audit=0.5)


@given(st.data())
def test_spans_are_those_of_known_texts(data: st.DataObject) -> None:
    """In order, none over another, equal tokens; a long piece of a text is found for the most."""
    number = st.integers(1, 1 << 31)
    pieces = [
        np.random.default_rng(data.draw(number)).integers(0, 5, size).astype(np.uint32)
        for size in data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    ]
    history, texts = History(), list[KnownText]()
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=6))
        texts.append(KnownText(np.concatenate([pieces[i] for i in chosen]), ()))
        history.add(texts[-1])
    order = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=6))
    prompt = np.concatenate([pieces[i] for i in order])
    first = data.draw(st.integers(0, len(prompt)))
    found, end = list(history.spans(prompt, first)), first
    covered = np.zeros(len(prompt), np.bool_)
    for span in found:
        assert span.first >= end and span.count >= 32
        end = span.first + span.count
        there = span.text.tokens[span.offset : span.offset + span.count]
        assert np.array_equal(there, prompt[span.first : end])
        assert any(span.text is text for text in history.texts.values())
        covered[span.first : end] = True
    at = 0
    known = {i for text in texts for i in order if contains(text.tokens, pieces[i])}
    for i in order:
        inside = covered[max(at, first) : at + len(pieces[i])]
        if i in known and len(inside) >= 63:
            assert int((~inside).sum()) < 63
        at += len(pieces[i])
    for key in list(history.texts):
        history.drop(key)
    assert not history._blocks and not list(history.spans(prompt, 0))


@pytest.mark.parametrize("period", [1, 2, 32])
def test_repeated_tokens_are_compared_few_times(
    period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found as one span."""
    tokens = np.tile(np.arange(period, dtype=np.uint32), 6400 // period)
    compared, compare, history = list[int](), edits.matching, History()
    history.add(KnownText(tokens, ()))

    def counted(one: Any, other: Any) -> int:
        compared.append(min(len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(edits, "matching", counted)
    spans = list(history.spans(np.append(np.uint32(99), tokens), 0))
    assert [(span.first, span.count) for span in spans] == [(1, 6400)]
    assert len(compared) < 2000


def contains(text: Any, piece: Any) -> bool:
    return piece.tobytes() in text.tobytes()  # a false alarm of unaligned bytes only weakens


@given(st.lists(st.integers(0, 99), max_size=4), st.lists(st.integers(0, 99), max_size=4))
def test_replaced_salts_name_pages_as_if_opened_so(former: list[int], later: list[int]) -> None:
    own, other = ([Salt(at, bytes([at]) * 32) for at in set(one)] for one in (former, later))
    tokens = np.arange(100, dtype=np.uint32)
    geometry = flowkv.Geometry.uniform(layers=1, kv_heads=1, head_dim=64, page_size=16)
    with (
        flowkv.KV(geometry, namespace="salts", gpu="8MiB") as kv,
        kv.open(tokens, salts=own) as seq,
        kv.open(tokens, salts=other) as twin,
    ):
        seq.keys(0, 6)
        seq.replace_salts(other)
        assert seq.keys(0, 6) == twin.keys(0, 6)
