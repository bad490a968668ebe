"""Prompts pruned by a second reading: the answer of an oracle, shared under a name of its own."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowkv
from flowkv.policy.sparsify import KVzip
from tests.cache.fakes import load_everything
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, generate, reused
from tests.hooks.test_press import NEW, QUESTIONS, ask, presses
from tests.hooks.test_sparsify import distinct, kept_of, masked, oracle
from tests.inside import ConfigError, Repetition


@pytest.fixture
def model() -> Any:
    return models.causal("llama")


def answered(model: Any, ids: torch.Tensor, question: torch.Tensor, share: float) -> Any:
    """What `generate` answers to a question behind a context, by masks that hide what is lost."""
    with masked(model, ids.shape[1], [kept_of(model, ids, "kvzip", share)]):
        return generate(model, NEW, input_ids=torch.cat([ids, question], 1))


@settings(max_examples=8)
@given(
    st.lists(st.integers(40, 150), min_size=1, max_size=3),
    st.sampled_from([0.2, 0.5, 0.75]),
    st.integers(0, 99),
)
def test_rows_lose_what_their_own_repetition_does_not_look_at(
    lengths: Sequence[int], share: float, seed: int
) -> None:
    model = models.causal("llama")
    prompts = [distinct(length, seed + n) for n, length in enumerate(lengths)]
    wanted = oracle(model, prompts, "kvzip", share)
    with attached(model, sparsify=f"kvzip:{share}"):
        assert_same(generate(model, NEW, **models.padded(*prompts)), wanted)


def test_options_of_the_rule_count(model: Any) -> None:
    ids, rule = distinct(100), KVzip(0.3, sink_tokens=0, recent_tokens=0)
    cut = KVzip(0.3)
    found = []
    for one in (rule, cut):
        with attached(model, sparsify=one):
            found.append(generate(model, NEW, input_ids=ids))
    assert_same(found[1], oracle(model, [ids], "kvzip", 0.3))
    assert (found[0].logits[1] - found[1].logits[1]).abs().max() > 1e-3
    ones = [Repetition(one) for one in (rule, cut, KVzip(0.4))]
    assert len({one.words_of(one.given) for one in ones} - {b""}) == 3


def test_a_context_is_read_twice_once_for_all_questions(
    model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, place = distinct(140), f"{tmp_path}/kv:64MiB"
    wanted = [answered(model, ids, question, 0.5) for question in QUESTIONS]
    more = answered(model, ids, QUESTIONS[0], 0.6)
    exact = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify="kvzip:0.5", disk=place) as kv:
        runs = presses(kv, monkeypatch)
        for question, one in zip(QUESTIONS, wanted, strict=True):
            assert_same(ask(model, kv, ids, question), one)
        assert runs == [140]
        assert reused(kv) == 140
        kv.flush()
    with attached(model, sparsify="kvzip:0.6", disk=place) as kv:
        assert_same(ask(model, kv, ids, QUESTIONS[0]), more)
        assert runs == [140, 256, 140], "of another share nothing is read, but for the trial"
    with attached(model, disk=place) as kv:
        assert_same(generate(model, NEW, input_ids=ids), exact)
        assert reused(kv) == 0


def test_a_prompt_keeps_the_positions_that_generate_gives() -> None:
    model, ids, found = models.roberta(), distinct(140), list[Any]()
    for padding in (0, -1):  # the model itself counts from 1, and then from 0
        model.roberta.embeddings.padding_idx = padding
        with attached(model, sparsify="kvzip:0.5"):
            found.append(generate(model, NEW, input_ids=ids))
    assert_same(*found)


def test_what_autocast_computes_stays_whole_and_unshared(model: Any) -> None:
    ids, question = distinct(140), QUESTIONS[0]
    wanted = answered(model, ids, question, 0.5)
    with attached(model, sparsify="kvzip:0.5") as kv, torch.no_grad():
        cache = kv.cache(ids)
        model(ids, past_key_values=cache, logits_to_keep=1)
        with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="keeps all"):
            model(question, past_key_values=cache, logits_to_keep=1)
        assert_same(ask(model, kv, ids, question), wanted)


def asked(place: str, tokens: int) -> None:
    """Ask two questions behind one context, and count what was found of it."""
    model, ids = models.causal("llama"), distinct(140)
    wanted = [answered(model, ids, question, 0.5) for question in QUESTIONS]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        load_everything(patch)
        options = {"disk": place, "load_deadline_s": 60.0}  # however busy the machine is
        kv = stack.enter_context(attached(model, sparsify="kvzip:0.5", **options))
        for question, one in zip(QUESTIONS, wanted, strict=True):
            assert_same(ask(model, kv, ids, question), one)
            assert kv.flush()  # its last tokens are read from the disk
        assert reused(kv) == tokens, reused(kv)


def test_another_process_reads_what_is_left(tmp_path: Any) -> None:
    code = "import sys; from tests.hooks.test_repetition import asked; "
    for tokens in (140, 280):  # both anew: behind other tests 140 were found twice, unexplained
        command = [sys.executable, "-c", f"{code}asked(sys.argv[1], {tokens})"]
        subprocess.run([*command, f"{tmp_path}/kv:64MiB"], check=True)


class Mine(KVzip):
    """A rule of a user's own."""

    def score(self, layer: int, keys: Any, values: Any, mass: Any) -> Any:
        return -super().score(layer, keys, values, mass)


def test_a_rule_of_a_users_own_gets_the_weights_and_shares_nothing(model: Any) -> None:
    ids = distinct(140)
    with pytest.warns(UserWarning, match="shares nothing that kvzip leaves"):
        kv = flowkv.attach(model, sparsify=Mine(0.5), gpu="64MiB", page_size=16)
    first = ask(model, kv, ids, QUESTIONS[0])
    assert_same(ask(model, kv, ids, QUESTIONS[0]), first)
    assert reused(kv) == 0
    kv.close()
    with attached(model, sparsify="kvzip:0.5"):
        other = generate(model, NEW, input_ids=torch.cat([ids, QUESTIONS[0]], 1))
    assert (other.logits[1] - first.logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("rule", "more", "words"),
    [
        (KVzip([0.5, 0.5, 0.2, 0.5]), {}, "keeps 52 to 128 tokens, by layer"),
        ("kvzip:1", {}, "drops no token"),
        ("kvzip:0", {}, "a share of 0.0"),
        ("kvzip", {}, "no numeric share"),
        ("kvzip:0.5", {"audit": 0.1}, "audit="),
        ("kvzip:0.5", {"reads": "dense"}, "gathers K and V"),
    ],
)
def test_what_it_refuses(model: Any, rule: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        flowkv.attach(model, sparsify=rule, gpu="4MiB", page_size=16, **more)


@pytest.mark.parametrize("length", [384, 385])
def test_a_prompt_that_leaves_no_room_to_be_repeated_stays_whole(length: int) -> None:
    model = models.causal("llama")
    model.config.max_position_embeddings = 512
    ids = torch.randint(5, 250, (1, length))
    exact = generate(model, NEW, input_ids=ids)
    with warnings.catch_warnings(record=True) as said, attached(model, sparsify="kvzip:0.5"):
        warnings.simplefilter("always")
        found = generate(model, NEW, input_ids=ids)
    whole = [one for one in said if "of 512 positions too few are left" in str(one.message)]
    assert len(whole) == (length == 385)
    assert_same(found, exact if whole else oracle(model, [ids], "kvzip", 0.5))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_second_reading_took_is_free_with_its_end(
    model: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a collection of cycles: each part has a copy of all keys."""
    ids, held, most = distinct(240), list[weakref.ref[Any]](), list[int]()
    attention = Repetition.run.__globals__["attention"]

    def alive() -> int:
        return sum(one() is not None for one in held)

    def counted(q: torch.Tensor, k: torch.Tensor, how: Any, pads: Any) -> Any:
        held.append(weakref.ref(k))
        most.append(alive())
        if fails and len(most) == 3:
            raise MemoryError
        return attention(q, k, how, pads)

    with warnings.catch_warnings(), attached(model, sparsify="kvzip:0.5"):
        warnings.simplefilter("ignore")  # that one failed
        monkeypatch.setitem(Repetition.run.__globals__, "attention", counted)
        gc.collect()
        gc.disable()
        try:
            generate(model, 2, input_ids=ids)
            assert len(most) >= 3 and not alive()
        finally:
            gc.enable()
    assert max(most) <= model.config.num_hidden_layers


def test_a_repetition_that_fails_leaves_a_prompt_whole(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = distinct(140)
    exact = generate(model, NEW, input_ids=ids)
    with attached(model, sparsify="kvzip:0.5"):
        monkeypatch.setattr(KVzip, "score", lambda self, layer, keys, values, mass: mass[:, 1:])
        with pytest.warns(UserWarning, match="keeps all tokens of 1 prompts: kvzip failed"):
            assert_same(generate(model, NEW, input_ids=ids), exact)
