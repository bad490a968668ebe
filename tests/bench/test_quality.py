"""Cost of codecs in bits on the trained fixture; a lost page would be noticed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.quality import (
    Delta,
    Scores,
    Task,
    Visit,
    continuation,
    delta,
    lost_page,
    measure,
    second_copy,
    windows,
)
from flowkv.kernels import transcode
from tests.fixture_model import corpus, load_tiny
from tests.inside import ConfigError, page_layout

pytest.importorskip("transformers")

PERIOD, SIZE, BOUND = 128, 64, {"kv8": 0.002, "k8v4": 0.02, "kv4c": 0.03, "kv4h": 0.04}
LOST = 0.1
"""A lost page costs more than this, a codec surely less."""


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return load_tiny()


@pytest.fixture(scope="module")
def task() -> Task:
    return second_copy(corpus("validation"), 24, period=PERIOD)


@pytest.fixture(scope="module")
def raw(model: torch.nn.Module, task: Task) -> Scores:
    return read(model, task)


def read(
    model: torch.nn.Module, task: Task, codec: str = "raw", visit: Visit | None = None
) -> Scores:
    options = {"gpu": "64MiB", "page_size": SIZE, "recent_tokens": 0}
    return measure(model, task, batch=12, codec=codec, visit=visit, **options)


def test_raw_pages_are_the_model_itself(model: torch.nn.Module, task: Task, raw: Scores) -> None:
    with torch.no_grad():
        logits = model(task.rows[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.mT, task.rows[:, 1:], reduction="none") / math.log(2)
    alone = losses[:, task.first - 1 :].mean(1).double()
    assert torch.allclose(raw.bits, alone, atol=1e-4)
    assert raw.n_bytes == {"raw": 24 * 4 * page_bytes(model, "raw")}


def page_bytes(model: torch.nn.Module, codec: str) -> int:
    import flowkv

    kv = flowkv.attach(model, gpu="64MiB", page_size=SIZE)
    try:
        (group,) = kv.geometry.groups
        return page_layout(group, SIZE, codec).page_bytes
    finally:
        kv.close()


@pytest.mark.parametrize("codec", BOUND)
def test_a_codec_costs_little_and_a_lost_page_much(
    model: torch.nn.Module, task: Task, raw: Scores, codec: str
) -> None:
    coded = read(model, task, codec)
    assert coded.n_bytes.keys() == {"raw", codec}, "all but the page being filled is encoded"
    assert coded.n_bytes[codec] == 24 * 3 * page_bytes(model, codec)
    cost = delta(coded, raw)
    assert cost.error < LOST / 4, "else nothing is proven"
    assert cost.within(BOUND[codec]) and not cost.beyond(LOST)
    for swapped in (False, True):
        lost = read(model, task, codec, lost_page(0, PERIOD, swapped=swapped))
        assert delta(lost, raw).beyond(LOST)
        assert delta(lost, coded).beyond(LOST)


def recoded(codec: str) -> Visit:
    """Encodes and decodes the latest full page in place: raw attention then reads codec values."""

    def visit(kv: object, seqs: list, start: int) -> None:
        if not start:
            return
        planner = seqs[0].planner
        pool, (group,) = planner.store.pool(0), planner.geometry.groups
        plain, coded = page_layout(group, SIZE), page_layout(group, SIZE, codec)
        lines = [int(planner.tables.pages[0][seq.row, start // SIZE - 1]) for seq in seqs]
        aside = pool.allocate(coded.granules, len(seqs))
        pages, spare = pool.granules(lines), pool.granules(aside)
        assert not transcode(pool.arena, pages, spare, plain, coded).any()
        assert not transcode(pool.arena, spare, pages, coded, plain).any()
        for page in aside:
            pool.release(page)

    return visit


@pytest.mark.parametrize("codec", BOUND)
def test_reading_encoded_pages_is_reading_what_they_decode_to(
    model: torch.nn.Module, task: Task, codec: str
) -> None:
    direct, decoded = read(model, task, codec), read(model, task, "raw", recoded(codec))
    apart = (direct.bits - decoded.bits).abs().max()
    # 4-bit kernels round weights and queries to 8 bits; see docs/explain/codecs.md.
    assert apart < 0.05
    assert abs(delta(direct, decoded).mean) < 0.005


# ---- at length

TARGETS = {"kv8": (0.0005, 0.002), "kv4c": (0.015, 0.03)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [64, 128])
def test_targets_over_400_windows(model: torch.nn.Module, size: int) -> None:
    text = corpus("validation")
    for number, long in enumerate((continuation(text, 400), second_copy(text, 400))):
        fields = {"gpu": "512MiB", "page_size": size, "recent_tokens": 0}
        plain = measure(model, long, codec="raw", **fields)
        for codec, targets in TARGETS.items():
            cost = delta(measure(model, long, codec=codec, **fields), plain)
            assert cost.within(targets[number]), f"{codec}: {cost} in {long.name}"
        lost = measure(model, long, codec="kv8", visit=lost_page(0, PERIOD), **fields)
        assert delta(lost, plain).beyond(TARGETS["kv4c"][number] if number else 0.005)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_auto_is_small_and_close_over_400_windows(model: torch.nn.Module) -> None:
    long = second_copy(corpus("validation"), 400, period=512, before=3072)
    plain = measure(model, long, batch=8, gpu="512MiB", page_size=128)
    coded = measure(model, long, batch=8, gpu="512MiB", codec="auto")
    assert delta(coded, plain).within(0.02)
    assert plain.used_bytes > 2.5 * coded.used_bytes
    # As if the model were of 16 bits: raw pages of half the size, all others as they are.
    assert plain.used_bytes / 2 > 2.5 * (coded.used_bytes - coded.n_bytes["raw"] / 2)


# ---- the measure itself


def test_deltas_are_paired() -> None:
    base = torch.tensor([1.0, 5.0, 9.0, 2.0], dtype=torch.float64)
    extra = torch.tensor([0.1, 0.3, 0.1, 0.3], dtype=torch.float64)
    found = delta(Scores(base + extra, {}), Scores(base, {}))
    assert found.mean == pytest.approx(0.2)
    assert found.error == pytest.approx(2 * math.sqrt(0.04 / 3) / 2)
    assert delta(Scores(base[:1], {}), Scores(base[:1], {})).error == math.inf
    with pytest.raises(ConfigError, match="the same windows"):
        delta(Scores(base, {}), Scores(base[:2], {}))


def test_bounds_are_kept_and_broken_for_sure() -> None:
    close = Delta(0.01, 0.005)
    assert close.within(0.015) and not close.within(0.0149)
    assert close.beyond(0.0049) and not close.beyond(0.005)


def test_tasks_score_what_they_say() -> None:
    text = bytes(range(200)) * 3
    plain = continuation(text, 3, length=100, skip=30)
    assert plain.rows.shape == (3, 101) and plain.first == 31
    copy = second_copy(text, 2, period=40, before=10)
    assert copy.rows.shape == (2, 90) and copy.first == 58
    assert (copy.rows[:, 10:50] == copy.rows[:, 50:]).all()
    assert (copy.rows[:, :50] == windows(text, 2, 50)).all()
    with pytest.raises(ConfigError, match="shorter windows"):
        windows(b"abc", 1, 4)


def test_what_is_no_measurement_is_refused(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = continuation(corpus("validation"), 2, length=100, skip=30)
    with pytest.raises(ConfigError, match="follows the first page"):
        read(model, early)
    refused: Callable[..., object] = lambda *_, **__: _Unbound()  # noqa: E731
    monkeypatch.setattr("bench.quality.attach", refused)
    with pytest.raises(ConfigError, match="does not serve the model"):
        read(model, continuation(corpus("validation"), 2))


class _Unbound:
    page_size, geometry = SIZE, None

    def close(self) -> None:
        """As a cache that serves no model."""
