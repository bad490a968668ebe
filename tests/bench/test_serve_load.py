"""Loads of `python -m bench serve`: lengths, shared beginnings, times, and who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from bench.serve import baselines, lengths, workload
from bench.serve.baselines import SEQUENTIAL, STATIC, Generate, Waiting
from bench.serve.lengths import FULL_CONTEXT, KINDS, draw_lengths
from bench.serve.served import Outcome, Served, Spread, percentile
from bench.serve.workload import Ask, Load, arrival_times, draw
from tests.bench.serving import Echo
from tests.inside import ConfigError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def load(**changed: object) -> Load:
    return Load(**{"requests": 12, "concurrency": 4, "lengths": "64+8", **changed})  # type: ignore[arg-type]


# ---- lengths


@pytest.mark.parametrize("kind", [k for k in KINDS if not k.startswith("azure")])
@pytest.mark.parametrize("context", [64, 1000, FULL_CONTEXT])
def test_lengths_fit_the_context(kind: str, context: int) -> None:
    pairs = draw_lengths(kind, 500, context, rng())
    assert pairs.shape == (500, 2) and pairs.min() >= 2
    assert pairs.sum(1).max() <= context
    assert len(np.unique(pairs[:, 0])) > 5, "they differ"
    assert np.array_equal(pairs, draw_lengths(kind, 500, context, rng())), "seeded"


def test_the_fit_is_that_of_the_trace() -> None:
    pairs = draw_lengths("chat", 20_000, FULL_CONTEXT, rng())
    # The trace's own: means 1,155 and 211, medians 1,020 and 129.
    assert np.median(pairs[:, 0]) == pytest.approx(765, rel=0.05)
    assert pairs[:, 0].mean() == pytest.approx(1100, rel=0.05)
    assert pairs[:, 1].mean() == pytest.approx(190, rel=0.1)
    smaller = draw_lengths("chat", 20_000, FULL_CONTEXT // 4, rng())
    assert pairs.mean() / smaller.mean() == pytest.approx(4, rel=0.02)


def test_lengths_of_a_public_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lengths.PUBLIC, raising=False)
    with pytest.raises(ConfigError, match=lengths.PUBLIC):
        draw_lengths("azure-chat", 3, 4096, rng())
    file = tmp_path / "azure_llm" / "AzureLLMInferenceTrace_conv.csv.zst"
    file.parent.mkdir()
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,100,10\ny,200,20\nz,300,30\n"
    file.write_bytes(zstandard.compress(text.encode()))
    monkeypatch.setenv(lengths.PUBLIC, str(tmp_path))
    pairs = draw_lengths("azure-chat", 4, FULL_CONTEXT, rng()).tolist()
    assert pairs[0] == pairs[3] and sorted(pairs[:3]) == [[100, 10], [200, 20], [300, 30]]


def test_lengths_that_are_none() -> None:
    assert draw_lengths("100+7", 2, 4096, rng()).tolist() == [[100, 7], [100, 7]]
    for kind in ("100", "a+b", "long", "+"):
        with pytest.raises(ConfigError, match="Use one of"):
            draw_lengths(kind, 1, 4096, rng())


# ---- prompts


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prompts_have_a_beginning_in_common(share: float) -> None:
    asks = draw(load(prefix_share=share, groups=3), context=4096, vocabulary=256, seed=1)
    assert {len(ask.prompt) for ask in asks} == {64} and {ask.new_tokens for ask in asks} == {8}
    within = common(asks[0].prompt, asks[3].prompt)
    assert round(64 * share) <= within <= 64 * share + 8, "a little more by chance"
    assert common(asks[0].prompt, asks[1].prompt) <= 8, "groups differ"


def test_tokens_before_the_prompts() -> None:
    given = load(prefix_tokens=100, groups=2, lengths="10+2")
    asks = draw(given, context=256, vocabulary=100, seed=1)
    assert {len(ask.prompt) for ask in asks} == {110}
    assert common(asks[0].prompt, asks[2].prompt) >= 100
    assert max(max(ask.prompt) for ask in asks) < 100
    with pytest.raises(ConfigError, match="leaves no room"):
        draw(given, context=104, vocabulary=256, seed=1)


def test_a_longer_load_begins_with_the_shorter_one() -> None:
    for kind in ("chat", "64+8"):
        short, long = (
            draw(
                load(lengths=kind, requests=count, prefix_share=0.5),
                context=512,
                vocabulary=256,
                seed=3,
            )
            for count in (5, 200)
        )
        assert long[:5] == short and len(long) == 200


def test_other_text_of_the_same_lengths_and_times() -> None:
    one, other = (
        draw(
            load(lengths="chat", arrivals="poisson", rate=3.0),
            context=512,
            vocabulary=256,
            seed=3,
            text=text,
        )
        for text in (0, 1)
    )
    assert [(len(a.prompt), a.new_tokens, a.at_s) for a in one] == [
        (len(a.prompt), a.new_tokens, a.at_s) for a in other
    ]
    assert all(a.prompt != b.prompt for a, b in zip(one, other, strict=True))


def test_another_seed_is_another_load() -> None:
    one, same, other = (
        draw(load(lengths="chat"), context=2048, vocabulary=256, seed=seed) for seed in (1, 1, 2)
    )
    assert one == same and one != other
    assert common(one[0].prompt, other[0].prompt) < 8


# ---- times


@pytest.mark.parametrize("kind", [workload.POISSON, workload.BURSTS])
def test_strangers_come_at_the_rate(kind: str) -> None:
    times = arrival_times(load(requests=20_000, arrivals=kind, rate=50.0), rng())
    assert times == sorted(times) and times[0] > 0
    assert 20_000 / times[-1] == pytest.approx(50.0, rel=0.1)
    gaps = np.diff(times)
    spread = gaps.std() / gaps.mean()
    assert (spread > 1.3) if kind == workload.BURSTS else spread == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"arrivals": "poisson"}, {"arrivals": "never"}, {"prefix_share": 1.1}),
        *({"requests": 0}, {"concurrency": 0}, {"groups": 0}),
    ],
    ids=str,
)
def test_loads_that_are_none(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        draw(load(**wrong), context=4096, vocabulary=256, seed=1)


# ---- who waits


def asks(*times: float) -> list[Ask]:
    return [Ask([number], 2, at_s) for number, at_s in enumerate(times)]


def test_clients_ask_anew_when_they_are_answered() -> None:
    waiting = Waiting(asks(0, 0, 0, 0, 0), clients=2)
    assert [n for n, _, _ in waiting.take(8)] == [0, 1], "no more than there are clients"
    waiting.answered(1)
    time.sleep(0.002)
    waiting.answered(1)
    (second, _, early_s), (third, _, late_s) = waiting.take(2)
    assert (second, third) == (2, 3) and late_s - early_s >= 0.002, "sent when they were answered"
    waiting.answered(2)
    assert [n for n, _, _ in waiting.take(1)] == [4]
    assert waiting.take(1) == []


def test_strangers_are_waited_for() -> None:
    waiting = Waiting(asks(0.0, 0.3, 0.3), clients=1)
    began_s = time.perf_counter()
    ((first, _, sent_s),) = waiting.take(8)
    assert first == 0 and time.perf_counter() - began_s < 0.25
    waiting.answered(1)
    later = waiting.take(8)
    assert [n for n, _, _ in later] == [1, 2] and time.perf_counter() - began_s >= 0.299
    assert later[0][2] - sent_s == pytest.approx(0.3)
    assert waiting.take(8) == []


@pytest.mark.parametrize("batches", [False, True], ids=[SEQUENTIAL, STATIC])
def test_generate_serves_a_load(batches: bool) -> None:
    model, given = Echo(), [Ask([1, 2, 3], 2), Ask([9], 4), Ask([5, 5], 3)]
    system = Generate(model, batches=batches)
    outcome = system.serve(given, clients=2)
    assert system.name == (STATIC if batches else SEQUENTIAL)
    assert model.batches == ([2, 1] if batches else [1, 1, 1])
    assert [one.tokens for one in outcome.served] == [[6, 7], [9, 10, 11, 12], [10, 11, 12]]
    first, second, third = outcome.served
    assert first.submitted_s <= first.first_s <= first.last_s <= third.submitted_s
    assert first.submitted_s <= second.submitted_s < first.last_s, "two clients, both at once"
    assert third.submitted_s >= (second.last_s if batches else first.last_s)
    assert baselines.BATCHED not in (SEQUENTIAL, STATIC)


# ---- figures


def test_what_clients_saw() -> None:
    served = [Served(1.0, 1.5, 3.5, [1, 2, 3]), Served(2.0, 4.0, 4.0, [1])]
    assert [one.ttft_s for one in served] == [0.5, 2.0]
    assert [one.tpot_s for one in served] == [1.0, 0.0]
    outcome = Outcome(served, cpu_s=2.0)
    assert outcome.seconds == 3.0 and outcome.tokens_per_s == pytest.approx(4 / 3)
    assert outcome.completion_s == 2.25 and outcome.tokens_per_cpu_s == 2.0
    assert outcome.ttft_p95_s == pytest.approx(0.5 + 0.95 * 1.5)


def test_who_is_overtaken() -> None:
    def one(sent_s: float, queued_s: float) -> Served:
        return Served(sent_s, 9.0, 9.0, [1], queued_s=queued_s)

    assert Outcome([one(0.0, 1.0), one(0.5, 1.0)]).overtaken_s == 0.0
    late = Outcome([one(0.0, 5.0), one(1.0, 0.0), one(3.0, 1.5), one(4.9, 0.2)])
    assert late.overtaken_s == 3.0


def test_spreads() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert str(Spread.of([1.25, 1.75])) == "1.5 (1.25 to 1.75)"
    assert percentile([], 50) == 0.0 and percentile([1.0, 3.0], 50) == 2.0
