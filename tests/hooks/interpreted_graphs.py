"""Launches of Triton kernels, kept and done again verbatim; run by `test_graphs.py`.

Not collected by itself: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch

import flowkv
from flowkv import kernels
from tests.hooks.recorder import launches, recorded
from tests.hooks.test_graphs import Latents, Nano, counts, geometry, latents
from tests.inside import graphs

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/hooks/test_graphs.py"


@pytest.mark.parametrize(("codec", "window"), [("raw", None), ("kv8", 8), ("latent", None)])
def test_launches_again(codec: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in four lines; one of them fills a page, encoded pages stand beside raw ones."""
    monkeypatch.setattr(graphs, "EAGER_STEPS", 0)
    monkeypatch.setattr(kernels, "prepare_decode", lambda *_: None)
    model, shape = Nano(layers=1), geometry(1, 8, window)
    if codec == "latent":
        model, shape, codec = Latents(), latents(8), "raw"
    options = dict(gpu="8MiB", codec=codec, recent_tokens=0, namespace="nano")
    with recorded(kernels=False), flowkv.KV(shape, **options) as kv, torch.no_grad():
        run = flowkv.graphed(model, kv)
        seqs = [kv.open([*range(length)], reuse=False) for length in (13, 9, 5)]
        for step in kv.prefill(seqs):
            model(step.tokens, step.positions)
        for turn in range(3):
            tokens = [[10 * turn + row] for row in range(3)]
            forks = [kv.fork(seq) for seq in seqs]
            with kv.step(forks, tokens) as step:
                wanted = model(step.tokens, step.positions)
            for fork in forks:
                fork.close()
            with launches(), kv.step(seqs, tokens) as step:
                found = run(step.tokens, step.positions)
            close = dict(rtol=1e-5, atol=1e-5) if codec == "raw" else dict(rtol=0, atol=1e-3)
            torch.testing.assert_close(found, wanted, **close)
        assert counts(kv) == (1, 2), kv.stats()["graphs"]
