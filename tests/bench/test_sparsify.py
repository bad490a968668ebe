"""`python -m bench sparsify` on the fixture: what its table says of rules that drop tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from bench import sparsify
from tests.fixture_model import load_tiny
from tests.hooks.compare import attached


def test_losing_more_costs_more_and_keeping_all_costs_nothing() -> None:
    source = Path(sparsify.__file__).read_bytes()[:1200]
    ids = torch.tensor(list(source))[: 640 + sparsify.SCORED + 1]
    model = load_tiny()
    sloped = sparsify.sloped(model)
    with torch.no_grad():
        with attached(model, sparsify=sloped[0], page_size=64) as kv:
            read = [dict(sparsify.scores(model, kv, part, 640)) for part in (ids, ids.flip(0))]
        speed = dict(sparsify.paces(model, ids, 640))
    for one in read:
        for task in sparsify.TASKS:
            assert one[1.0, "whole", task][1:] == (1.0, 0.0)
            for rule in ("latest", "random"):
                lost = [one[share, rule, task].kl for share in sparsify.SHARES]
                assert lost[-1] > 0.01, "a quarter is not the whole"
                assert lost[0] < lost[-1]
    even = [round(speed[share, "latest"][1], 2) for share in sparsify.SHARES]
    assert even == [0.73, 0.55, 0.27]
    for rule in sloped:  # whole pages in each band
        share, name = sparsify.named(rule)
        assert abs(speed[share, name][1] - share) < 0.1
    table = list(sparsify.rows(read, speed))
    assert len(table) == 1 + 3 * 5 + len(sloped)
    assert table[0]["rule"] == "whole"
    assert table[0]["copy: same token"] == "1.000"
