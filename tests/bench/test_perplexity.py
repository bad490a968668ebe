"""Quality of caches: the past is read from them, and figures are made as they should be."""

from __future__ import annotations

import hashlib
import math
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bench import perplexity
from tests.fixture_model import corpus, load_tiny
from tests.inside import ConfigError, coded_pages
from tests.kvt.pages import SIZE, Source, layout, learner


def test_the_past_is_read_from_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "POOL", "16MiB")
    ids = torch.tensor(list(corpus("validation")[:513]))
    ways = perplexity.ways(load_tiny())
    found, bits = {}, {}
    for name, way in ways.items():
        cache = way.cache(ids[None, :-1])
        found[name], _ = perplexity.read(way.model, cache, ids)
        bits[name] = 32 * way.n_bytes(cache)
        assert found[name].shape == (512 - perplexity.CHUNK,)
    with torch.no_grad():
        logits = ways[perplexity.EXACT].model(ids[None, :-1]).logits[0]
    exact = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[perplexity.CHUNK :]
    torch.testing.assert_close(found[perplexity.EXACT].float(), exact, rtol=1e-3, atol=1e-4)
    moved = {n: (nats - found[perplexity.EXACT]).abs().mean().item() for n, nats in found.items()}
    assert 1e-6 < moved["kv8"] < moved["k8v4"] < moved["kv4h"] < 0.5
    assert moved["rounded by token, 8 bits"] < moved["rounded by token, 4 bits"]
    sizes = {name: n / bits[perplexity.EXACT] * 32 for name, n in bits.items()}
    assert sizes["rounded by token, 4 bits"] == 4.25 and sizes["HF fp8"] == pytest.approx(
        8, rel=1e-3
    )
    assert sizes["kv8"] >= 8.25 and 4.25 <= sizes["kv4c"] < sizes["k8v4"] < sizes["kv8"]


def test_cold_pages_of_the_past_are_coded_once() -> None:
    source = Source(layout())
    coder = learner(source).coder(1e-3, {})
    keys, values = source.sides(5 * SIZE + 10)
    sides = coder.basis.turns.apply(keys, 0), values
    (keys, values), n_bytes, _ = coded_pages(coder, tuple(x[:, :, : 5 * SIZE] for x in sides))
    cold = perplexity.Cold(None, coder)
    for start in range(0, sides[0].shape[2], 2 * SIZE):
        here = slice(start, start + 2 * SIZE)
        for layer in range(len(keys)):
            held = cold.update(*(x[None, layer, :, here] for x in sides), layer)
            for own, coded, exact in zip(held, (keys, values), sides, strict=True):
                assert torch.equal(own[0, :, :start], coded[layer, :, :start]), "the past"
                assert torch.equal(own[0, :, start:], exact[layer, :, here]), "the chunk itself"
    assert cold.n_bytes() == cold.n_bytes() == n_bytes
    for coded, exact in zip((keys, values), sides, strict=True):
        lost = (coded - exact[:, :, : 5 * SIZE]).norm() / exact.norm()
        assert 1e-4 < lost < 0.5


def test_beginnings_of_the_order_are_spread() -> None:
    cut = perplexity.contexts(range(100_000), 53, 1000)
    starts = sorted(int(ids[0]) for ids in cut)
    assert len(starts) == 53 and {len(ids) for ids in cut} == {1001}
    assert all(b - a > 1000 for a, b in pairwise(starts))
    few = sorted(int(ids[0]) for ids in cut[:8])
    assert max(b - a for a, b in pairwise(few)) < 30_000
    with pytest.raises(ConfigError, match="longer --text"):
        perplexity.contexts(range(53_000), 53, 1000)


def test_figures_are_of_paired_contexts() -> None:
    read = [
        {
            "tokens": 10,
            "found": {perplexity.EXACT: (20.0 + n, 10, 64.0), "kv8": (20.1 + n, 9, 16.0)},
        }
        for n in (0, 5)
    ]
    exact, kv8 = perplexity.rows(read, bits=32)
    assert exact["perplexity"] == pytest.approx(math.exp(2.25)) and exact["more_percent"] == [
        0,
        0,
        0,
    ]
    assert kv8["more_percent"] == pytest.approx([1.005] * 3, abs=1e-3), "the same in both"
    assert (kv8["agreement_percent"], kv8["bits"], kv8["goal_percent"]) == (90, 8, 0.1)


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if version("networkx") == "3.6.1":  # of constraints.txt
        assert "shortest path" in perplexity.text(None)
    monkeypatch.setattr(perplexity, "SHA256", hashlib.sha256(b"").hexdigest())
    with pytest.raises(ConfigError, match="--text FILE"):
        perplexity.text(None)
    (own := tmp_path / "own").write_text("mine")
    assert perplexity.text(own) == "mine"
