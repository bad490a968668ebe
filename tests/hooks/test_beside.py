"""What a cache tells of what lies beside K and V: weights, embeddings and results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flowkv
from tests.fixture_model import load_tiny


def test_a_cache_hears_what_its_model_reads(tmp_path: Path) -> None:
    model, ids = load_tiny(), torch.arange(40, 90)[None]
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    rows = flowkv.attach_embedding(model.get_input_embeddings(), disk=tmp_path / "t", host="2MiB")
    rest = torch.nn.ModuleList(model.model.layers)
    weights = flowkv.attach_weights(rest[0], budget="60%", disk=str(tmp_path / "w"))
    with flowkv.attach(model, gpu="4MiB") as kv:
        with kv.report(tmp_path / "r.html") as report:
            assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), plain)
        told, events = report.summary()["beside"], kv.stats()["events"]
        assert told["embedding rows"]["asked"] == events["embedding_rows_total"]
        assert told["embedding rows"]["found"] < told["embedding rows"]["asked"]
        assert told["embedding rows"]["read_bytes"] == events["embedding_read_bytes_total"]
        assert told["units of weights"]["asked"] == events["weights_units_total"]
        assert events["weights_blocked_seconds"]["sum"] <= weights.stats()["blocked_s"]
        page = (tmp_path / "r.html").read_text()
        assert "Beside K and V" in page
        assert "embedding rows" in page
    assert not rows.bus.wants(flowkv.observe.events.RowsRead), "a closed cache hears nothing"
    rows.close()
    weights.close()


def test_a_report_leaves_out_what_was_not_used(tmp_path: Path) -> None:
    model = load_tiny()
    with flowkv.attach(model, gpu="4MiB") as kv, kv.report(tmp_path / "r.html") as report:
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    assert report.summary()["beside"] == {}
    assert "Beside K and V" not in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("budget", ["50%", "100%"])
def test_what_is_told_of_weights_is_what_is_counted(tmp_path: Path, budget: str) -> None:
    model, told = torch.nn.Sequential(*(torch.nn.Linear(99, 99) for _ in range(30))), []
    bus = flowkv.observe.events.Bus()
    attached = flowkv.attach_weights(model, budget=budget, disk=str(tmp_path), bus=bus)
    with attached as weights, bus.subscribe(told.append):
        before = weights.stats()
        for _ in range(3):
            model(torch.ones(1, 99))
        after = weights.stats()
    assert len(told) == 3
    for field, name in (("units", "met"), ("found", "hits")):
        assert sum(getattr(one, field) for one in told) == after[name] - before[name]
    assert sum(one.n_bytes for one in told) <= after["read_bytes"]
    assert told[0].units == after["units"]
    assert sum(one.seconds for one in told) == pytest.approx(after["blocked_s"])
