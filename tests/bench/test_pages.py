"""Python calls of a page from a device to memory and back: they may only become fewer."""

from __future__ import annotations

import pytest

from bench.bench_pages import measure


@pytest.mark.thorough
def test_a_page_takes_few_calls_each_way() -> None:
    out, back = measure(125)
    assert out.total() <= 65 * 125 and back.total() <= 80 * 125, (out.total(), back.total())
