"""Python calls of a page from a device to memory and back: they may only become fewer."""

from __future__ import annotations

import pytest

from bench.bench_pages import measure


@pytest.mark.thorough
def test_a_page_takes_few_calls_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowkv.tiers.host.THREADS", 1)
    out, back = measure(125)
    assert out.total() <= 15 * 125 and back.total() <= 9 * 125, (out.total(), back.total())
