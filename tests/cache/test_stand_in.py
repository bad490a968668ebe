"""A pool that fills before its policy is compiled: no call waits, and what is given up is LRU's."""

from __future__ import annotations

from typing import Any

import pytest

from flowkv.policy import HazardIndex
from tests.inside import deferral

from . import toy

PAGE = toy.PAGE


def test_a_pool_that_fills_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a call waited for a compiler")

    asked: list[type] = []
    monkeypatch.setattr(deferral._REHEARSALS, "ready", lambda kind, make: bool(asked.append(kind)))
    for name in ("access", "insert", "evict", "remove", "pin", "unpin", "displace", "wanted"):
        monkeypatch.setattr(HazardIndex, name, never)
    prompts = [[seed] * (3 * PAGE + 1) for seed in range(9)]
    with toy.make_kv(toy.simple(), pages=16, policy="hazard") as kv:
        for n, prompt in enumerate(prompts):
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
            if n:  # one that is asked again and again stays
                toy.published(kv, prompts[0])
        assert set(asked) == {HazardIndex}
        known = []
        for prompt in prompts:
            with kv.open(prompt) as seq:
                known.append(seq.length // PAGE)
        assert known[0] == known[8] == 3 and known[1] == 0, known
        for prompt in prompts:
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
